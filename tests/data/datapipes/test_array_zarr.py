"""Dense arrays: the same store, the same promises."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.array_zarr import ArrayZarrReader, ArrayZarrWriter
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.errors import DataError
from tests.data.random_structures import structure


def test_one_array_comes_back_as_a_tensor(tmp_path: Path) -> None:
    x = torch.randn(50, 2)
    assert ArrayZarrWriter(tmp_path / "x.zarr", metadata={"set": "moons"}).write(x) == 50
    reader = ArrayZarrReader(tmp_path / "x.zarr")
    found = reader.read_many([3, 49, 3])
    assert isinstance(found, torch.Tensor) and torch.equal(found, x[[3, 49, 3]])
    assert len(reader) == 50 and reader.field_names == ("x",) and reader.shapes == {"x": (2,)}
    assert reader.metadata == {"set": "moons"}
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "x.zarr", mode="r")["r1/sample/x"][:], x.numpy())  # type: ignore[index]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (
            torch.ones(3, 2, dtype=torch.bfloat16),
            r"found: torch.bfloat16; needed: bool, .*float64; do this: write tensor.float\(\)",
        ),
        (torch.eye(3).to_sparse(), r"found: torch.sparse_coo; do this: write tensor.to_dense\(\)"),
    ],
)
def test_tensors_that_numpy_lacks_are_told_with_the_cure(tensor: torch.Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        ArrayZarrWriter(tmp_path / "x.zarr").write(tensor)


def test_named_arrays_come_back_as_a_mapping(tmp_path: Path) -> None:
    arrays = {"image": torch.randint(0, 255, (9, 3, 8, 8), dtype=torch.uint8), "label": np.arange(9)}
    ArrayZarrWriter(tmp_path / "x.zarr", units={"label": "class"}).write(arrays)
    reader = ArrayZarrReader(tmp_path / "x.zarr")
    found = reader.read_many(torch.tensor([8, 0]))
    assert isinstance(found, dict) and torch.equal(found["image"], torch.as_tensor(arrays["image"])[[8, 0]])
    assert found["label"].tolist() == [8, 0] and reader.units == {"image": "", "label": "class"}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0, 100, 10**8]),
)
@settings(max_examples=25, deadline=None)
def test_any_history_reads_as_written(sizes: list[int], chunk: int, chunks: int, cache_bytes: int) -> None:
    store = zarr.storage.MemoryStore()
    rng = np.random.default_rng(len(sizes))
    blocks = [{"a": rng.normal(size=(n, 3)), "b": rng.integers(0, 9, n)} for n in sizes]
    for block in blocks:
        ArrayZarrWriter(store, chunk_rows=chunk, shard_rows=chunk * chunks).append(block)
    reader = ArrayZarrReader(store, cache_bytes=cache_bytes)
    assert len(reader) == sum(sizes)
    order = rng.integers(0, sum(sizes), 20)
    found = reader.read_many(order)
    for name in ("a", "b"):
        np.testing.assert_array_equal(found[name].numpy(), np.concatenate([block[name] for block in blocks])[order])  # type: ignore[index]
    reader.verify()


def test_blocks_are_streamed(tmp_path: Path) -> None:
    ArrayZarrWriter(tmp_path / "x.zarr", chunk_rows=8, shard_rows=16).write(torch.full((7, 2), float(i)) for i in range(10))
    found = ArrayZarrReader(tmp_path / "x.zarr").read_many(range(70))
    assert isinstance(found, torch.Tensor) and found[:, 0].tolist() == [float(i // 7) for i in range(70)]


def test_a_lost_chunk_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    ArrayZarrWriter(path, chunk_rows=4, shard_rows=8).write(torch.randn(30, 2))
    (path / "r1/sample/x/c/1/0").unlink()
    reader = ArrayZarrReader(path)
    reader.read_many([0, 29])
    with pytest.raises(
        DataError, match=r"array r1/sample/x, chunk 2 \(rows 8 to 11\), file r1/sample/x/c/1/0: the file is missing"
    ):
        reader.read_many(range(30))
    with pytest.raises(DataError, match="the file is missing"):
        reader.verify()


def test_what_does_not_fit_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    writer = ArrayZarrWriter(path)
    with pytest.raises(DataError, match="nothing to write"):
        writer.write([])
    with pytest.raises(DataError, match="arrays of different lengths"):
        writer.write({"a": torch.zeros(3), "b": torch.zeros(4)})
    with pytest.raises(DataError, match="no samples"):
        writer.write(torch.tensor(3.0))
    with pytest.raises(DataError, match="not a block of samples; found: str"):
        writer.write(["x"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="bfloat16"):
        writer.write(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(DataError, match="cannot hold"):
        writer.write(np.array(["a", "b"]))
    writer.write({"a": torch.zeros(3, 2)})
    for wrong, message in (
        (torch.zeros(3, 2), "mixed"),
        ({"a": torch.zeros(3, 3)}, "does not fit"),
        ({"a": torch.zeros(3, 2, dtype=torch.float64)}, "does not fit"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, "same arrays"),
        ({"b": torch.zeros(3)}, "same arrays"),
    ):
        with pytest.raises(DataError, match=message):
            writer.append(wrong)
    with pytest.raises(DataError, match="unit of a is not the store's"):
        ArrayZarrWriter(path, units={"a": "m"}).append({"a": torch.zeros(3, 2)})
    with pytest.raises(DataError, match="exists"):
        writer.write({"a": torch.zeros(3, 2)})
    with pytest.raises(DataError, match="another kind of store"):
        AtomicDataZarrReader(path)
    with pytest.raises(DataError, match="another kind of store"):
        AtomicDataZarrWriter(path).append(structure(0, 3))
    assert len(ArrayZarrReader(path)) == 3


def test_a_reader_is_pickled_by_its_path(tmp_path: Path) -> None:
    x = torch.randn(1000, 8)
    ArrayZarrWriter(tmp_path / "x.zarr").write(x)
    reader = ArrayZarrReader(tmp_path / "x.zarr")
    reader.read_many([0])
    raw = pickle.dumps(reader)
    found = pickle.loads(raw).read_many([999])
    assert len(raw) < 5000 and torch.equal(found, x[[999]])
