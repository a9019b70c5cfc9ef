from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.block_shuffle import batch_spread, co_occurrence, displacement
from nvalchemi.data.datapipes import (
    ArrayZarrReader,
    ArrayZarrWriter,
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BatchSampler,
    BlockPermutation,
    BlockShuffleSampler,
    DataLoader,
    Dataset,
    DistributedSamplerProtocol,
    InMemoryDataset,
    MultiDataset,
    Permutation,
    shard_loader,
)
from nvalchemi.data.datapipes.share import share_for_validation
from nvalchemi.errors import ConfigError
from tests.data.random_structures import structure

ROWS, CHUNK = 2000, 25


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2000 vectors in 80 chunks of 2 kB."""
    path: Path = tmp_path_factory.mktemp("blocks") / "vectors.zarr"
    ArrayZarrWriter(path, chunk_rows=CHUNK).write(torch.arange(ROWS * 10, dtype=torch.float64).reshape(ROWS, 10))
    return path


def opened(path: Path, chunks: int) -> Dataset:
    return Dataset(ArrayZarrReader(path, cache_bytes=chunks * CHUNK * 80))


# -- the order ----------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 500), block=st.integers(1, 60), window=st.integers(1, 20), seed=st.integers(0, 2**40))
def test_every_element_once(n: int, block: int, window: int, seed: int) -> None:
    order = BlockPermutation(n, seed, block, window)
    whole = order(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    some = np.arange(0, n, 3)
    assert order(some).tolist() == whole[some].tolist()
    with pytest.raises(IndexError):
        order(np.array([n]))


def test_an_order_of_a_seed_and_an_epoch_in_blocks() -> None:
    sampler = BlockShuffleSampler(1000, block_size=20, window=5, seed=3)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != list(BlockShuffleSampler(1000, block_size=20, window=5, seed=4))
    for start in range(0, 1000, 100):  # five blocks at a time, in turns
        blocks = np.array(orders[0][start : start + 100]) // 20
        assert len(np.unique(blocks)) == 5
        assert (blocks.reshape(20, 5) == blocks[:5]).all()
    inner = [np.array(orders[0][i::5][:20]) % 20 for i in range(5)]
    assert len({tuple(one) for one in inner}) == 5  # each in an order of its own


def test_no_window_is_left_with_a_few_blocks() -> None:
    order = BlockPermutation(66 * 10, 1, 10, 32)(np.arange(660)) // 10
    assert [len(np.unique(part)) for part in (order[:320], order[320:490], order[490:])] == [32, 17, 17]


def test_every_sample_comes_early_and_late_alike() -> None:
    """Also those of the short block: each lies in the first half of an epoch as often as not, within 4.5 standard deviations."""
    counts = np.zeros(70)
    for epoch in range(300):
        np.add.at(counts, BlockPermutation(70, (5, epoch), 12, 2)(np.arange(35)), 1)
    assert np.abs(counts / 300 - 0.5).max() < 4.5 * 0.5 / 300**0.5


@pytest.mark.parametrize("window", [4, 16, 64])
def test_how_random_it_is(window: int) -> None:
    """The documented statistics, beside a full shuffle's: 256 blocks of 40, batches of 32."""
    n, batch = 10_240, 32
    orders = [BlockPermutation(n, (1, epoch), 40, window)(np.arange(n)) for epoch in range(6)]
    full = [Permutation(n, (1, epoch))(np.arange(n)) for epoch in range(6)]
    assert batch_spread(full, batch) == pytest.approx(1, abs=0.15)
    expected = max(1.0, batch / window)
    assert 0.6 * expected < batch_spread(orders, batch) < 1.3 * expected
    assert displacement(orders) == pytest.approx(1, abs=0.15)
    companions = max(0.0, batch / window - 1)  # as many of one block as of any other
    assert co_occurrence(orders, batch, 40) == pytest.approx(companions * (n - 1) / (batch - 1) / 39, rel=1e-9)
    assert co_occurrence(full, batch, 40) == pytest.approx(1, abs=0.1)


# -- ranks --------------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 500),
    ranks=st.integers(1, 16),
    block=st.integers(1, 40),
    window=st.integers(1, 20),
    drop_last=st.booleans(),
    used=st.integers(0, 500),
)
def test_ranks_share_an_epoch(n: int, ranks: int, block: int, window: int, drop_last: bool, used: int) -> None:
    def sampler(number: int, rank: int) -> BlockShuffleSampler:
        return BlockShuffleSampler(n, block, window, number, rank, 7, drop_last)

    parts = [list(sampler(ranks, rank)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    whole = list(sampler(1, 0))
    dealt = [i for step in zip(*parts, strict=True) for i in step]
    assert dealt[:n] == whole[: len(dealt)]  # one order, whatever the number of ranks
    padded = sum(sampler(ranks, rank).num_padded for rank in range(ranks))
    assert len(dealt) == (n // ranks * ranks if drop_last else n + padded)
    rest = [list(sampler(ranks, rank).after(used)) for rank in range(ranks)]
    assert [i for step in zip(*rest, strict=True) for i in step][: n - used if used < n else 0] == whole[used:][
        : sum(map(len, rest))
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_reads_blocks_of_its_own(ranks: int) -> None:
    blocks = [set(np.array(list(BlockShuffleSampler(6400, 25, 16, ranks, rank))) // 25) for rank in range(ranks)]
    assert sum(map(len, blocks)) == len(set().union(*blocks)) == 256
    sampler = BlockShuffleSampler(6400, 25, 16, ranks, 0)
    assert isinstance(sampler, DistributedSamplerProtocol)


# -- under a loader -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_larger_than_the_cache_is_decoded_once(vectors: Path, ranks: int) -> None:
    decoded = []
    for rank in range(ranks):
        dataset = opened(vectors, 16)
        sampler = BlockShuffleSampler(dataset, block_size=CHUNK, window=8)
        loader = shard_loader(DataLoader(dataset, batch_size=10, sampler=sampler), rank, ranks)
        seen = [int(row[0]) // 10 for batch in loader for row in batch]
        assert len(set(seen)) == len(seen) == ROWS // ranks
        decoded.append(dataset.reader._store.decoded)
    assert sum(decoded) == ROWS // CHUNK
    full = opened(vectors, 16)
    assert sum(len(batch) for batch in DataLoader(full, batch_size=10, shuffle=True)) == ROWS
    assert full.reader._store.decoded > 8 * ROWS // CHUNK


def test_one_word_to_the_loader(vectors: Path) -> None:
    dataset = Dataset(ArrayZarrReader(vectors))
    loader = DataLoader(dataset, batch_size=16, shuffle="blocks", seed=4)
    assert (loader.sampler.block_size, loader.sampler.window, loader.sampler.seed) == (4 * CHUNK, 64, 4)
    loader.set_epoch(2)
    whole = [batch[:, 0].tolist() for batch in loader]
    assert [batch[:, 0].tolist() for batch in loader.iter_from(50)] == whole[50:]
    parts = [shard_loader(loader, rank, 2) for rank in range(2)]
    assert [part.sampler.rank for part in parts] == [0, 1]
    assert {v for part in parts for batch in part for v in batch[:, 0].tolist()} == {v for batch in whole for v in batch}
    shares = [share_for_validation(loader, rank, 3) for rank in range(3)]
    assert sorted(v for share in shares for batch in share for v in batch[:, 0].tolist()) == [10.0 * i for i in range(ROWS)]
    by_class = shard_loader(DataLoader(dataset, batch_size=16), 1, 2, BlockShuffleSampler, {"window": 8, "seed": 2})
    assert (by_class.sampler.window, by_class.sampler.rank, by_class.sampler.seed) == (8, 1, 2)


def test_structures_know_their_blocks(tmp_path: Path) -> None:
    data = [structure(i, 1 + i % 9) for i in range(300)]
    AtomicDataZarrWriter(tmp_path / "a.zarr", chunk_rows=50).write(data)
    atoms = sum(d.num_atoms for d in data)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert reader.block_size == 300 * 4 * 50 // atoms
    assert reader.cached_samples == 300
    small = AtomicDataZarrReader(tmp_path / "a.zarr", cache_bytes=40_000)
    assert 0 < small.cached_samples < 300
    batches = DataLoader(Dataset(reader), batch_size=7, shuffle="blocks")
    assert sorted(i for batch in batches for i in batch.sample_index.tolist()) == list(range(300))


def test_several_stores_as_one(vectors: Path, tmp_path: Path) -> None:
    ArrayZarrWriter(tmp_path / "more.zarr", chunk_rows=10).write(torch.zeros(500, 10, dtype=torch.float64))
    resident = InMemoryDataset(torch.ones(100, 10, dtype=torch.float64))
    stores = [Dataset(ArrayZarrReader(path)) for path in (vectors, tmp_path / "more.zarr")]
    both = MultiDataset(*stores, resident, output_strict=False)
    loader = DataLoader(both, batch_size=10, shuffle="blocks")
    assert loader.sampler.block_size == 40
    assert sum(map(len, loader)) == 2600
    tight = MultiDataset(opened(vectors, 16), resident, output_strict=False)
    with pytest.raises(ConfigError, match="room for about 420 samples"):  # 400 of the 2000 that are stored
        BlockShuffleSampler(tight, window=16, num_replicas=1, rank=0)


def test_what_is_refused(vectors: Path) -> None:
    values = InMemoryDataset(torch.arange(10))
    with pytest.raises(ConfigError, match=r"stored together.*InMemoryDataset.*shuffle=True"):
        DataLoader(values, shuffle="blocks")
    with pytest.raises(ConfigError, match='"blocks"'):
        DataLoader(values, shuffle="chunks")  # type: ignore[arg-type]
    tight = opened(vectors, 16)
    sampler = BlockShuffleSampler(tight, window=16)
    with pytest.raises(ConfigError, match=r"room for about 400 samples; needed: 1600: .*window=4$"):
        iter(DataLoader(tight, batch_size=2, sampler=sampler))
    with pytest.raises(ConfigError, match="room for about 400 samples"):
        BlockShuffleSampler(tight, num_replicas=2, rank=0, window=16)
    assert len(BlockShuffleSampler(tight, num_replicas=4, rank=0, window=16)) == ROWS // 4  # a quarter of it fits
    wrong: list[dict[str, Any]] = [
        {"block_size": 0},
        {"block_size": 2**32},
        {"window": 0},
        {"rank": 1},
        {"rank": 2, "num_replicas": 2},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            BlockShuffleSampler(100, **{"block_size": 5, **arguments})


def test_it_goes_on_in_batches() -> None:
    sampler = BlockShuffleSampler(1000, 20, 5, seed=3)
    whole = list(BatchSampler(sampler, 8))
    assert list(BatchSampler(sampler, 8).after(80)) == whole[10:]


def test_a_billion_samples_take_no_list() -> None:
    batches = BatchSampler(BlockShuffleSampler(10**9, 1024, 64, 8, 3, seed=1), 64)
    tracemalloc.start()
    try:
        first = next(iter(batches))
        batches.set_epoch(1)
        assert next(iter(batches)) != first
        assert next(batches.iter_from(10**6)) is not None
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
