"""K02: the rest of an epoch on another number of ranks is what was not yet used, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import (
    BatchSampler,
    DistributedSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    RandomSampler,
    SequentialSampler,
)
from nvalchemi.errors import ConfigError

CHILDREN: Any = SimpleNamespace(lengths=(27, 13), names=("a", "b"))
KINDS = {
    "one data set": lambda n, r: BatchSampler(DistributedSampler(40, n, r, seed=3), 4),
    "batches of several": lambda n, r: MultiDatasetBatchSampler(CHILDREN, 4, num_replicas=n, rank=r, seed=3),
    "samples of several": lambda n, r: BatchSampler(MultiDatasetSampler(CHILDREN, num_replicas=n, rank=r, seed=3), 4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_stopped_after_3_steps_of_2_ranks(kind: str, ranks: int, steps: int) -> None:
    used = [i for rank in range(2) for batch in list(KINDS[kind](2, rank))[:3] for i in batch]
    assert len(used) == len(set(used)) == 24
    parts = [list(KINDS[kind](ranks, rank).after(24)) for rank in range(ranks)]
    assert all(len(part) == steps for part in parts)
    rest = [i for part in parts for batch in part for i in batch]
    assert sorted(used + rest) == list(range(40))


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    before=st.integers(1, 4),
    now=st.integers(1, 16),
    steps=st.integers(0, 12),
    epoch=st.integers(0, 3),
)
def test_any_numbers_of_ranks(kind: str, before: int, now: int, steps: int, epoch: int) -> None:
    def sampler(n: int, rank: int) -> Any:
        made = KINDS[kind](n, rank)
        made.set_epoch(epoch)
        return made

    used = {i for rank in range(before) for batch in list(sampler(before, rank))[:steps] for i in batch}
    consumed = min(steps * 4 * before, 40)
    rests = [sampler(now, rank).after(consumed) for rank in range(now)]
    parts = [list(rest) for rest in rests]
    assert {len(part) for part in parts} == {len(rests[0])}
    fresh = []
    for rest, part in zip(rests, parts, strict=True):
        flat = [i for batch in part for i in batch]
        fresh += flat[: len(flat) - rest.sampler.num_padded]
    assert len(fresh) == len(set(fresh)) == 40 - consumed
    assert used | set(fresh) == set(range(40))
    assert len(used) == consumed


def test_plain_samplers_and_twice() -> None:
    for plain in (RandomSampler(40, seed=3), SequentialSampler(40)):
        plain.set_epoch(2)
        assert list(plain.after(24)) == list(plain.after(20).after(4)) == list(plain)[24:]


def test_fixed_compositions_go_on_at_a_batch() -> None:
    def made(n: int, rank: int, size: int = 4) -> MultiDatasetBatchSampler:
        return MultiDatasetBatchSampler(
            CHILDREN, size, samples_per_dataset=[size - 1, 1], num_batches=12, num_replicas=n, rank=rank
        )

    whole = list(made(1, 0))
    parts = [list(made(3, rank).after(24)) for rank in range(3)]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == whole[6:]
    with pytest.raises(ConfigError, match="middle of one"):
        made(1, 0, size=5).after(24)


def test_what_cannot_tell() -> None:
    with pytest.raises(ConfigError, match="list cannot tell"):
        BatchSampler([1, 2, 3], 2).after(1)
