from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch, Level
from nvalchemi.data.datapipes import (
    ArrayParquetReader,
    AtomicDataParquetReader,
    BlockShuffleSampler,
    DataLoader,
    Dataset,
    InMemoryDataset,
    PreShardedSampler,
    Reader,
    StoredInBlocks,
)
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import same, structure, structures

LEVELS = {"tag": "system", "spin": "atom"}


def table(data: list[AtomicData], flat: bool = False) -> pa.Table:
    """A table as anybody would write it: nested lists, or flat ones; null where a structure lacks a field."""

    def value(tensor: torch.Tensor) -> Any:
        return tensor.flatten().tolist() if flat and tensor.dim() else tensor.tolist()

    names = dict.fromkeys(name for d in data for name in d.field_names)
    return pa.table({name: [value(d[name]) if name in d.field_names else None for d in data] for name in names})


def written(path: Path, data: list[AtomicData], group: int = 7, flat: bool = False) -> Path:
    pq.write_table(table(data, flat), path, row_group_size=group, write_page_checksum=True)
    return path


@pytest.fixture(scope="module")
def data() -> list[AtomicData]:
    fields = frozenset({"cell", "energy", "forces", "stress", "charge", "dipole", "masses"})
    return [structure(i, 1 + i % 6, fields if i % 4 else frozenset({"energy"})) for i in range(40)]


@pytest.fixture(scope="module")
def folder(data: list[AtomicData], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in three files of unlike sizes."""
    path: Path = tmp_path_factory.mktemp("parquet")
    for number, part in enumerate((slice(0, 10), slice(10, 35), slice(35, 40))):
        written(path / f"part-{number}.parquet", data[part])
    return path


# -- what is read is what was written ----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(data=structures(min_size=1, max_size=12), group=st.integers(1, 5), flat=st.booleans(), draw=st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: list[AtomicData], group: int, flat: bool, draw: Any) -> None:
    flat = flat and not any({"spin"} & set(d.field_names) for d in data)  # a further field has no shape but that of its lists
    path = written(tmp_path_factory.mktemp("p") / "a.parquet", data, group, flat)
    there = {name for d in data for name in d.field_names}
    reader = AtomicDataParquetReader(path, levels={name: level for name, level in LEVELS.items() if name in there})
    assert len(reader) == len(data)
    assert set(reader.field_names) == there
    indices = draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=20))
    batch = reader.read_many(indices)
    assert batch.sample_index.tolist() == indices
    assert batch.field_names == reader.field_names
    for i, found in zip(indices, batch.to_data_list(), strict=True):
        assert same(found, data[i])


def test_a_folder_and_a_list_of_files(data: list[AtomicData], folder: Path) -> None:
    reader = AtomicDataParquetReader(folder)
    assert isinstance(reader, Reader) and isinstance(reader, StoredInBlocks)
    assert len(reader) == 40
    assert reader.num_atoms.tolist() == [d.num_atoms for d in data]
    assert reader.levels["forces"] is Level.ATOM
    assert reader.name == str(folder)
    assert all(same(found, data[i]) for i, found in enumerate(reader.read_many(range(40)).to_data_list()))
    last = AtomicDataParquetReader([folder / "part-2.parquet", folder / "part-0.parquet"])
    assert same(last.read(0), data[35]) and same(last.read(5), data[0])
    batch = reader.read_many([30, 2, 30])
    assert batch.has("forces").tolist() == [True, True, True]
    assert reader.read_many([0, 1]).has("forces").tolist() == [False, True]
    assert len(reader.read_many([])) == 0


def test_other_names_of_columns_and_float32(tmp_path: Path) -> None:
    data = [structure(i, 3, frozenset({"energy", "forces"}), torch.float32) for i in range(6)]
    made = table(data).rename_columns({"energy": "REF_energy", "forces": "REF_forces"})
    made = made.set_column(0, "positions", made["positions"].cast(pa.list_(pa.list_(pa.float32(), 3))))
    pq.write_table(made, tmp_path / "a.parquet")
    reader = AtomicDataParquetReader(tmp_path / "a.parquet", columns={"energy": "REF_energy", "forces": "REF_forces"})
    assert all(same(found, d) for found, d in zip(reader.read_many(range(6)).to_data_list(), data, strict=True))
    assert "energy" not in AtomicDataParquetReader(tmp_path / "a.parquet").field_names


def test_under_data_sets_and_loaders(data: list[AtomicData], folder: Path) -> None:
    dataset = Dataset(AtomicDataParquetReader(folder), dtype=torch.float32)
    for order in (True, "blocks"):
        loader = DataLoader(dataset, batch_size=7, shuffle=order, seed=1)  # type: ignore[arg-type]
        seen = [i for batch in loader for i in batch.sample_index.tolist()]
        assert sorted(seen) == list(range(40)) != seen
    resident = InMemoryDataset(AtomicDataParquetReader(folder))
    assert all(same(resident[i], data[i]) for i in range(40))


def test_a_file_for_each_rank(data: list[AtomicData], folder: Path) -> None:
    """Files of 10, 25 and 5 structures on three ranks: every rank takes as many steps, each of its own file."""
    files = sorted(folder.glob("*.parquet"))
    sizes = [len(AtomicDataParquetReader(file)) for file in files]
    assert sizes == [10, 25, 5]
    for rank, file in enumerate(files):
        dataset = Dataset(AtomicDataParquetReader(file))
        loader = DataLoader(dataset, batch_size=4, sampler=PreShardedSampler(dataset, sizes, 3, rank))
        assert len(loader) == len(list(loader)) == 7


# -- row groups ---------------------------------------------------------------------------------------------------------------------------


def test_row_groups_are_decoded_once_where_they_fit_and_in_blocks(folder: Path) -> None:
    whole = AtomicDataParquetReader(folder)
    for _ in range(2):
        for i in np.random.default_rng(0).permutation(40):
            whole.read_many([i])
    assert whole.decoded == 7  # 10 in two, 25 in four, 5 in one
    assert whole.block_size == 5 and whole.cached_samples == 40
    size = sum(tensor.nbytes for tensor in whole._group(0)[0].fields.values())
    tight = AtomicDataParquetReader(folder, cache_bytes=2 * size)
    assert 5 <= tight.cached_samples <= 20
    for i in range(40):
        tight.read_many([i])
    assert tight.decoded == 7
    for i in np.random.default_rng(0).permutation(40):
        tight.read_many([i])
    assert tight.decoded > 20
    with pytest.raises(ConfigError, match="does not hold a window"):
        next(iter(DataLoader(Dataset(tight), shuffle="blocks")))
    sampler = BlockShuffleSampler(Dataset(tight), block_size=5, window=2)
    assert len(list(DataLoader(Dataset(tight), sampler=sampler))) == 40


def test_threads_forks_and_copies(data: list[AtomicData], folder: Path) -> None:
    """B05: after the parent has read, and while it reads in a thread."""
    reader = AtomicDataParquetReader(folder, cache_bytes=0)
    stop, failed = threading.Event(), []

    def keep_reading() -> None:
        while not stop.is_set():
            if not same(reader.read_many([1, 30])[1], data[30]):
                failed.append(1)

    threads = [threading.Thread(target=keep_reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if same(reader.read_many([39])[0], data[39]) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.decoded == 0 and same(copy.read(12), data[12])


# -- what is refused ----------------------------------------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        columns = table(
            [structure(i, 2 + i % 2, frozenset({"energy", "forces", "cell", "stress"})) for i in range(4)]
        ).to_pydict()
        change(columns)
        pq.write_table(pa.table(columns), path / "a.parquet")
        return AtomicDataParquetReader(path / "a.parquet").read_many([0])

    return read


def _set(name: str, row: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda columns: columns[name].__setitem__(row, value)


REFUSED = {
    "no positions": (changed(lambda c: c.pop("positions")), r"has no column positions; found: the columns atomic_numbers"),
    "a force too few": (changed(_set("forces", 1, [[0.0, 0, 0]])), r"column forces.*in row 1; found: a list of 1; needed: 3"),
    "forces in a plane": (changed(_set("forces", 1, [[0.0, 0.0]] * 3)), r"column forces has lists of different lengths"),
    "missing within": (
        changed(_set("forces", 0, [[0.0, 0.0, None]] * 2)),
        r"column forces has missing values within a list; found: 2",
    ),
    "missing positions": (changed(_set("positions", 2, None)), r"column positions is missing in a row; found: sample 2"),
    "not finite": (
        changed(_set("positions", 1, [[float("nan"), 0, 0]] * 3)),
        r"not finite.*sample 1 of .*a.parquet, row group 0",
    ),
    "no element": (changed(_set("atomic_numbers", 1, [1, 200, 1])), r"unknown elements"),
    "words": (changed(lambda c: c.update(energy=["a"] * 4)), r"column energy does not hold numbers; found: string"),
    "half elements": (
        changed(lambda c: c.update(atomic_numbers=[[1.5] * n for n in (2, 3, 2, 3)])),
        r"wrong kind of numbers; found: float64",
    ),
    "too deep": (changed(lambda c: c.update(energy=[[[1.0]]] * 4)), r"column energy is not nested as energy is; found: 2"),
    "a cell of 8": (changed(lambda c: c.update(cell=[[1.0] * 8] * 4)), r"column cell.*found: a list of 8; needed: 9"),
    "no list": (changed(lambda c: c.update(atomic_numbers=[1] * 4)), r"column atomic_numbers has one number a row"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_columns_that_are_no_structures(tmp_path: Path, what: str) -> None:
    read, match = REFUSED[what]
    with pytest.raises(DataError, match=match):
        read(tmp_path)


def test_files_that_do_not_go(data: list[AtomicData], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent.parquet cannot be opened"):
        AtomicDataParquetReader(tmp_path / "absent.parquet")
    with pytest.raises(DataError, match="there are no parquet files"):
        AtomicDataParquetReader(tmp_path)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"no.parquet cannot be opened as a parquet file"):
        AtomicDataParquetReader(tmp_path / "no.parquet")
    other = written(tmp_path / "other.parquet", [structure(1, 2)])
    with pytest.raises(DataError, match=r"other.parquet has other columns than .*part-0"):
        AtomicDataParquetReader([folder / "part-0.parquet", other])
    with pytest.raises(DataError, match="no sample 40; found: 40 samples"):
        AtomicDataParquetReader(folder).read_many([40])
    with pytest.raises(DataError, match="has no column REF"):
        AtomicDataParquetReader(folder, columns={"energy": "REF"})
    with pytest.raises(DataError, match="colour is no known field"):
        AtomicDataParquetReader(folder, columns={"colour": "energy"})


def test_b15_another_unit_is_refused(tmp_path: Path) -> None:
    made = table([structure(1, 2, frozenset({"energy"}))])
    for unit, good in ((b"kcal/mol", False), (b"eV", True)):
        fields = [f.with_metadata({"unit": unit}) if f.name == "energy" else f for f in made.schema]
        pq.write_table(made.cast(pa.schema(fields)), tmp_path / "a.parquet")
        if good:
            assert AtomicDataParquetReader(tmp_path / "a.parquet").read(0).energy is not None
        else:
            with pytest.raises(DataError, match="unit of energy is not the package's; found: kcal/mol; needed: eV"):
                AtomicDataParquetReader(tmp_path / "a.parquet")


def test_b03_a_damaged_row_group_is_named(data: list[AtomicData], tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", data)
    raw = bytearray(path.read_bytes())
    chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    raw[middle : middle + 8] = bytes(255 - b for b in raw[middle : middle + 8])
    path.write_bytes(raw)
    reader = AtomicDataParquetReader(path)
    assert same(reader.read(3), data[3])
    with pytest.raises(DataError, match=r"a.parquet, row group 2"):
        reader.read_many([3, 15])


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install nvalchemi\[parquet\]"):
        AtomicDataParquetReader(folder)


# -- dense arrays -------------------------------------------------------------------------------------------------------------------------


def test_dense_arrays(tmp_path: Path) -> None:
    x = torch.randn(30, 2, 3, generator=torch.Generator().manual_seed(0))
    columns = {"x": pa.array(x.tolist(), pa.list_(pa.list_(pa.float32()))), "y": list(range(30))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=8)
    single = ArrayParquetReader(tmp_path / "a.parquet", columns="x")
    assert torch.equal(single.read_many([29, 0, 8, 0]), x[[29, 0, 8, 0]])
    assert single.read_many([]).shape == (0, 2, 3)
    both = ArrayParquetReader(tmp_path / "a.parquet")
    found = both.read_many([4, 20])
    assert found.keys() == {"x", "y"} and found["y"].tolist() == [4, 20] and both.field_names == ("x", "y")
    assert isinstance(both, StoredInBlocks)
    rows = [v for batch in DataLoader(Dataset(both), batch_size=7, shuffle="blocks") for v in batch["y"].tolist()]
    assert sorted(rows) == list(range(30)) and single.decoded == 3
    assert torch.equal(InMemoryDataset(single).read_many([3]), x[[3]])


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ([[1.0, 2.0], [1.0]], "lists of different lengths; found: 1 and 2"),
        ([1.0, None], "column x is missing in a row; found: sample 1"),
        (["a", "b"], "does not hold numbers"),
    ],
)
def test_what_is_no_dense_array(tmp_path: Path, column: list[Any], match: str) -> None:
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=match):
        ArrayParquetReader(tmp_path / "a.parquet").read_many([0])
    with pytest.raises(DataError, match="has no column y"):
        ArrayParquetReader(tmp_path / "a.parquet", columns=["y"])


def test_batches_of_the_reader_are_whole(data: list[AtomicData], folder: Path) -> None:
    batch = AtomicDataParquetReader(folder).read_many([3, 30, 12, 3])
    assert isinstance(batch, Batch)
    batch.validate()
