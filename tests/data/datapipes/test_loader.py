from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    InMemoryDataset,
    RandomSampler,
)
from nvalchemi.data.datapipes.prefetch import Prefetcher
from nvalchemi.data.datapipes.transfer import pinned, tensors_of
from nvalchemi.data.transforms import NeighborList, Transform
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import same_batch, structure


@pytest.fixture(scope="module")
def data() -> list[AtomicData]:
    return [structure(seed, 1 + seed % 7, frozenset({"energy", "forces"})) for seed in range(50)]


class Resident(InMemoryDataset):
    """Resident, but read ahead in a thread as a store is."""

    immediate = False


@pytest.fixture(scope="module")
def dataset(data: list[AtomicData]) -> InMemoryDataset:
    return Resident(data)


def order(batches: object) -> list[list[int]]:
    return [batch.sample_index.tolist() for batch in batches]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def threads() -> int:
    return sum(thread.name == "nvalchemi-prefetch" for thread in threading.enumerate())


def settles(condition, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


# -- order -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch_factor", [0, 1, 5])
def test_order_depends_on_seed_and_epoch_alone(dataset: InMemoryDataset, prefetch_factor: int) -> None:
    def loader(seed: int = 0) -> DataLoader:
        return DataLoader(dataset, batch_size=8, shuffle=True, seed=seed, prefetch_factor=prefetch_factor)

    one, other = loader(), loader()
    first = order(one)
    assert sorted(flat(first)) == list(range(50))
    assert [len(batch) for batch in first] == [8] * 6 + [2]
    assert len(one) == 7
    assert order(one) == first == order(other)
    one.set_epoch(3)
    third = order(one)
    assert third != first
    assert sorted(flat(third)) == list(range(50))
    other.set_epoch(3)
    assert order(other) == third
    assert order(loader(seed=1)) != first


def test_in_order_without_shuffle_and_whole_batches_with_drop_last(dataset: InMemoryDataset) -> None:
    assert flat(order(DataLoader(dataset, batch_size=8))) == list(range(50))
    loader = DataLoader(dataset, batch_size=8, drop_last=True)
    assert len(loader) == len(order(loader)) == 6
    assert len(list(DataLoader(dataset))) == 50


def test_position_is_sought_and_nothing_before_it_is_read(data: list[AtomicData]) -> None:
    read: list[int] = []

    class Recording(InMemoryDataset):
        def read_many(self, indices, *, epoch=0, stream=0):
            read.extend(indices)
            return super().read_many(indices, epoch=epoch, stream=stream)

    loader = DataLoader(Recording(data), batch_size=8, shuffle=True, prefetch_factor=0)
    loader.set_epoch(2)
    whole = order(loader)
    for k in range(8):
        read.clear()
        assert order(loader.iter_from(k)) == whole[k:]
        assert read == flat(whole[k:])
    with pytest.raises(ConfigError, match="no batch 8"):
        loader.iter_from(8)


def test_running_iterators_keep_their_epoch_and_do_not_disturb_each_other(dataset: InMemoryDataset) -> None:
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    expected = order(loader)
    first, second = iter(loader), iter(loader)
    loader.set_epoch(1)
    third = iter(loader)
    pairs = list(zip(first, second, third, strict=True))
    assert order(pair[0] for pair in pairs) == expected == order(pair[1] for pair in pairs)
    assert order(pair[2] for pair in pairs) == order(loader) != expected


def test_foreign_samplers(dataset: InMemoryDataset) -> None:
    torch_sampler = torch.utils.data.DistributedSampler(dataset, 2, 1, seed=5)
    batch_sampler = torch.utils.data.BatchSampler(torch_sampler, 6, drop_last=False)
    for loader in (DataLoader(dataset, 6, sampler=torch_sampler), DataLoader(dataset, batch_sampler=batch_sampler)):
        loader.set_epoch(0)
        zero = order(loader)
        loader.set_epoch(7)
        assert torch_sampler.epoch == 7
        assert order(loader) != zero
        assert order(loader.iter_from(2)) == order(loader)[2:]
        assert loader.sampler is torch_sampler
        assert loader.batch_size == 6
    loader = DataLoader(dataset, batch_sampler=[[1, 2], [0], [4, 4, 4]])
    assert order(loader) == [[1, 2], [0], [4, 4, 4]]
    assert order(loader.iter_from(1)) == [[0], [4, 4, 4]]
    assert (loader.sampler, loader.batch_size, len(loader)) == (None, None, 3)
    random = DataLoader(dataset, 6, sampler=torch.utils.data.RandomSampler(dataset))
    assert sorted(flat(order(random))) == list(range(50))
    with pytest.raises(ConfigError, match="cannot be sought"):
        random.iter_from(1)


def test_other_batches_for_the_same_loader(dataset: InMemoryDataset) -> None:
    loader = DataLoader(dataset, 8, shuffle=True, prefetch_factor=5, batch_transforms=[NeighborList(3.0)])
    loader.set_epoch(4)
    parts = [loader.with_batch_sampler(BatchSampler(DistributedSampler(dataset, 2, rank), 4)) for rank in range(2)]
    assert all(part.epoch == part.sampler.epoch == 4 and part.prefetch_factor == 5 for part in parts)
    assert sorted(flat(batch for part in parts for batch in order(part))) == list(range(50))
    assert "edge_index" in next(iter(parts[0]))
    assert isinstance(loader.sampler, RandomSampler)


# -- transforms ------------------------------------------------------------------------------------------------------------------------


def test_batch_transforms(dataset: InMemoryDataset) -> None:
    class Shake(Transform):
        def __call__(self, batch, generator):
            shift = torch.rand((), generator=generator, dtype=torch.float64)
            return batch.replace(positions=batch.positions + shift, levels=None)

    def draws(epoch: int, start: int = 0) -> list[float]:
        loader = DataLoader(dataset, batch_size=10, batch_transforms=[NeighborList(3.0), Shake()])
        loader.set_epoch(epoch)
        batches = list(loader.iter_from(start))
        assert all(batch.neighbor_cutoff == 3.0 for batch in batches)
        return [float(batch.positions[0, 0] - dataset[int(batch.sample_index[0])].positions[0, 0]) for batch in batches]

    zero, one = draws(0), draws(1)
    assert len({round(x, 9) for x in zero + one}) == 10
    assert draws(1) == one
    assert draws(1, start=3) == one[3:]
    with pytest.raises(DataError, match="gave no batch"):
        next(iter(DataLoader(dataset, batch_transforms=[lambda batch: None])))


# -- the thread ------------------------------------------------------------------------------------------------------------------------


class Failing(Resident):
    """Breaks at sample 30."""

    def read_many(self, indices, *, epoch=0, stream=0):
        if 30 in indices:
            raise OSError("disk gone")
        return super().read_many(indices, epoch=epoch, stream=stream)


@pytest.mark.parametrize("prefetch_factor", [0, 3])
@pytest.mark.parametrize("immediate", [False, True])
def test_an_error_is_raised_where_its_batch_is_asked_for(data: list[AtomicData], prefetch_factor: int, immediate: bool) -> None:
    before = threads()
    dataset = Failing(data)
    dataset.immediate = immediate
    batches = iter(DataLoader(dataset, batch_size=8, prefetch_factor=prefetch_factor))
    assert order([next(batches), next(batches), next(batches)])[-1] == list(range(16, 24))
    with pytest.raises(OSError, match="disk gone") as caught:
        next(batches)
    assert "in read_many" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert "batch 3 of epoch 0" in caught.value.__notes__[0]
    assert next(batches, None) is None
    assert settles(lambda: threads() == before)


def test_leaving_early_ends_the_thread(dataset: InMemoryDataset) -> None:
    before = threads()
    for _ in DataLoader(dataset, batch_size=2, prefetch_factor=2):
        break
    gc.collect()
    assert settles(lambda: threads() == before)
    batches = iter(DataLoader(dataset, batch_size=2))
    next(batches)
    batches.close()
    assert threads() == before


def test_a_thread_is_used_where_it_helps(data: list[AtomicData]) -> None:
    def threaded(loader: DataLoader) -> bool:
        return isinstance(iter(loader), Prefetcher)

    assert not threaded(DataLoader(InMemoryDataset(data)))
    assert threaded(DataLoader(InMemoryDataset(data), batch_transforms=[NeighborList(3.0)]))
    assert threaded(DataLoader(InMemoryDataset(data, transforms=[lambda d: d])))
    assert threaded(DataLoader(InMemoryDataset(data, device="meta")))
    assert not threaded(DataLoader(InMemoryDataset(data, transforms=[lambda d: d]), prefetch_factor=0))
    assert order(DataLoader(InMemoryDataset(data), 8, shuffle=True)) == order(DataLoader(Resident(data), 8, shuffle=True))


def test_no_batch_outlives_its_use(dataset: InMemoryDataset) -> None:
    import weakref

    class Tracked(Resident):
        alive: weakref.WeakSet = weakref.WeakSet()

        def read_many(self, indices, *, epoch=0, stream=0):
            batch = super().read_many(indices, epoch=epoch, stream=stream)
            self.alive.add(batch.positions)
            return batch

    tracked = Tracked([structure(i, 3) for i in range(40)])
    most = 0
    for batch in DataLoader(tracked, batch_size=2, prefetch_factor=3):
        most = max(most, len(tracked.alive))
        del batch
    assert most <= 5  # three wait, one is being made, one is in use


# -- arguments -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"prefetch_factor": -1}, "prefetch_factor"),
        ({"prefetch_factor": None}, "prefetch_factor"),
        ({"shuffle": True, "sampler": [0]}, "leave out shuffle"),
        ({"sampler": [0], "batch_sampler": [[0]]}, "leave out batch_size"),
        ({"batch_size": 4, "batch_sampler": [[0]]}, "leave out batch_size"),
        ({"shuffle": True, "batch_sampler": [[0]]}, "leave out batch_size"),
        ({"drop_last": True, "batch_sampler": [[0]]}, "leave out batch_size"),
        ({"sampler": iter([0, 1])}, "an iterator"),
        ({"batch_sampler": iter([[0, 1]])}, "an iterator"),
        ({"sampler": 3}, "a sampler"),
        ({"batch_transforms": NeighborList(3.0)}, r"batch_transforms=\[\.\.\.\]"),
    ],
)
def test_wrong_arguments(dataset: InMemoryDataset, arguments: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DataLoader(dataset, **arguments)


def test_wrong_data_sets(data: list[AtomicData], tmp_path: Path) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(data)
    for wrong in (
        AtomicDataZarrReader(tmp_path / "a.zarr"),
        data,
        torch.zeros(3),
        torch.utils.data.TensorDataset(torch.zeros(3)),
    ):
        with pytest.raises(ConfigError, match="InMemoryDataset"):
            DataLoader(wrong)

    class Empty(InMemoryDataset):
        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="memory is empty"):
        DataLoader(Empty(data))


# -- device ----------------------------------------------------------------------------------------------------------------------------


def test_batches_are_delivered_on_the_device(data: list[AtomicData]) -> None:
    for prefetch_factor in (0, 2):
        loader = DataLoader(InMemoryDataset(data, device="meta"), batch_size=8, prefetch_factor=prefetch_factor)
        assert loader.device.type == "meta"
        assert {tensor.device.type for batch in loader for tensor in tensors_of(batch)} == {"meta"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_does_nothing_without_an_accelerator(dataset: InMemoryDataset) -> None:
    batch = next(iter(DataLoader(dataset, batch_size=4, pin_memory=True)))
    assert not batch.positions.is_pinned()
    x = torch.zeros(3)
    assert pinned(x) is x


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("prefetch_factor", [0, 4])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_cuda_batches_equal_those_on_the_cpu(data: list[AtomicData], prefetch_factor: int, pin_memory: bool) -> None:
    on_cpu = list(DataLoader(InMemoryDataset(data), batch_size=8, shuffle=True))
    loader = DataLoader(
        InMemoryDataset(data, device="cuda"), batch_size=8, shuffle=True, prefetch_factor=prefetch_factor, pin_memory=pin_memory
    )
    for _ in range(20):
        for batch, expected in zip(loader, on_cpu, strict=True):
            torch.cuda._sleep(100_000)  # the consumer's stream lags behind, so memory given back too soon would show
            assert batch.device.type == "cuda"
            assert same_batch(batch.to("cpu"), expected)


# -- speed -----------------------------------------------------------------------------------------------------------------------------


def test_b07_random_reads_cost_at_most_three_times_contiguous_ones(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    data = [structure(i, int(random.integers(5, 61)), frozenset({"energy", "forces"})) for i in range(100)]
    AtomicDataZarrWriter(tmp_path / "a.zarr", chunk_rows=256, shard_rows=4096).write(Batch.from_data_list(data * 20))

    def seconds(batches: list[list[int]]) -> float:
        best = float("inf")
        for _ in range(4):
            dataset = Dataset(AtomicDataZarrReader(tmp_path / "a.zarr"))
            begin = time.process_time()  # of all threads, whatever else the machine does
            found = order(DataLoader(dataset, batch_sampler=batches))
            best = min(best, time.process_time() - begin)
            assert found == batches
        return best

    contiguous = [[(start + k) % 2000 for k in range(64)] for start in range(0, 6400, 64)]
    shuffled = [random.integers(0, 2000, 64).tolist() for _ in range(100)]
    assert seconds(shuffled) <= 3 * seconds(contiguous)
