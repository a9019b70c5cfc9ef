from __future__ import annotations

import math
import pickle
import time
import tracemalloc
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import DistributedSamplerProtocol, MultiDatasetBatchSampler, MultiDatasetSampler
from nvalchemi.data.datapipes.mixture import locally_shuffled
from nvalchemi.errors import ConfigError


def sized(*lengths: int) -> Any:
    """What the samplers need of a data set."""
    return SimpleNamespace(lengths=lengths, names=tuple(f"set {number}" for number in range(len(lengths))))


def child_counts(indices: list[int], lengths: tuple[int, ...]) -> list[int]:
    child = np.searchsorted(np.cumsum(lengths), np.asarray(indices, np.int64), side="right")
    return np.bincount(child, minlength=len(lengths)).tolist()


sizes = st.lists(st.integers(0, 500), min_size=1, max_size=4).map(tuple)
ranks = st.integers(1, 16)


@settings(max_examples=120, deadline=None)
@given(lengths=sizes, replicas=ranks, batch_size=st.integers(1, 33), drop_last=st.booleans(), shuffle=st.booleans())
def test_by_default_every_sample_comes_once(
    lengths: tuple[int, ...], replicas: int, batch_size: int, drop_last: bool, shuffle: bool
) -> None:
    """Ranks: as many batches each, of the same sizes, disjoint up to the declared padding, and together all samples."""
    samplers = [
        MultiDatasetBatchSampler(
            sized(*lengths), batch_size, shuffle=shuffle, num_replicas=replicas, rank=rank, seed=5, drop_last=drop_last
        )
        for rank in range(replicas)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert len({tuple(map(len, part)) for part in parts}) == 1
    assert all(len(part) == len(sampler) for part, sampler in zip(parts, samplers, strict=True))
    assert all(0 <= sampler.num_padded <= 1 for sampler in samplers)
    fresh: list[int] = []
    for part, sampler in zip(parts, samplers, strict=True):
        flat = [index for batch in part for index in batch]
        fresh += flat[: len(flat) - sampler.num_padded]
    total = sum(lengths)
    assert len(fresh) == len(set(fresh)) == (total // (replicas * batch_size) * replicas * batch_size if drop_last else total)
    assert all(0 <= index < total for index in fresh)


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4).map(tuple),
    replicas=ranks,
    batch_size=st.integers(4, 33),
    policy=st.sampled_from(["dataset_size", "min_size", "max_size"]),
    drop_last=st.booleans(),
    fixed=st.booleans(),
    replacement=st.booleans(),
    data=st.data(),
)
def test_policies_say_what_an_epoch_covers(
    lengths: tuple[int, ...],
    replicas: int,
    batch_size: int,
    policy: Any,
    drop_last: bool,
    fixed: bool,
    replacement: bool,
    data: st.DataObject,
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, batch_size - 1), min_size=len(lengths) - 1, max_size=len(lengths) - 1)))
    counts = np.diff([0, *cuts, batch_size]).tolist()
    what: dict[str, Any] = {"samples_per_dataset" if fixed else "weights": counts}
    samplers = [
        MultiDatasetBatchSampler(
            sized(*lengths),
            batch_size,
            **what,
            epoch_policy=policy,
            replacement=replacement,
            num_replicas=replicas,
            rank=rank,
            seed=1,
            drop_last=drop_last,
        )
        for rank in range(replicas)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])}
    assert len({tuple(map(len, part)) for part in parts}) == 1
    for padded, batch in ((s.num_padded, batch) for s, part in zip(samplers, parts, strict=True) for batch in part):
        given_ = child_counts(batch, lengths)
        if fixed:
            assert given_ == counts
        elif len(batch) == batch_size:
            assert max(abs(a - b) for a, b in zip(given_, counts, strict=True)) <= len(lengths) + padded
    length = {
        "dataset_size": sum(lengths) / batch_size,
        "min_size": min(n / c for n, c in zip(lengths, counts, strict=True)),
        "max_size": max(n / c for n, c in zip(lengths, counts, strict=True)),
    }[policy]
    if drop_last:
        assert abs(len(parts[0]) - math.floor(length / replicas + 1e-9)) <= (0 if fixed else 1)
    else:
        assert abs(len(parts[0]) - math.ceil(length / replicas - 1e-9)) <= (0 if fixed else 1)
    if replacement:
        return
    fresh: list[int] = []
    for part, sampler in zip(parts, samplers, strict=True):
        flat = [index for batch in part for index in batch]
        fresh += flat[: len(flat) - sampler.num_padded]
    seen = Counter(fresh)
    bounds = np.cumsum([0, *lengths])
    for start, stop in pairwise(bounds.tolist()):  # no sample again before all of its data set came
        times = [seen[index] for index in range(start, stop)]
        assert max(times) - min(times) <= (1 if replicas == 1 or not drop_last else 2)
    if policy == "max_size" and not drop_last:
        assert len(seen) == sum(lengths)
    if policy == "min_size" and (drop_last or not fixed):
        assert max(seen.values(), default=0) <= 1


def test_the_last_round_keeps_the_rates() -> None:
    """Every tenth sample of two data sets that alternate evenly would be of one of them in one rank, and never in the next."""
    samplers = [
        MultiDatasetBatchSampler(sized(1, 172), 18, weights=[3, 15], num_replicas=10, rank=rank, drop_last=False)
        for rank in range(10)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert all(2 <= child_counts(batch, (1, 172))[0] <= 4 for (batch,) in parts)
    assert sum(sampler.num_padded for sampler in samplers) == 180 - 173


@settings(max_examples=60, deadline=None)
@given(lengths=sizes, replicas=ranks, batch_size=st.integers(1, 20), data=st.data())
def test_any_batch_is_found_by_its_number(lengths: tuple[int, ...], replicas: int, batch_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, replicas - 1))
    sampler = MultiDatasetBatchSampler(sized(*lengths), batch_size, num_replicas=replicas, rank=rank)
    whole = list(sampler)
    position = data.draw(st.integers(0, len(sampler)))
    assert list(sampler.iter_from(position)) == whole[position:]
    with pytest.raises(ConfigError):
        sampler.iter_from(len(sampler) + 1)


def test_ranks_see_the_batches_of_one_process() -> None:
    one = list(MultiDatasetBatchSampler(sized(300, 100), 8, weights=[1, 2], num_batches=40))
    for replicas in (2, 4, 5):
        parts = [
            list(MultiDatasetBatchSampler(sized(300, 100), 8, [1, 2], num_batches=40, num_replicas=replicas, rank=rank))
            for rank in range(replicas)
        ]
        assert [batch for step in zip(*parts, strict=True) for batch in step] == one


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fixed", [True, False])
def test_an_even_mix_of_unequal_sizes(replicas: int, fixed: bool) -> None:
    """B31: the ratio is as asked, and the small set is gone through again and again, each time in a new order."""
    what: dict[str, Any] = {"samples_per_dataset": [4, 4]} if fixed else {"weights": [0.5, 0.5]}
    parts = [
        list(MultiDatasetBatchSampler(sized(1000, 10), 8, **what, num_batches=400, num_replicas=replicas, rank=rank))
        for rank in range(replicas)
    ]
    batches = [batch for step in zip(*parts, strict=True) for batch in step]
    assert len(batches) == 400
    if fixed:
        assert all(child_counts(batch, (1000, 10)) == [4, 4] for batch in batches)
    flat = [index for batch in batches for index in batch]
    share = child_counts(flat, (1000, 10))[0] / len(flat)
    assert abs(share - 0.5) < 0.02
    small = [index for index in flat if index >= 1000]
    passes = [tuple(small[start : start + 10]) for start in range(0, len(small) - 9, 10)]
    assert all(sorted(one) == list(range(1000, 1010)) for one in passes)
    assert len(set(passes)) > 0.95 * len(passes)


def test_orders_differ_by_epoch_and_repeat_by_seed() -> None:
    """B23, at the sampler."""
    sampler = MultiDatasetBatchSampler(sized(50, 30), 8, seed=3)
    orders = []
    for epoch in (0, 1, 2, 0):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        orders.append([index for batch in sampler for index in batch])
    assert orders[0] == orders[3] and len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(80)) for order in orders)
    assert [i for b in MultiDatasetBatchSampler(sized(50, 30), 8, seed=3) for i in b] == orders[0]
    assert [i for b in MultiDatasetBatchSampler(sized(50, 30), 8, seed=4) for i in b] != orders[0]
    generator = torch.Generator().manual_seed(3)
    assert [i for b in MultiDatasetBatchSampler(sized(50, 30), 8, generator=generator) for i in b] == orders[0]


def test_a_part_of_a_data_set_is_another_part_each_epoch() -> None:
    """K01: 300 of 1000 an epoch; after 10 epochs 97 % were seen, as often as independent draws of a part would have it."""
    sampler = MultiDatasetBatchSampler(sized(1000, 100), 8, weights=[300, 100], epoch_policy="min_size", seed=2)
    times = np.zeros(1000)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        flat = np.array([index for batch in sampler for index in batch])
        assert sorted(flat[flat >= 1000]) == list(range(1000, 1100))
        mine = flat[flat < 1000]
        assert len(mine) == len(set(mine)) == 300
        times[mine] += 1
    assert (times == 0).mean() == pytest.approx(0.7**10, abs=4 * math.sqrt(0.028 / 1000))
    # Binomial(10, 0.3): variance 2.1
    assert times.mean() == 3 and times.var() == pytest.approx(2.1, rel=0.2)


def test_1024_ranks() -> None:
    lengths, replicas, batch_size = (40_000, 3_000, 7), 1024, 4
    samplers = [
        MultiDatasetBatchSampler(sized(*lengths), batch_size, num_replicas=replicas, rank=rank) for rank in range(replicas)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])} == {11}
    fresh = []
    for part, sampler in zip(parts, samplers, strict=True):
        flat = [index for batch in part for index in batch]
        fresh += flat[: len(flat) - sampler.num_padded]
    assert sorted(fresh) == list(range(sum(lengths)))


def test_balanced() -> None:
    lengths = (100, 10, 1)
    exact = MultiDatasetBatchSampler.balanced(sized(*lengths), 9, num_batches=20)
    assert all(child_counts(batch, lengths) == [3, 3, 3] for batch in exact)
    round_robin = [index for batch in MultiDatasetBatchSampler.balanced(sized(*lengths), 8, num_batches=30) for index in batch]
    assert child_counts(round_robin, lengths) == [80, 80, 80]


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    sampler = MultiDatasetBatchSampler(sized(20, 5), 10, num_batches=2000, weights=[1, 1], replacement=True)
    flat = np.array([index for batch in sampler for index in batch])
    counts = np.bincount(flat[flat < 20], minlength=20)
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert abs(chi_square - 19) < 4 * math.sqrt(2 * 19)
    small = flat[flat >= 20]
    assert np.mean(small[1:] == small[:-1]) == pytest.approx(0.2, abs=0.02)


def test_a_billion_samples_cost_nothing_at_the_start() -> None:
    tracemalloc.start()
    begin = time.perf_counter()
    sampler = MultiDatasetBatchSampler(sized(10**9, 10**7), 64, num_replicas=2, rank=1)
    first = next(iter(sampler))
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 64 and seconds < 0.05 and peak < 20e6


# -- one by one ------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(lengths=sizes, replicas=ranks, drop_last=st.booleans(), shuffle=st.booleans())
def test_samples_one_by_one(lengths: tuple[int, ...], replicas: int, drop_last: bool, shuffle: bool) -> None:
    samplers = [
        MultiDatasetSampler(sized(*lengths), shuffle=shuffle, num_replicas=replicas, rank=rank, drop_last=drop_last)
        for rank in range(replicas)
    ]
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {len(samplers[0])}
    fresh = [i for part, s in zip(parts, samplers, strict=True) for i in part[: len(part) - s.num_padded]]
    total = sum(lengths)
    assert len(fresh) == len(set(fresh)) == (total // replicas * replicas if drop_last else total)
    one = list(MultiDatasetSampler(sized(*lengths), shuffle=shuffle))
    assert [part[k] for k in range(total // replicas) for part in parts] == one[: total // replicas * replicas]


def test_every_rank_gets_the_rates() -> None:
    for rank in range(2):
        sampler = MultiDatasetSampler(sized(1000, 10), weights=[1, 1], num_samples=8000, num_replicas=2, rank=rank)
        assert abs(child_counts(list(sampler), (1000, 10))[0] / 4000 - 0.5) < 0.02
        assert list(sampler.iter_from(3000)) == list(sampler)[3000:]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 3000), seed=st.integers(0, 2**32))
def test_the_local_shuffle_is_a_bijection(length: int, seed: int) -> None:
    image = locally_shuffled(np.arange(length + 5), length, (seed,))
    assert np.array_equal(np.sort(image), np.arange(length + 5))
    assert np.array_equal(image[length:], np.arange(length, length + 5))
    assert np.abs(image - np.arange(length + 5)).max() < 1024


# -- being divided, and errors -------------------------------------------------------------------------------------------------------------


def test_is_distributed_aware_and_can_be_divided() -> None:
    for sampler in (
        MultiDatasetBatchSampler(sized(30, 10), 4, [1, 1], seed=7, generator=None),
        MultiDatasetBatchSampler(sized(30, 10), 4, [1, 1], generator=torch.Generator().manual_seed(7)),
        MultiDatasetSampler(sized(30, 10), weights=[1, 1], seed=7),
    ):
        assert isinstance(sampler, DistributedSamplerProtocol) and sampler.undivided
        parts = [list(sampler.divided(2, rank)) for rank in range(2)]
        assert [item for step in zip(*parts, strict=True) for item in step] == list(sampler)
        assert not sampler.divided(2, 1).undivided
        assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "batch_size"),
    ({"weights": [1, 1], "samples_per_dataset": [2, 2]}, "both say"),
    ({"weights": [1]}, "one number a data set"),
    ({"epoch_policy": "longest"}, "epoch_policy"),
    ({"num_batches": 0}, "num_batches"),
    ({"num_replicas": 2}, "go together"),
    ({"num_replicas": 2, "rank": 2}, "rank"),
    ({"seed": 3, "generator": torch.Generator()}, "two sources"),
]


@pytest.mark.parametrize(("kwargs", "message"), WRONG)
def test_wrong_settings(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiDatasetBatchSampler(sized(30, 10), **{"batch_size": 4, **kwargs})


def test_a_single_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="MultiDataset"):
        MultiDatasetSampler([1, 2, 3])  # type: ignore[arg-type]
