"""Writing, appending, committing, killing, locking, deleting."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes.files import open_files
from nvalchemi.data.datapipes.layout import ATOMIC_FORMAT
from nvalchemi.data.datapipes.store_writer import StoreWriter
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.errors import ConfigError, DataError
from tests.data.random_structures import same, structure, structures

LABELS = frozenset(["energy", "forces"])


def some(count: int, fields: frozenset[str] = LABELS, seed: int = 0) -> list[AtomicData]:
    return [structure(seed + i, 2 + i % 5, fields) for i in range(count)]


def plain(path: Path) -> zarr.Group:
    """The arrays as zarr-python itself gives them."""
    root = zarr.open_group(path, mode="r")
    group = root[root.attrs["nvalchemi"]["revision"]]  # type: ignore[index, call-overload]
    assert isinstance(group, zarr.Group)
    return group


def everything(store: object) -> list[AtomicData]:
    reader = AtomicDataZarrReader(store)
    return reader.read_many(range(len(reader))).to_data_list()


def same_all(found: list[AtomicData], expected: list[AtomicData]) -> bool:
    return len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True))


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["blosc", "zstd", "none", {"name": "gzip", "configuration": {"level": 1}}])
def test_plain_zarr_reads_what_was_written(tmp_path: Path, compressor: str) -> None:
    data = [*some(20), *some(3, LABELS | {"cell", "stress", "tag"})]
    AtomicDataZarrWriter(tmp_path / "a.zarr", chunk_rows=4, shard_rows=16, compressor=compressor).write(data)
    group, batch = plain(tmp_path / "a.zarr"), Batch.from_data_list(data)
    for name, tensor in batch.fields.items():
        np.testing.assert_array_equal(group[f"{batch.levels[name]}/{name}"][:], tensor.numpy())  # type: ignore[index]
    for name, mask in batch.present.items():
        np.testing.assert_array_equal(group[f"present/{name}"][:], mask.numpy())  # type: ignore[index]
    np.testing.assert_array_equal(group["ends/atom"][:], batch.atom_offsets[1:].numpy())  # type: ignore[index]
    assert group["atom/forces"].attrs["unit"] == "eV/angstrom"


def test_what_plain_zarr_writes_in_this_layout_is_read(tmp_path: Path) -> None:
    data = some(20)
    AtomicDataZarrWriter(tmp_path / "a.zarr", chunk_rows=4, shard_rows=16).write(data)
    root = zarr.open_group(tmp_path / "a.zarr", mode="r+")
    array = root["r1/atom/positions"]
    assert isinstance(array, zarr.Array)
    array[:] = np.asarray(array[:]) + 1
    found = everything(tmp_path / "a.zarr")
    assert all(torch.equal(a.positions, b.positions + 1) for a, b in zip(found, data, strict=True))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[AtomicData]], int, int]:
    parts = draw(st.lists(structures(min_size=1, max_size=7), min_size=1, max_size=4))
    chunk = draw(st.integers(1, 9))
    return parts, chunk, chunk * draw(st.integers(1, 5))


def check_history(store: object, parts: list[list[AtomicData]], chunk: int, shard: int, cache_bytes: int, seed: int) -> None:
    expected = [data for part in parts for data in part]
    for number, part in enumerate(parts):
        writer = AtomicDataZarrWriter(store, chunk_rows=chunk, shard_rows=shard)
        if number == 0:
            writer.write(part)
        else:
            writer.append(data for data in part)
    assert same_all(everything(store), expected)
    reader = AtomicDataZarrReader(store, cache_bytes=cache_bytes)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        order = rng.integers(0, len(expected), rng.integers(1, 2 * len(expected) + 1))
        batch = reader.read_many(order)
        assert same_all(batch.to_data_list(), [expected[i] for i in order])
        assert set(batch.fields) == {name for data in expected for name in data.field_names}
        assert batch.sample_index is not None and batch.sample_index.tolist() == order.tolist()
        batch.validate()
    reader.verify()


@given(histories(), st.sampled_from([0, 2000, 10**8]), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_any_history_of_writes_reads_as_written(
    history: tuple[list[list[AtomicData]], int, int], cache_bytes: int, seed: int
) -> None:
    parts, chunk, shard = history
    check_history(zarr.storage.MemoryStore(), parts, chunk, shard, cache_bytes, seed)


@given(histories(), st.sampled_from([0, 2000, 10**8]), st.integers(0, 1000))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_writes_to_a_folder_reads_as_written(
    tmp_path: Path, history: tuple[list[list[AtomicData]], int, int], cache_bytes: int, seed: int
) -> None:
    parts, chunk, shard = history
    shutil.rmtree(tmp_path / "a.zarr", ignore_errors=True)
    check_history(tmp_path / "a.zarr", parts, chunk, shard, cache_bytes, seed)


def with_edges(seed: int, cutoff: float = 3.0, periodic: bool = False) -> AtomicData:
    data = structure(seed, 4, LABELS | ({"cell"} if periodic else set()))
    count = seed % 4
    edges = torch.stack([torch.arange(count), torch.arange(count).add(1)])
    shift = torch.zeros(count, 3, dtype=torch.float64) if periodic else None
    return AtomicData(**data.fields, edge_index=edges, edge_shift=shift, neighbor_cutoff=cutoff)


def test_edges_come_back_and_are_global_in_the_batch(tmp_path: Path) -> None:
    data = [with_edges(i, periodic=i % 3 == 0) for i in range(12)]
    AtomicDataZarrWriter(tmp_path / "a.zarr", chunk_rows=2, shard_rows=4).write(data[:7])
    AtomicDataZarrWriter(tmp_path / "a.zarr").append(data[7:])
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    order = [11, 3, 3, 0, 5]
    batch, expected = reader.read_many(order), Batch.from_data_list([data[i] for i in order])
    assert torch.equal(batch.edge_index, expected.edge_index)
    assert same_all(batch.to_data_list(), [data[i] for i in order])
    assert reader.num_edges.tolist() == [i % 4 for i in range(12)]
    assert reader.neighbor_cutoff == 3.0
    with pytest.raises(DataError, match="edges of one cutoff"):
        AtomicDataZarrWriter(tmp_path / "a.zarr").append(with_edges(1, cutoff=4.0))
    with pytest.raises(DataError, match="no edges"):
        AtomicDataZarrWriter(tmp_path / "a.zarr").append(some(1))
    assert len(AtomicDataZarrReader(tmp_path / "a.zarr")) == 12


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    frames = [structure(i, 20, LABELS) for i in range(7)]

    def peak(count: int) -> int:
        def stream() -> Iterator[AtomicData]:
            for i in range(count):
                yield frames[i % 7]

        tracemalloc.start()
        AtomicDataZarrWriter(zarr.storage.LocalStore(tmp_path / f"{count}.zarr"), chunk_rows=128, shard_rows=512).write(stream())
        _, top = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return top

    peak(100)
    assert peak(1500) < 1.3 * peak(500)


def test_a_batch_that_is_changed_after_it_was_given_is_stored_as_it_was(tmp_path: Path) -> None:
    batch = Batch.from_data_list(some(3))

    def frames() -> Iterator[Batch]:
        for step in range(4):
            batch.positions.fill_(float(step))
            yield batch

    AtomicDataZarrWriter(tmp_path / "a.zarr").write(frames())
    found = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(12))
    assert found.positions[:, 0].unique().tolist() == [0.0, 1.0, 2.0, 3.0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_existing_store_is_kept_unless_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    AtomicDataZarrWriter(path).write(some(3))
    with pytest.raises(DataError, match="exists"):
        AtomicDataZarrWriter(path).write(some(2))
    assert len(AtomicDataZarrReader(path)) == 3
    with pytest.raises(RuntimeError, match="source"):
        AtomicDataZarrWriter(path, overwrite=True).write(failing(1))
    assert same_all(everything(path), some(3))
    AtomicDataZarrWriter(path, overwrite=True).write(some(2, seed=50))
    assert same_all(everything(path), some(2, seed=50))
    assert sorted(p.name for p in path.iterdir()) == ["r2", "zarr.json"]


def failing(count: int) -> Iterator[AtomicData]:
    yield from some(count)
    raise RuntimeError("the source broke")


def test_a_folder_that_is_no_store_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"not empty and not a store; found: mine\.txt"):
            AtomicDataZarrWriter(tmp_path, overwrite=overwrite).write(some(1))
    other = tmp_path / "other.zarr"
    zarr.open_group(other, mode="w").create_array("x", shape=(3,), dtype="f8")
    for overwrite in (False, True):
        with pytest.raises(DataError):
            AtomicDataZarrWriter(other, overwrite=overwrite).write(some(1))
    assert zarr.open_group(other, mode="r")["x"].shape == (3,)  # type: ignore[union-attr]
    file = tmp_path / "file.zarr"
    file.write_text("keep")
    with pytest.raises(DataError):
        AtomicDataZarrWriter(file, overwrite=True).write(some(1))
    assert file.read_text() == "keep"


def test_nothing_and_things_that_are_no_structures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    with pytest.raises(DataError, match="nothing to write"):
        AtomicDataZarrWriter(path).write([])
    with pytest.raises(DataError, match="not a structure; found: str"):
        AtomicDataZarrWriter(path).write(["water"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="no structures; found: int"):
        AtomicDataZarrWriter(path).write(3)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no committed store"):
        AtomicDataZarrReader(path)
    with pytest.raises(ConfigError, match="an address is no folder"):
        AtomicDataZarrWriter("s3://bucket/a.zarr")
    with pytest.raises(ConfigError, match="no store"):
        AtomicDataZarrWriter(3)


def test_what_does_not_fit_to_the_store_is_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    AtomicDataZarrWriter(path, units={"tag": "mark"}).write(some(3, LABELS | {"tag"}))
    one = structure(0, 3)

    def append(data: AtomicData, **kwargs: object) -> None:
        AtomicDataZarrWriter(path, **kwargs).append([*some(2, LABELS | {"tag"}), data])  # type: ignore[arg-type]

    with pytest.raises(DataError, match="positions"):
        append(structure(0, 3, dtype=torch.float32))
    with pytest.raises(DataError, match="found: float32, rows of shape"):
        AtomicDataZarrWriter(path).append(structure(0, 3, dtype=torch.float32))
    with pytest.raises(DataError, match="tag does not fit"):
        AtomicDataZarrWriter(path).append(AtomicData(one.positions, one.atomic_numbers, system={"tag": torch.tensor([1, 2])}))
    with pytest.raises(DataError, match="tag has another level in the store; found: atom; needed: system"):
        AtomicDataZarrWriter(path).append(AtomicData(one.positions, one.atomic_numbers, atom={"tag": torch.arange(3)}))
    with pytest.raises(DataError, match="unit of tag is not the store's; found: eV; needed: mark"):
        append(one, units={"tag": "eV"})
    with pytest.raises(DataError, match="unit of energy is not the store's; found: kcal/mol; needed: eV"):
        append(one, units={"energy": "kcal/mol"})
    with pytest.raises(DataError, match="a unit is declared for 'gap'"):
        append(one, units={"gap": "eV"})
    assert len(AtomicDataZarrReader(path)) == 3
    append(one, units={"tag": "mark", "forces": "eV/Å"})
    reader = AtomicDataZarrReader(path)
    assert len(reader) == 6 and reader.units["tag"] == "mark" and reader.units["forces"] == "eV/angstrom"


def test_metadata_is_kept_and_updated(tmp_path: Path) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr", metadata={"level": "PBE", "n": [1, 2]}).write(some(1))
    AtomicDataZarrWriter(tmp_path / "a.zarr", metadata={"n": 3}).append(some(1))
    assert AtomicDataZarrReader(tmp_path / "a.zarr").metadata == {"level": "PBE", "n": 3}
    root = zarr.open_group(tmp_path / "a.zarr", mode="r+")
    root.attrs["mine"] = "kept"
    AtomicDataZarrWriter(tmp_path / "a.zarr").append(some(1))
    assert zarr.open_group(tmp_path / "a.zarr", mode="r").attrs["mine"] == "kept"
    assert len(AtomicDataZarrReader(tmp_path / "a.zarr")) == 3


# -- deleting ----------------------------------------------------------------------------------------------------------


def test_deleted_structures_are_hidden_then_gone(tmp_path: Path) -> None:
    path, data = tmp_path / "a.zarr", some(20)
    AtomicDataZarrWriter(path, chunk_rows=4, shard_rows=8).write(data)
    assert AtomicDataZarrWriter(path).delete([3, 19, 3]) == 2
    left = [d for i, d in enumerate(data) if i not in (3, 19)]
    assert same_all(everything(path), left)
    with pytest.raises(DataError, match="there is no sample 18"):
        AtomicDataZarrWriter(path).delete([18])
    AtomicDataZarrWriter(path).delete(range(5))
    AtomicDataZarrWriter(path).append(some(4, LABELS | {"stress"}, seed=70))
    left = [*left[5:], *some(4, LABELS | {"stress"}, seed=70)]
    assert same_all(everything(path), left)
    assert AtomicDataZarrReader(path).num_atoms.tolist() == [d.num_atoms for d in left]
    AtomicDataZarrWriter(path, chunk_rows=3, shard_rows=6, metadata={"clean": True}).defragment()
    reader = AtomicDataZarrReader(path)
    assert same_all(everything(path), left) and reader.metadata == {"clean": True}
    assert plain(path)["system/energy"].shape == (len(left),)  # type: ignore[union-attr]
    assert plain(path)["system/energy"].chunks == (3,)  # type: ignore[union-attr]
    reader.verify()


# -- one writer, and killed ones ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [False, True])
def test_a_second_writer_is_refused_and_told_by_whom(tmp_path: Path, memory: bool) -> None:
    store = zarr.storage.MemoryStore() if memory else tmp_path / "a.zarr"
    first = AtomicDataZarrWriter(store)

    def slow() -> Iterator[AtomicData]:
        yield from some(2)
        for call in (AtomicDataZarrWriter(store).append, AtomicDataZarrWriter(store, overwrite=True).write):
            with pytest.raises(DataError, match=r"being written by another writer; found: process \d+ on"):
                call(some(1))
        yield from some(1)

    first.write(slow())
    assert len(AtomicDataZarrReader(store)) == 3
    AtomicDataZarrWriter(store).append(some(1))
    assert len(AtomicDataZarrReader(store)) == 4
    assert [p.name for p in tmp_path.iterdir()] == ([] if memory else ["a.zarr"])


def test_a_lock_file_left_behind_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a.zarr.lock").write_text('{"pid": 1, "host": "elsewhere", "since": "1999"}')
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(1))


def test_without_flock_the_lock_file_itself_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvalchemi.data.datapipes.lock.fcntl", None)
    held = StoreWriter(open_files(tmp_path / "a.zarr"), ATOMIC_FORMAT, "append")
    with held, pytest.raises(DataError, match=r"another writer.*if that process no longer runs, delete .*a\.zarr\.lock\.held"):
        AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(1))
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(1))
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_a_link_to_a_store_is_under_the_same_lock(tmp_path: Path) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(1))
    (tmp_path / "b.zarr").symlink_to(tmp_path / "a.zarr")
    writer = AtomicDataZarrWriter(tmp_path / "b.zarr")
    held = StoreWriter(open_files(tmp_path / "a.zarr"), ATOMIC_FORMAT, "append")
    with held, pytest.raises(DataError, match="another writer"):
        writer.append(some(1))


def run_script(name: str, *arguments: object) -> str:
    """Run a function of ``crash_script.py`` in a process of its own, which may fork: it has no threads."""
    script = Path(__file__).with_name("crash_script.py")
    done = subprocess.run(
        [sys.executable, str(script), name, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_writer_killed_at_any_file_operation_leaves_the_committed_store(tmp_path: Path) -> None:
    assert int(run_script("killed_at_each_operation", tmp_path, "append")) > 10


@pytest.mark.slow
@pytest.mark.parametrize("step", ["first", "overwrite", "delete", "defragment"])
def test_any_other_writing_killed_at_any_file_operation_leaves_the_committed_store(tmp_path: Path, step: str) -> None:
    assert int(run_script("killed_at_each_operation", tmp_path, step)) > 10


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_committed_store(tmp_path: Path) -> None:
    run_script("killed_at_random", tmp_path)


def test_b01_two_writers_to_one_shard_leave_every_row_intact_or_one_is_refused(tmp_path: Path) -> None:
    run_script("two_writers", tmp_path)


def test_b09_a_fresh_process_sees_an_append_and_its_new_field(tmp_path: Path) -> None:
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(100, frozenset({"energy"})))
    AtomicDataZarrWriter(tmp_path / "a.zarr").append(some(50, frozenset({"energy", "dipole"}), seed=500))
    run_script("fresh_reader", tmp_path)


# -- what the system refuses --------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_the_committed_store_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zarr"
    AtomicDataZarrWriter(path).write(some(5))
    write, left = Path.write_bytes, [3]

    def full(self: Path, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match=r"cannot be written; found: OSError: .*No space left on device"):
            AtomicDataZarrWriter(path).append(some(5))
    assert same_all(everything(path), some(5))
    assert sorted(p.name for p in path.iterdir()) == ["r1", "zarr.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_an_error_of_the_source_passes_through_and_nothing_is_committed(tmp_path: Path) -> None:
    def broken() -> Iterator[AtomicData]:
        yield from some(700)
        raise FileNotFoundError("frames.xyz")

    with pytest.raises(FileNotFoundError, match=r"frames\.xyz"):
        AtomicDataZarrWriter(tmp_path / "a.zarr").write(broken())
    with pytest.raises(DataError, match="no committed store"):
        AtomicDataZarrReader(tmp_path / "a.zarr")
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(some(2))
    assert same_all(everything(tmp_path / "a.zarr"), some(2))
