from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import (
    AtomBudgetBatchSampler,
    DataLoader,
    DistributedSamplerProtocol,
    InMemoryDataset,
    MultiDataset,
    shard_loader,
)
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import structure


class Sized(SimpleNamespace):
    """What the sampler needs of a data set."""

    def __len__(self) -> int:
        return len(self.num_atoms)


def of_sizes(*num_atoms: int) -> Any:
    return Sized(num_atoms=np.array(num_atoms, np.int64), name="a.zarr")


counts = st.lists(st.integers(1, 60), min_size=0, max_size=500)


@settings(max_examples=120, deadline=None)
@given(
    sizes=counts,
    replicas=st.integers(1, 16),
    budget=st.integers(60, 300),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_the_bound_holds_and_ranks_have_as_many(
    sizes: list[int], replicas: int, budget: int, drop_last: bool, shuffle: bool, epoch: int, data: st.DataObject
) -> None:
    parts, fresh = [], []
    for rank in range(replicas):
        sampler = AtomBudgetBatchSampler(
            of_sizes(*sizes), budget, num_replicas=replicas, rank=rank, drop_last=drop_last, shuffle=shuffle, seed=2
        )
        sampler.set_epoch(epoch)
        part = list(sampler)
        assert len(part) == len(sampler)
        position = data.draw(st.integers(0, len(part)))
        assert list(sampler.iter_from(position)) == part[position:]
        flat = [i for batch in part for i in batch]
        fresh += flat[: len(flat) - sampler.num_padded]
        parts.append(part)
    assert len({len(part) for part in parts}) == 1
    batches = [batch for part in parts for batch in part]
    assert all(batch and sum(sizes[i] for i in batch) <= budget for batch in batches)
    assert len(fresh) == len(set(fresh))
    if not drop_last or replicas == 1:
        assert set(fresh) == set(range(len(sizes)))


def test_batches_are_full_and_ranks_balanced() -> None:
    sizes = np.random.default_rng(0).integers(5, 60, 5000)
    parts = [list(AtomBudgetBatchSampler(of_sizes(*sizes), 1000, num_replicas=4, rank=rank)) for rank in range(4)]
    work = np.array([[sizes[batch].sum() for batch in part] for part in parts])
    assert work[:, :-1].mean() > 960 and work[:, :-1].min() > 1000 - 60
    assert work.sum(1).max() / work.sum(1).min() < 1.02


def test_batches_are_formed_anew_each_epoch() -> None:
    sampler = AtomBudgetBatchSampler(of_sizes(*range(1, 60)), 100, seed=1)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append({frozenset(batch) for batch in sampler})
    assert epochs[0] == epochs[2]
    assert len(epochs[0] & epochs[1]) < 5


def test_a_running_iterator_keeps_its_epoch() -> None:
    sampler = AtomBudgetBatchSampler(of_sizes(*range(1, 60)), 100, seed=1)
    expected = list(sampler)
    running = iter(sampler)
    head = [next(running)]
    sampler.set_epoch(1)
    assert head + list(running) == expected


def test_on_another_number_of_ranks() -> None:
    """K02, where batches are of any size."""
    sizes = np.random.default_rng(1).integers(5, 60, 200).tolist()
    used = [
        i
        for rank in range(2)
        for b in list(AtomBudgetBatchSampler(of_sizes(*sizes), 200, num_replicas=2, rank=rank))[:6]
        for i in b
    ]
    for replicas in (1, 3, 4):
        rest = []
        for rank in range(replicas):
            sampler = AtomBudgetBatchSampler(of_sizes(*sizes), 200, num_replicas=replicas, rank=rank).after(len(used))
            flat = [i for batch in sampler for i in batch]
            rest += flat[: len(flat) - sampler.num_padded]
        assert sorted(used + rest) == list(range(200))


def test_1024_ranks() -> None:
    sizes = np.random.default_rng(2).integers(5, 60, 30_000)
    one = AtomBudgetBatchSampler(of_sizes(*sizes), 100)
    parts = [list(one.divided(1024, rank)) for rank in range(0, 1024, 64)]
    assert len({len(part) for part in parts}) == 1
    assert one.divided(1024, 0).dealt() == 30_000


def test_edges_bound_too() -> None:
    sizes, edges = [5] * 40, [10, 100] * 20
    sampler = AtomBudgetBatchSampler(of_sizes(*sizes), 50, max_edges=300, num_edges=edges)
    batches = list(sampler)
    assert sorted(i for batch in batches for i in batch) == list(range(40))
    assert all(sum(edges[i] for i in batch) <= 300 and 5 * len(batch) <= 50 for batch in batches)


def test_several_data_sets_through_a_loader() -> None:
    a = InMemoryDataset([structure(i, 1 + i % 9) for i in range(30)], name="a")
    b = InMemoryDataset([structure(i, 2) for i in range(5)], name="b")
    both = MultiDataset(a, b)
    sampler = AtomBudgetBatchSampler(both, 20, weights=[1, 1], epoch_policy="max_size", seed=3)
    assert isinstance(sampler, DistributedSamplerProtocol)
    loader = DataLoader(both, batch_sampler=sampler)
    batches = list(loader)
    assert len(batches) == len(loader) and all(batch.num_nodes <= 20 for batch in batches)
    assert sum(int(batch.dataset_index.sum()) for batch in batches) == 30
    ranks = [shard_loader(loader, rank, 2) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    assert sum(len(batch) for one in ranks for batch in one) == 60
    with pytest.raises(DataError, match=r"sample 8 of a alone.*9 atoms.*needed: max_atoms of at least 9"):
        AtomBudgetBatchSampler(both, 8)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "no budget"),
    ({"max_atoms": 0}, "max_atoms"),
    ({"max_edges": 5}, "num_edges"),
    ({"max_edges": 5, "num_edges": [1]}, "for each structure"),
    ({"max_atoms": 9, "weights": [1]}, "MultiDataset"),
    ({"max_atoms": 9, "rank": 1}, "go together"),
    ({"max_atoms": 9, "rank": 2, "num_replicas": 2}, "one of its replicas"),
]


@pytest.mark.parametrize(("kwargs", "message"), WRONG)
def test_wrong_settings(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AtomBudgetBatchSampler(of_sizes(3, 4), **kwargs)


def test_one_structure_over_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"sample 1 of a.zarr alone is over"):
        AtomBudgetBatchSampler(of_sizes(3, 40), 20)
