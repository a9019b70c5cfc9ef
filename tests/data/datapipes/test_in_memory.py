from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter, InMemoryDataset
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.data.transforms import NeighborList, Transform
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import same, same_batch, structure, structures


@settings(max_examples=40, deadline=None)
@given(data=structures(max_size=6), draw=st.data())
def test_batches_equal_those_made_of_the_list(data: list[AtomicData], draw: st.DataObject) -> None:
    dataset = InMemoryDataset(data)
    chosen = draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=8))
    batch = dataset.read_many(chosen)
    assert all(same(a, data[i]) for a, i in zip(batch.to_data_list(), chosen, strict=True))
    assert set(batch.fields) == set(dataset.field_names) == {name for d in data for name in d.field_names}
    assert batch.sample_index.tolist() == chosen
    assert torch.equal(batch.batch_idx, torch.repeat_interleave(torch.arange(len(chosen)), batch.num_nodes_per_graph))
    whole = Batch.from_data_list(data).index_select(chosen)
    whole.present = {field: mask for field, mask in whole.present.items() if not mask.all()}  # the others say nothing
    assert same_batch(batch, whole)


def test_edges_are_made_once_and_cut_out() -> None:
    periodic = structure(3, 4, frozenset({"cell", "energy"})).replace(pbc=True)
    data = [structure(1, 5, frozenset({"energy"})), periodic, structure(2, 1, frozenset({"energy"}))]
    dataset = InMemoryDataset(data, transforms=[NeighborList(3.5)])
    assert dataset.transforms == ()
    for chosen in ([2, 1, 0, 1], [0], [2], [1, 1]):
        batch = dataset.read_many(chosen)
        fresh = neighbor_list(Batch.from_data_list([data[i] for i in chosen]), 3.5)
        assert batch.neighbor_cutoff == 3.5
        assert batch.edge_index.dtype == torch.int64
        assert torch.equal(batch.edge_offsets, fresh.edge_offsets)
        vectors = [_edge_vectors(b) for b in (batch, fresh)]
        assert torch.allclose(*vectors)
        assert torch.equal(batch.edge_index, fresh.edge_index)
    assert same(dataset[0], NeighborList(3.5)(data[0]))


def _edge_vectors(batch: Batch) -> torch.Tensor:
    """Sorted by centre and components, so that the order within a centre does not matter."""
    j, i = batch.edge_index
    vectors = batch.positions[j] - batch.positions[i]
    if "edge_shift" in batch:
        vectors = vectors + torch.einsum("ek,ekl->el", batch.edge_shift, batch.cell[batch.batch_idx[i]])
    keys = torch.cat([i[:, None].to(vectors.dtype), vectors.round(decimals=9)], dim=1)
    return vectors[np.lexsort(keys.numpy().T[::-1])]


def test_deterministic_transforms_run_once_and_random_ones_each_time() -> None:
    calls = {"fixed": 0, "random": 0}

    class Fixed(Transform):
        deterministic = True

        def __call__(self, data, generator):
            calls["fixed"] += 1
            return data.replace(positions=data.positions + 1)

    class Random(Transform):
        def __call__(self, data, generator):
            calls["random"] += 1
            return data.replace(positions=data.positions + torch.rand((), generator=generator))

    data = [structure(i, 3) for i in range(4)]
    dataset = InMemoryDataset(data, transforms=[Fixed(), Random(), Fixed()])
    assert calls == {"fixed": 4, "random": 0}
    assert len(dataset.transforms) == 2  # the second fixed one stands behind a random one
    dataset.read_many([0, 1])
    assert calls == {"fixed": 6, "random": 2}


def test_cast_and_provenance() -> None:
    source = Batch.from_data_list([structure(i, 3, frozenset({"energy"})) for i in range(4)])
    dataset = InMemoryDataset(source, dtype=torch.float32, name="mine")
    batch = dataset.read_many([3, 1])
    assert batch.positions.dtype == torch.float32
    assert batch.energy.dtype == torch.float64
    assert batch.describe(0) == "sample 3 of mine"
    assert source.sample_index is None  # the caller's object is left alone
    assert source.positions.dtype == torch.float64


def test_batches_share_no_memory_with_the_data_set() -> None:
    dataset = InMemoryDataset([structure(i, 3, frozenset({"energy"})) for i in range(4)], transforms=[NeighborList(3.0)])
    batch = dataset.read_many([0, 1, 2, 3])
    before = batch.clone()
    for tensor in batch.fields.values():
        tensor.zero_()
    assert same_batch(dataset.read_many([0, 1, 2, 3]), before)


def test_an_empty_list_of_indices_gives_an_empty_batch() -> None:
    for transforms in ([], [NeighborList(3.0)]):
        batch = InMemoryDataset([structure(1, 3)], transforms=transforms).read_many([])
        assert batch.num_graphs == batch.num_nodes == batch.num_edges == 0


@pytest.mark.parametrize("source", [3, "a.zarr", [1, 2], torch.tensor(3.0), {}, {"x": torch.zeros(2), "y": torch.zeros(3)}, []])
def test_wrong_sources(source: object) -> None:
    with pytest.raises((ConfigError, DataError)):
        InMemoryDataset(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_dense_samples_of_any_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(6, 3).to(dtype)
    found = InMemoryDataset({"x": values, "label": torch.arange(6)}).read_many([4, 1])
    assert isinstance(found, dict) and found["x"].dtype is dtype
    assert torch.equal(found["x"].to(torch.complex64), values.to(torch.complex64)[[4, 1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_short_numbers_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    values = torch.ones(4, 2)
    values[2, 1] = torch.nan
    with pytest.raises(DataError, match="values of sample 2 of memory are not finite"):
        InMemoryDataset(values.to(dtype))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (np.ones((3, 2), ">f4"), "cannot become a tensor; found: >f4"),
        (np.array(["a", "b"]), "cannot become a tensor; found: <U1"),
        (torch.eye(3).to_sparse(), r"no rows to cut out; found: torch.sparse_coo; do this: give tensor.to_dense\(\)"),
    ],
)
def test_what_torch_has_no_rows_for_is_told(source: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        InMemoryDataset(source)


def test_short_batches_are_refused_with_the_way_to_compute_in_them() -> None:
    with pytest.raises(ConfigError, match="MixedPrecisionHook"):
        InMemoryDataset(torch.ones(3, 2), dtype=torch.bfloat16)


def test_filling_and_serving_are_fast(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    data = [structure(i, int(random.integers(5, 61)), frozenset({"energy", "forces"}), torch.float32) for i in range(300)]
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(Batch.from_data_list(data * 20))
    begin = time.process_time()
    dataset = InMemoryDataset(AtomicDataZarrReader(tmp_path / "a.zarr"))
    filled = time.process_time() - begin
    indices = random.integers(0, len(dataset), (50, 64))
    times = []
    for row in indices:
        begin = time.process_time()
        dataset.read_many(row)
        times.append(time.process_time() - begin)
    # Several times what it takes; benchmarks/loader.py has the figures.
    assert filled < 0.3
    assert min(times) < 64 / 150_000
