from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.training.context import Progress
from nvalchemi.training.cursor import Cursor, to_device

CPU = torch.device("cpu")


def epoch_of(cursor, progress, size=1):
    cursor.seek(progress)
    return list(cursor.groups(size))


def rows(groups):
    return [int(row) for group in groups for batch in group for row in batch[0]]


def torch_loader(**kwargs):
    return DataLoader(TensorDataset(torch.arange(20)), batch_size=2, **kwargs)


def test_groups_and_the_short_last_one():
    cursor = Cursor([1, 2, 3, 4, 5], CPU)
    assert epoch_of(cursor, Progress(), 2) == [[1, 2], [3, 4], [5]]
    assert cursor.read_all


def test_the_end_is_known_with_the_last_group():
    cursor = Cursor([1, 2], CPU)
    cursor.seek(Progress())
    groups = cursor.groups(1)
    next(groups)
    assert not cursor.read_all
    next(groups)
    assert cursor.read_all


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_torch_loader_resumes_within_its_order(workers, own_generator):
    def cursor():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return Cursor(torch_loader(shuffle=True, num_workers=workers, generator=generator), CPU, seed=3)

    unbroken = cursor()
    whole = [rows(epoch_of(unbroken, Progress(epoch=e))) for e in range(3)]
    torch.manual_seed(99)  # the order does not hang on the global stream
    assert rows(epoch_of(cursor(), Progress(epoch=1, batch=4))) == whole[1][8:]
    assert len({tuple(order) for order in whole}) == 3
    assert sorted(whole[2]) == list(range(20))


def test_the_order_leaves_the_global_stream_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    epoch_of(Cursor(torch_loader(shuffle=True), CPU), Progress())
    assert torch.equal(before, torch.get_rng_state())


def test_a_data_set_in_a_torch_loader_is_told_the_epoch():
    class Rows(TensorDataset):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    rows = Rows(torch.arange(4))
    Cursor(DataLoader(rows), CPU).seek(Progress(epoch=3))
    assert rows.epoch == 3


def test_samplers_are_told_the_epoch():
    class Sampler(torch.utils.data.Sampler):
        epoch = None

        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Sampler()
    Cursor(DataLoader(TensorDataset(torch.arange(4)), sampler=sampler), CPU).seek(Progress(epoch=2))
    assert sampler.epoch == 2


def test_a_seekable_loader_is_not_replayed():
    class Loader:
        sought = None

        def __iter__(self):
            raise AssertionError("replayed")

        def __len__(self):
            return 10

        def set_epoch(self, epoch):
            self.epoch = epoch

        def iter_from(self, batch):
            self.sought = batch
            return iter(range(batch, 10))

    loader = Loader()
    assert epoch_of(Cursor(loader, CPU), Progress(epoch=4, batch=7)) == [[7], [8], [9]]
    assert (loader.epoch, loader.sought) == (4, 7)


def test_a_position_at_the_epochs_end_has_nothing_left():
    cursor = Cursor([1, 2, 3], CPU)
    assert epoch_of(cursor, Progress(batch=3)) == []
    assert cursor.at_end


def test_an_empty_epoch_is_an_error():
    once = iter([1, 2])
    cursor = Cursor(once, CPU)
    assert len(epoch_of(cursor, Progress())) == 2
    with pytest.raises(TrainingError, match="no batch in this epoch"):
        epoch_of(cursor, Progress(epoch=1))


def test_a_loader_shorter_than_the_position_is_an_error():
    with pytest.raises(TrainingError, match=r"shorter.*found: 2 batches"):
        epoch_of(Cursor((x for x in (1, 2)), CPU), Progress(batch=5))


def test_what_cannot_be_iterated_over_is_refused():
    with pytest.raises(ConfigError, match="cannot be iterated"):
        Cursor(3, CPU)


def test_what_knows_no_device_stays_as_it_is():
    pair, own = namedtuple("Pair", "x y")(torch.zeros(2), np.zeros(3)), object()
    assert to_device(own, torch.device("cpu")) is own
    moved = to_device(pair, torch.device("meta"))
    assert type(moved) is type(pair) and moved.x.device.type == "meta" and moved.y is pair.y


def test_batches_keep_their_structure_on_the_way_to_the_device():
    batch = {"x": torch.zeros(2), "pair": (torch.ones(1), [torch.ones(2)]), "n": 3}
    moved = to_device(batch, CPU)
    assert moved["x"] is batch["x"]
    assert isinstance(moved["pair"], tuple)
    assert moved["n"] == 3
