from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    DataLoader,
    Dataset,
    InMemoryDataset,
    MultiDataset,
    MultiDatasetBatchSampler,
    collate,
    shard_loader,
)
from nvalchemi.data.transforms import NeighborList, Transform
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.training.context import Progress
from nvalchemi.training.cursor import Cursor
from tests.data.random_structures import same, same_batch, structure

LABELS = frozenset({"energy", "forces"})
FIRST = [structure(seed, 1 + seed % 5, LABELS) for seed in range(12)]
SECOND = [structure(seed, 2 + seed % 3, LABELS) for seed in range(100, 107)]
RICH = [structure(seed, 3, LABELS | {"cell", "stress", "spin", "tag"}) for seed in range(200, 205)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "b.zarr"
    AtomicDataZarrWriter(path).write(SECOND)
    return path


@pytest.fixture(scope="module")
def both(store: Path) -> MultiDataset:
    return MultiDataset(InMemoryDataset(FIRST, name="a"), Dataset(AtomicDataZarrReader(store)))


@settings(max_examples=60, deadline=None)
@given(indices=st.lists(st.integers(0, 18), min_size=1, max_size=12))
def test_mixed_batches_in_the_asked_for_order(both: MultiDataset, indices: list[int]) -> None:
    everything = FIRST + SECOND
    batch = both.read_many(indices)
    assert batch.num_graphs == len(indices)
    assert all(same(one, everything[i]) for one, i in zip(batch.to_data_list(), indices, strict=True))
    assert same_batch(batch, Batch.from_data_list([everything[i] for i in indices]))
    assert batch.dataset_index.tolist() == [int(i >= 12) for i in indices]
    assert batch.sample_index.tolist() == [i % 12 for i in indices]
    batch.validate()


def test_an_index_of_the_whole_says_which_child(both: MultiDataset, store: Path) -> None:
    assert len(both) == 19 and both.lengths == (12, 7)
    child, local = both.locate(range(19))
    assert [both.to_global_index(c, i) for c, i in zip(child.tolist(), local.tolist(), strict=True)] == list(range(19))
    assert both.num_atoms.tolist() == [data.num_atoms for data in FIRST + SECOND]
    assert both.read_many([3, 14]).describe(1) == f"sample 2 of {both.names[1]}"
    assert "b.zarr" in both.names[1] and both.names[0] == "a"
    with pytest.raises(DataError, match="no sample 19"):
        both.read_many([19])
    with pytest.raises(DataError, match="no sample 7 of data set 1"):
        both.to_global_index(1, 7)


def test_without_a_sampler_a_loader_gives_all(both: MultiDataset) -> None:
    loader = DataLoader(both, batch_size=4, shuffle=True, seed=1)
    seen = [(int(d), int(i)) for batch in loader for d, i in zip(batch.dataset_index, batch.sample_index, strict=True)]
    assert sorted(seen) == [(0, i) for i in range(12)] + [(1, i) for i in range(7)]


def test_with_a_batch_sampler(both: MultiDataset) -> None:
    loader = DataLoader(both, batch_sampler=MultiDatasetBatchSampler.balanced(both, 6, num_batches=5))
    assert len(loader) == 5
    assert all(batch.dataset_index.sum() == 3 for batch in loader)
    rest = [batch.sample_index.tolist() for batch in loader.iter_from(3)]
    assert rest == [batch.sample_index.tolist() for batch in loader][3:]


@pytest.mark.parametrize("workers", [0, 1])
def test_in_the_loader_of_torch(both: MultiDataset, workers: int) -> None:
    loader = TorchLoader(both, batch_size=5, collate_fn=collate, num_workers=workers)
    data = [one for batch in loader for one in batch.to_data_list()]
    assert all(same(a, b) for a, b in zip(data, FIRST + SECOND, strict=True))
    assert same(both[15], SECOND[3])


def test_different_fields_are_refused_or_marked() -> None:
    a, b = InMemoryDataset(FIRST, name="a"), InMemoryDataset(RICH, name="rich")
    with pytest.raises(DataError, match=r"a lacks .*cell.*; needed"):
        MultiDataset(a, b)
    both = MultiDataset(a, b, output_strict=False)
    batch = both.read_many([12, 0, 16])
    assert batch.has("stress").tolist() == batch.has("spin").tolist() == batch.has("cell").tolist() == [True, False, True]
    assert torch.isnan(batch.stress[1]).all() and not batch.cell[1].any() and not batch.pbc[1].any()
    assert same(batch[0], RICH[0]) and same(batch[1], FIRST[0]) and same(batch[2], RICH[4])
    only = both.read_many([0, 5])  # from the poorer child alone: the same fields as any other batch
    assert set(only.fields) == set(batch.fields) == set(both.field_names)
    assert not only.has("stress").any() and only.stress.shape == (2, 3, 3) and only["spin"].shape[1:] == (2,)
    assert same(only[1], FIRST[5])
    assert same_batch(pickle.loads(pickle.dumps(both)).read_many([12, 0, 16]), batch)


class Noise(Transform):
    def __call__(self, data: AtomicData, generator: torch.Generator) -> AtomicData:
        return data.replace(positions=data.positions + 0.01 * torch.rand(data.positions.shape, generator=generator).double())


def test_transforms_of_children_draw_their_own_numbers() -> None:
    one = Dataset(_Reader(FIRST), transforms=[Noise()])
    other = Dataset(_Reader(FIRST), transforms=[Noise()])
    both = MultiDataset(one, other)
    first, again, later = (both.read_many([2, 14], epoch=epoch).positions for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    half = len(first) // 2
    assert not torch.equal(first[:half], first[half:])
    both.set_epoch(1)
    assert torch.equal(both.__getitems__([2]).positions, one.read_many([2], epoch=1).positions)


class _Reader:
    """Structures of a list, as a reader."""

    name = "list"

    def __init__(self, data: list[AtomicData]) -> None:
        self.batch = Batch.from_data_list(data)
        self.field_names = self.batch.field_names

    def __len__(self) -> int:
        return self.batch.num_graphs

    def read_many(self, indices: np.ndarray) -> Batch:
        return self.batch.index_select(torch.as_tensor(indices))


def test_neighbour_lists_go_together_or_are_refused() -> None:
    def made(cutoff: float | None, name: str) -> InMemoryDataset:
        return InMemoryDataset(FIRST, name=name, transforms=[NeighborList(cutoff)] if cutoff else [])

    both = MultiDataset(made(3.0, "a"), made(3.0, "b"), output_strict=False)
    batch = both.read_many([3, 20, 4])
    assert all(same(one, made(3.0, "c").read_many([i])[0]) for one, i in zip(batch.to_data_list(), (3, 8, 4), strict=True))
    batch.validate()
    for other in (made(4.0, "far"), made(None, "far")):
        mixed = MultiDataset(made(3.0, "a"), other, output_strict=False)
        with pytest.raises(DataError, match=r"a: 3\.0 Å, far: (4\.0 Å|none)"):
            mixed.read_many([0, 13])


def test_unlike_children_are_named() -> None:
    single = InMemoryDataset(FIRST, name="single", dtype=torch.float32)
    double = InMemoryDataset(SECOND, name="double")
    with pytest.raises(DataError, match=r"float32.* in single; .*float64.* in double"):
        MultiDataset(single, double).read_many([0, 12])
    dense = InMemoryDataset(torch.zeros(4, 2), name="dense")
    with pytest.raises(DataError, match="dense arrays"):
        MultiDataset(dense, double, output_strict=False).read_many([0, 4])
    with pytest.raises(ConfigError, match="at least one"):
        MultiDataset()
    with pytest.raises(ConfigError, match="not a list"):
        MultiDataset([single, double])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="different devices"):
        MultiDataset(single, InMemoryDataset(SECOND, device="meta"))


def test_a_damaged_sample_is_named_by_its_own_data_set() -> None:
    bad = Dataset(_Reader(SECOND))
    bad.reader.batch.positions[4] = float("nan")
    with pytest.raises(DataError, match="sample 1 of list"):
        MultiDataset(InMemoryDataset(FIRST, name="a"), bad).read_many([0, 13])


def test_dense_arrays() -> None:
    a, b = torch.arange(10.0).reshape(5, 2), -torch.arange(6.0).reshape(3, 2)
    both = MultiDataset(InMemoryDataset(a), InMemoryDataset(b))
    assert torch.equal(both.read_many([6, 0, 5, 6]), torch.stack([b[1], a[0], b[0], b[1]]))
    assert torch.equal(both[7], b[2])
    dicts = MultiDataset(InMemoryDataset({"x": a}), InMemoryDataset({"x": b}))
    assert torch.equal(dicts.read_many([6, 0])["x"], torch.stack([b[1], a[0]]))
    with pytest.raises(DataError, match="one shape"):
        MultiDataset(InMemoryDataset(a), InMemoryDataset(torch.zeros(2, 3))).read_many([0, 5])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_tells_the_epoch(both: MultiDataset, ranks: int) -> None:
    """B23: three different orders, the same coverage, repeatable; nobody calls set_epoch but the loop's cursor."""
    orders = []
    for epoch in (0, 1, 2, 1):
        order = []
        for rank in range(ranks):
            loader = DataLoader(both, batch_size=4, shuffle=True, seed=5)
            cursor = Cursor(shard_loader(loader, rank, ranks, None, {"drop_last": False}), torch.device("cpu"))
            cursor.seek(Progress(epoch=epoch))
            for (batch,) in cursor.groups(1):
                order += [(int(d), int(i)) for d, i in zip(batch.dataset_index, batch.sample_index, strict=True)]
        orders.append(order)
    assert orders[1] == orders[3] and len({tuple(order) for order in orders}) == 3
    assert all(set(order) == {(0, i) for i in range(12)} | {(1, i) for i in range(7)} for order in orders)
    assert all(len(order) == 19 + (ranks == 2) for order in orders)


def test_nested_sets_are_flat(both: MultiDataset) -> None:
    nested = MultiDataset(both, InMemoryDataset(FIRST[:2], name="c"))
    assert nested.lengths == (12, 7, 2)
    assert nested.read_many([20]).describe(0) == "sample 1 of c"
