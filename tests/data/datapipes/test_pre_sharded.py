from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import (
    ArrayZarrReader,
    ArrayZarrWriter,
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSamplerProtocol,
    InMemoryDataset,
    PreShardedSampler,
    deal_stores,
    shard_loader,
)
from nvalchemi.data.datapipes.share import share_for_validation
from nvalchemi.errors import ConfigError


def made(sizes: list[int], rank: int, group: int = 1, **options: Any) -> PreShardedSampler:
    return PreShardedSampler(sizes[rank // group], sizes, len(sizes) * group, rank, group, **options)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    group=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    batch_size=st.integers(1, 20),
)
def test_b25_equal_numbers_of_steps(sizes: list[int], group: int, shuffle: bool, drop_last: bool, batch_size: int) -> None:
    """Every rank has as many samples and batches, of its owner's data alone, disjoint up to the declared repeats."""
    samplers = [made(sizes, rank, group, shuffle=shuffle, drop_last=drop_last) for rank in range(len(sizes) * group)]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])}
    assert len({len(list(BatchSampler(sampler, batch_size))) for sampler in samplers}) == 1
    for owner, size in enumerate(sizes):
        ranks = range(owner * group, (owner + 1) * group)
        own = [parts[r][: len(parts[r]) - samplers[r].num_padded] for r in ranks]
        fresh = [i for part in own for i in part]
        assert len(fresh) == len(set(fresh)) <= size
        assert set(fresh) <= set(range(size))
        if not drop_last:
            assert len(fresh) == size  # all of it, once
        else:
            assert all(samplers[r].num_padded == 0 for r in ranks)


def test_orders_repeat_by_seed_and_differ_by_epoch_owner_and_pass() -> None:
    sampler = made([30, 100], 0, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first == list(made([30, 100], 0, seed=3)) != list(made([30, 100], 0, seed=4))
    assert [sorted(first[i : i + 30]) for i in (0, 30, 60)] == [list(range(30))] * 3
    assert first[:30] != first[30:60] != first[60:90]
    assert list(made([100, 100], 0)) != list(made([100, 100], 1))
    assert list(sampler.iter_from(17)) == list(sampler)[17:]
    assert isinstance(sampler, DistributedSamplerProtocol)


def test_with_drop_last_every_epoch_takes_another_part() -> None:
    sampler, seen = made([10, 50], 1, drop_last=True), set()
    for epoch in range(30):
        sampler.set_epoch(epoch)
        assert len(sampler) == 10
        seen |= set(sampler)
    assert seen == set(range(50))


def test_a_loader_of_ones_own_store_stays_and_validation_counts_once() -> None:
    """Of 5 and 8 samples, on nodes of two ranks: 8 a rank and epoch... and of validation data every sample once, on its own node."""
    sizes = [5, 8]
    for rank in range(4):
        data = InMemoryDataset(torch.arange(sizes[rank // 2]) + 100 * (rank // 2))
        loader = DataLoader(data, batch_size=2, sampler=PreShardedSampler(data, sizes, 4, rank, ranks_per_store=2))
        assert shard_loader(loader, rank, 4) is loader
        assert len(loader) == 2
        by_class = shard_loader(
            DataLoader(data, batch_size=2), rank, 4, PreShardedSampler, {"sizes": sizes, "ranks_per_store": 2, "shuffle": True}
        )
        assert list(by_class.sampler) == list(loader.sampler)
    shares = []
    for rank in range(4):
        data = InMemoryDataset(torch.arange(sizes[rank // 2]) + 100 * (rank // 2))
        loader = DataLoader(data, batch_size=2, sampler=PreShardedSampler(data, sizes, 4, rank, ranks_per_store=2))
        shares.append([int(v) for batch in share_for_validation(loader, rank, 4) for v in batch])
    assert sorted(shares[0] + shares[1]) == list(range(5))
    assert sorted(shares[2] + shares[3]) == list(range(100, 108))


def test_stores_of_ones_own_larger_than_the_cache(tmp_path: Path) -> None:
    ArrayZarrWriter(tmp_path / "x.zarr", chunk_rows=10).write(torch.arange(1000))
    dataset = Dataset(ArrayZarrReader(tmp_path / "x.zarr", cache_bytes=100 * 8 * 10))
    sampler = PreShardedSampler(dataset, [1000, 400], 2, 0, shuffle="blocks", window=16)
    batches = DataLoader(dataset, batch_size=10, sampler=sampler)
    assert sorted(int(v) for batch in batches for v in batch) == list(range(1000))
    blocks = np.array(list(sampler))[:520] // 40
    assert len(np.unique(blocks)) == 13  # of 25 blocks, in two windows
    with pytest.raises(ConfigError, match="does not hold a window"):
        tight = Dataset(ArrayZarrReader(tmp_path / "x.zarr", cache_bytes=20 * 8 * 10))
        PreShardedSampler(tight, [1000, 400], 2, 0, shuffle="blocks", window=16)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), owners=st.integers(1, 12))
def test_stores_are_dealt_evenly(sizes: list[int], owners: int) -> None:
    if len(sizes) < owners:
        with pytest.raises(ConfigError, match="not enough stores"):
            deal_stores(sizes, owners)
        return
    shares = deal_stores(sizes, owners)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    held = [sum(sizes[i] for i in share) for share in shares]
    assert max(held) - min(held) <= max(sizes)


def test_what_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sizes": [5, 6, 7]}, "3 sizes, 1 ranks each, for 2 ranks.*deal_stores"),
        ({"sizes": [4, 6]}, r"not that of owner 0.*found: 5 samples; needed: 4, by sizes\[0\]"),
        ({"sizes": [5, 0]}, "owner 1 has no samples"),
        ({"ranks_per_store": 0}, "ranks_per_store"),
        ({"rank": 2}, "one of its replicas"),
        ({"shuffle": "chunks"}, "no such word"),
        ({"shuffle": "blocks"}, "stored together"),
    ]
    for changed, match in refused:
        arguments: dict[str, Any] = {"dataset": 5, "sizes": [5, 6], "num_replicas": 2, "rank": 0, **changed}
        with pytest.raises(ConfigError, match=match):
            PreShardedSampler(**arguments)
    with pytest.raises(ConfigError, match="PreShardedSampler cannot tell the rest"):
        BatchSampler(made([5, 6], 0), 2).after(4)
