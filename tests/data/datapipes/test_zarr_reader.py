"""Reading: order, damage, caches, threads, processes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes.array_zarr import ArrayZarrReader
from nvalchemi.data.datapipes.chunk_cache import ChunkCache
from nvalchemi.data.datapipes.files import open_files
from nvalchemi.data.datapipes.layout import Cut
from nvalchemi.data.datapipes.reader import as_indices, ragged
from nvalchemi.data.datapipes.shards import encode_shard, make_codec
from nvalchemi.data.datapipes.store_writer import Appender
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.errors import DataError
from tests.data.random_structures import same_batch, structure

LABELS = frozenset(["energy", "forces"])


@pytest.fixture(scope="module")
def data() -> list[AtomicData]:
    return [structure(i, 2 + i % 5, LABELS) for i in range(64)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, data: list[AtomicData]) -> Path:
    """A store of 64 structures in many small chunks, for reading only."""
    path = tmp_path_factory.mktemp("stores") / "a.zarr"
    AtomicDataZarrWriter(path, chunk_rows=16, shard_rows=64).write(data)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "a.zarr"))


def same_structures(batch: Batch, expected: list[AtomicData]) -> bool:
    return same_batch(batch, Batch.from_data_list(expected))


# -- order, repeats, indices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [0, 3000, 10**9])
def test_any_order_with_repeats(made: Path, data: list[AtomicData], cache_bytes: int) -> None:
    reader = AtomicDataZarrReader(made, cache_bytes=cache_bytes)
    rng = np.random.default_rng(0)
    for size in (1, 3, 64, 200):
        order = rng.integers(0, 64, size)
        for form in (order, order.tolist(), torch.tensor(order), order.astype(np.uint8)):
            batch = reader.read_many(form)
            assert same_structures(batch, [data[i] for i in order])
            assert batch.sample_index is not None and batch.sample_index.tolist() == order.tolist()
    assert same_structures(reader.read_many(range(64)), data)
    assert torch.equal(reader.read(5).positions, data[5].positions)


def test_what_there_is(made: Path, data: list[AtomicData]) -> None:
    reader = AtomicDataZarrReader(made)
    assert len(reader) == 64 and reader.name == str(made)
    assert reader.num_atoms.dtype == np.int64 and reader.num_atoms.tolist() == [d.num_atoms for d in data]
    assert reader.num_edges.tolist() == [0] * 64 and reader.neighbor_cutoff is None
    assert set(reader.field_names) == {"positions", "atomic_numbers", "energy", "forces"}
    assert reader.levels["energy"] == "system" and reader.units["forces"] == "eV/angstrom"


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([-1], "there is no sample -1"),
        ([0, 64], "there is no sample 64; found: 64 samples; needed: indices from 0 to 63"),
        ([0.0], "whole numbers"),
        ([True, False], "nonzero"),
        ([[0, 1]], "2 dimensions"),
        (["a"], "whole numbers"),
        ([[0], [1, 2]], "whole numbers"),
        (3, "0 dimensions"),
        (np.array([2**63], np.uint64), "there is no sample"),
    ],
)
def test_bad_indices_are_refused(made: Path, indices: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        AtomicDataZarrReader(made).read_many(indices)  # type: ignore[arg-type]


def test_no_indices_give_an_empty_batch(made: Path) -> None:
    batch = AtomicDataZarrReader(made).read_many([])
    assert len(batch) == 0 and batch.positions.shape == (0, 3)
    assert as_indices(torch.tensor([]), 3, "x").shape == (0,)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)), max_size=8))
def test_ragged_is_the_concatenation_of_ranges(runs: list[tuple[int, int]]) -> None:
    rows, offsets = ragged(np.array([a for a, _ in runs], np.int64), np.array([n for _, n in runs], np.int64))
    assert rows.tolist() == [i for a, n in runs for i in range(a, a + n)]
    assert offsets.tolist() == np.cumsum([0] + [n for _, n in runs]).tolist()


def test_a_field_of_another_unit_or_level_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvalchemi.data import fields

    foreign = fields.FieldSpec(fields.Level.SYSTEM, (), "float64", "kcal/mol")
    with monkeypatch.context() as patch:
        patch.setitem(fields.FIELDS, "energy", foreign)
        AtomicDataZarrWriter(tmp_path / "a.zarr").write([structure(0, 3, LABELS)])
    with pytest.raises(DataError, match=r"energy is not what the package means by it.*kcal/mol.*needed.*eV"):
        AtomicDataZarrReader(tmp_path / "a.zarr")


# -- missing and damaged data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", ["forces", "positions"])
def test_b03_a_lost_chunk_file_is_an_error_that_names_it(store: Path, array: str) -> None:
    (store / f"r1/atom/{array}/c/2/0").unlink()
    reader = AtomicDataZarrReader(store)
    with pytest.raises(DataError) as caught:
        for start in range(0, 64, 8):
            reader.read_many(range(start, start + 8))
    message = str(caught.value)
    assert str(store) in message and f"array r1/atom/{array}, chunk 8" in message
    assert f"r1/atom/{array}/c/2/0: the file is missing" in message
    with pytest.raises(DataError, match=array):
        AtomicDataZarrReader(store).verify()
    with pytest.raises(DataError, match=array):
        AtomicDataZarrReader(store).read_many(range(64))


@pytest.mark.parametrize("array", ["forces", "positions"])
def test_a_lost_array_is_an_error_that_names_it(store: Path, array: str) -> None:
    shutil.rmtree(store / f"r1/atom/{array}")
    with pytest.raises(DataError, match=f"array r1/atom/{array} is missing"):
        AtomicDataZarrReader(store)


def test_a_chunk_that_the_shard_lacks_is_an_error(store: Path) -> None:
    spec = AtomicDataZarrReader(store)._store.record.arrays["atom/forces"]
    files = open_files(store)
    files.put("r1/atom/forces/c/0/0", encode_shard(spec, make_codec(spec.compressor), np.zeros((20, 3))))  # two chunks of four
    files.flush()
    assert np.isnan(zarr.open_group(store, mode="r")["r1/atom/forces"][40, 0])  # type: ignore[index]
    with pytest.raises(DataError, match=r"chunk 2 .*the chunk is missing from the shard"):
        AtomicDataZarrReader(store).read_many(range(64))


@pytest.mark.parametrize("keep", [0, 10, 0.5, -1])
def test_a_file_cut_short_is_an_error(store: Path, keep: float) -> None:
    file = store / "r1/atom/positions/c/0/0"
    size = file.stat().st_size
    os.truncate(file, int(keep * size) if isinstance(keep, float) else keep % size)
    with pytest.raises(DataError, match=r"r1/atom/positions, chunk 0 .*c/0/0"):
        AtomicDataZarrReader(store).read_many([0])


def test_a_flipped_bit_is_an_error_or_changes_nothing(store: Path, data: list[AtomicData]) -> None:
    files = [path for path in sorted(store.rglob("*")) if path.is_file()]
    rng = np.random.default_rng(1)
    silent = 0
    for path in files:
        good = path.read_bytes()
        for bit in rng.integers(0, 8 * len(good), 12):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(bad)
            try:
                reader = AtomicDataZarrReader(store)
                reader.verify()
                batch = reader.read_many(range(64))
            except DataError as error:
                assert str(store) in str(error)
            else:
                assert path.name == "zarr.json", path  # such as the description of a folder, which is not needed
                assert same_structures(batch, data)
                silent += 1
        path.write_bytes(good)
    assert silent < 6 * len(files)


def test_other_chunks_of_a_damaged_store_are_still_read(store: Path, data: list[AtomicData]) -> None:
    (store / "r1/atom/forces/c/0/0").unlink()
    reader = AtomicDataZarrReader(store)
    for _ in range(2):
        with pytest.raises(DataError, match="forces"):
            reader.read_many([0, 60])
        assert same_structures(reader.read_many([60, 50]), [data[60], data[50]])


# -- chunks are decoded once -------------------------------------------------------------------------------------------


def test_a_shuffled_epoch_decodes_every_chunk_once(made: Path) -> None:
    reader = AtomicDataZarrReader(made)
    order = np.random.default_rng(0).permutation(64)
    for epoch in range(2):
        for start in range(0, 64, 8):
            reader.read_many(order[start : start + 8])
        if epoch == 0:
            first = reader._store.decoded
    caches = reader._store.state.caches
    fields = sum(cache.chunks for path, cache in caches.items() if not path.startswith("ends/"))
    assert first == reader._store.decoded == fields + caches["ends/atom"].chunks


@pytest.mark.parametrize("cache_bytes", [0, 4000])
def test_one_call_decodes_a_chunk_at_most_once(made: Path, cache_bytes: int) -> None:
    reader = AtomicDataZarrReader(made, cache_bytes=cache_bytes)
    reader.read_many([0])
    rng = np.random.default_rng(0)
    for _ in range(5):
        before = {path: cache.decoded for path, cache in reader._store.state.caches.items()}
        reader.read_many(np.concatenate([rng.permutation(64), rng.permutation(64)]))
        for path, cache in reader._store.state.caches.items():
            assert cache.decoded - before[path] <= cache.chunks


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_cache_of_any_size_gives_the_rows(draw: st.DataObject) -> None:
    rows, chunk = draw.draw(st.integers(1, 60)), draw.draw(st.integers(1, 7))
    files = open_files(zarr.storage.MemoryStore())
    spec = Cut(chunk, chunk * draw.draw(st.integers(1, 4)), "none").spec("sample", "int64", (2,), "")
    writer = Appender(files, "x", spec, 0)
    values = np.arange(2 * rows).reshape(rows, 2)
    writer.add(values)
    writer.finish()
    cache = ChunkCache(files, "x", spec, rows)
    cache.resize(draw.draw(st.integers(0, cache.chunks + 2)))
    for _ in range(6):
        wanted = np.array(draw.draw(st.lists(st.integers(0, rows - 1), max_size=25)), np.int64)
        np.testing.assert_array_equal(cache.take(wanted), values[wanted])
    first = draw.draw(st.integers(0, rows))
    last = draw.draw(st.integers(first, rows))
    np.testing.assert_array_equal(cache.range(first, last), values[first:last])


def test_memory_stays_within_the_budget(made: Path) -> None:
    reader = AtomicDataZarrReader(made, cache_bytes=5000)
    reader.read_many(np.random.default_rng(0).permutation(64))
    caches = reader._store.state.caches.values()
    assert sum(cache._slots * cache.slot_bytes for cache in caches) <= 5000 + sum(cache.slot_bytes for cache in caches)


# -- stores that are no folders, appends beside a reader ----------------------------------------------------------------


def test_stores_of_other_kinds_read_the_same(made: Path, tmp_path: Path, data: list[AtomicData]) -> None:
    memory = zarr.storage.MemoryStore()
    AtomicDataZarrWriter(memory, chunk_rows=16, shard_rows=64).write(data)
    zipped = shutil.make_archive(str(tmp_path / "a"), "zip", made)
    order = [60, 0, 0, 33]
    for store in (memory, zarr.storage.LocalStore(made), zarr.storage.ZipStore(zipped, mode="r")):
        reader = AtomicDataZarrReader(store)
        assert same_structures(reader.read_many(order), [data[i] for i in order])
        reader.verify()


def test_a_lost_chunk_in_a_store_of_another_kind_is_an_error(data: list[AtomicData]) -> None:
    memory = zarr.storage.MemoryStore()
    AtomicDataZarrWriter(memory, chunk_rows=16, shard_rows=64).write(data)
    del memory._store_dict["r1/atom/forces/c/1/0"]
    with pytest.raises(DataError, match=r"forces, chunk 4 .*the file is missing"):
        AtomicDataZarrReader(memory).read_many(range(64))


@pytest.mark.parametrize("memory", [False, True])
def test_an_open_reader_keeps_its_commit_while_others_append(tmp_path: Path, data: list[AtomicData], memory: bool) -> None:
    store = zarr.storage.MemoryStore() if memory else tmp_path / "a.zarr"
    AtomicDataZarrWriter(store, chunk_rows=16, shard_rows=64, compressor="zstd").write(data)
    old = AtomicDataZarrReader(store, cache_bytes=0)
    assert same_structures(old.read_many([62, 1]), [data[62], data[1]])
    AtomicDataZarrWriter(store).append([structure(900 + i, 4, LABELS | {"charge"}) for i in range(30)])
    assert len(old) == 64 and same_structures(old.read_many([63, 60]), [data[63], data[60]])
    old.verify()
    new = AtomicDataZarrReader(store)
    assert len(new) == 94 and new.read_many([3, 70]).has("charge").tolist() == [False, True]
    assert new.read_many([70, 71]).present == {}
    assert new.read_many([3, 4]).present["charge"].tolist() == [False, False]


def test_another_kind_of_store_is_refused(made: Path) -> None:
    with pytest.raises(DataError, match=r"another kind of store; found: nvalchemi\.atomic"):
        ArrayZarrReader(made)


# -- threads and processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [0, 4000, 10**9])
def test_many_threads_read_at_once(made: Path, data: list[AtomicData], cache_bytes: int) -> None:
    reader = AtomicDataZarrReader(made, cache_bytes=cache_bytes)

    def read(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        return all(
            same_structures(reader.read_many(order), [data[i] for i in order])
            for order in (rng.integers(0, 64, 9) for _ in range(10))
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_a_pickled_reader_sees_the_same_commit(store: Path, data: list[AtomicData]) -> None:
    reader = AtomicDataZarrReader(store)
    reader.read_many([1, 2])
    raw = pickle.dumps(reader)
    assert len(raw) < 10_000
    AtomicDataZarrWriter(store).append([structure(900, 4, LABELS)])
    copy = pickle.loads(raw)
    assert len(copy) == 64 and same_structures(copy.read_many([5, 63]), [data[5], data[63]])


def test_a_fork_while_another_thread_reads_does_not_hang(made: Path) -> None:
    script = Path(__file__).with_name("fork_script.py")
    done = subprocess.run([sys.executable, str(script), str(made)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["workers", "forks"]


def test_a_reader_in_use_can_be_read_by_a_prefetching_thread(made: Path, data: list[AtomicData]) -> None:
    reader = AtomicDataZarrReader(made, cache_bytes=4000)
    found: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for start in range(0, 64, 8):
            yield reader.read_many(range(start, start + 8))

    thread = threading.Thread(target=lambda: found.extend(batches()))
    thread.start()
    for index in range(64):
        assert torch.equal(reader.read(index).positions, data[index].positions)
    thread.join()
    assert same_structures(found[3], data[24:32])
