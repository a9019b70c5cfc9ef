"""Which loaders can be read ahead."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset

from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes import DataLoader as OwnLoader
from nvalchemi.data.datapipes import InMemoryDataset
from nvalchemi.data.datapipes.ahead import draws_nothing
from nvalchemi.training.context import Progress
from nvalchemi.training.cursor import Cursor

STORED = TensorDataset(torch.arange(4))


class Drawing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.randn(2)


class Own(Sampler):
    def __iter__(self):
        return iter(torch.randint(4, (1,)).tolist() for _ in range(4))


class Quiet(Drawing):
    draws_nothing = True


@pytest.mark.parametrize(
    ("loader", "answer"),
    [
        ([1, 2], True),
        (DataLoader(STORED), True),
        (DataLoader(STORED, batch_size=None), True),
        (DataLoader(ConcatDataset([Subset(STORED, [1]), STORED])), True),
        (DataLoader([1, 2]), True),  # type: ignore[arg-type]
        (DataLoader(STORED, collate_fn=lambda items: items), False),
        (DataLoader(Drawing()), False),
        (DataLoader(Subset(Drawing(), [0])), False),
        (DataLoader(Quiet(), collate_fn=lambda items: items), True),  # as it says
        (DataLoader(STORED, sampler=Own()), False),
        (DataLoader(STORED, sampler=Own(), num_workers=1), False),  # samplers stay in this process
        (DataLoader(STORED, batch_sampler=Own()), False),
        (DataLoader(Quiet(), sampler=Own()), True),
        (DataLoader(STORED, sampler=DistributedSampler(STORED, 2, 0)), True),
        (DataLoader(Drawing(), num_workers=1), True),  # a stream of its own
        (iter([1]), False),
    ],
)
def test_what_makes_a_batch_may_draw(loader, answer):
    assert draws_nothing(loader) is answer


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_that_is_to_make_each_batch_when_asked_is_not_asked_before(prefetch):
    data = InMemoryDataset([AtomicData(atomic_numbers=[1], positions=[[0.0, 0.0, 0.0]])] * 4)
    cursor = Cursor(OwnLoader(data, prefetch_factor=prefetch), torch.device("cpu"))
    cursor.seek(Progress())
    assert cursor.by_position is bool(prefetch)
