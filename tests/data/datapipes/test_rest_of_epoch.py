"""K02: the rest of an epoch on another number of ranks is what was not yet used, once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes import (
    AtomBudgetBatchSampler,
    BatchSampler,
    DistributedSampler,
    Divisible,
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


class Atoms:
    name, num_atoms = "atoms", np.random.default_rng(0).integers(1, 30, 40)

    def __len__(self) -> int:
        return 40


MIX = {"weights": [1, 2], "epoch_policy": "max_size", "seed": 3}
#: (ranks, rank, size) -> a sampler of one order; of the last two, the size is not free
SIZED: dict[str, Any] = {
    "one data set": lambda n, r, b, **how: BatchSampler(DistributedSampler(40, n, r, seed=3, **how), b, **how),
    "unshuffled": lambda n, r, b, **how: BatchSampler(DistributedSampler(40, n, r, shuffle=False, **how), b, **how),
    "batches": lambda n, r, b, **how: MultiDatasetBatchSampler(CHILDREN, b, **MIX, num_replicas=n, rank=r, **how),
    "drawn": lambda n, r, b, **how: MultiDatasetBatchSampler(CHILDREN, b, **MIX, replacement=True, num_replicas=n, rank=r, **how),
    "samples": lambda n, r, b, **how: BatchSampler(MultiDatasetSampler(CHILDREN, **MIX, num_replicas=n, rank=r, **how), b, **how),
    "atoms": lambda n, r, b, **how: AtomBudgetBatchSampler(Atoms(), 30 * b, seed=3, num_replicas=n, rank=r, **how),
    "fixed": lambda n, r, b, **how: MultiDatasetBatchSampler(
        CHILDREN, 4, samples_per_dataset=[3, 1], num_batches=12, num_replicas=n, rank=r, **how
    ),
}


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(sorted(SIZED)),
    stages=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=4),
    last=st.tuples(st.integers(1, 16), st.integers(1, 6)),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_a_chain_of_ranks_and_batch_sizes_uses_up_one_order(
    kind: str, stages: list[tuple[int, int, int]], last: tuple[int, int], drop_last: bool, epoch: int
) -> None:
    """B29: whatever ranks and batches use them, and however often they change, the positions of the order are used one after the other."""

    def ranks(n: int, size: int, position: int) -> list[Any]:
        samplers = []
        for rank in range(n):
            made = SIZED[kind](n, rank, size, drop_last=drop_last)
            made.set_epoch(epoch)
            samplers.append(made.after(position))
        assert all(isinstance(sampler, Divisible) for sampler in samplers)
        assert len({len(sampler) for sampler in samplers}) == 1
        return samplers

    whole = SIZED[kind](1, 0, 1)
    whole.set_epoch(epoch)
    order = [index for batch in whole for index in batch]
    assert len(order) == whole.remaining() == whole.dealt()
    position = 0
    for n, size, steps in [*stages, (*last, 1000)]:
        samplers = ranks(n, size, position)
        parts = [list(sampler) for sampler in samplers]
        steps = min(steps, len(parts[0]))
        found = [index for part in parts for batch in part[:steps] for index in batch]
        after = samplers[0].used(steps)
        repeats = len(found) - (after - position)
        assert repeats >= 0 and (repeats == 0 or steps == len(parts[0]))
        assert Counter(order[position:after]) <= Counter(found)
        if steps == len(parts[0]):
            assert len(found) == samplers[0].dealt()
            assert repeats == sum(sampler.num_padded for sampler in samplers)
            assert drop_last or after == len(order)
        assert samplers[0].remaining() == len(order) - position
        position = after


def test_plain_samplers_and_twice() -> None:
    for plain in (RandomSampler(40, seed=3), SequentialSampler(40)):
        plain.set_epoch(2)
        assert list(plain.after(24)) == list(plain.after(20).after(4)) == list(plain)[24:]
        divided = DistributedSampler(40, 3, 1, shuffle=plain.shuffle, seed=3)
        assert plain.order_facts() == divided.order_facts()  # so that one process may go on where three were
        assert plain.division_facts() != divided.division_facts()
        assert (plain.used(24), plain.remaining(), plain.dealt()) == (24, 40, 40)


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
