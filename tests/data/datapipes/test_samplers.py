from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.samplers import (
    BatchSampler,
    DistributedSampler,
    DistributedSamplerProtocol,
    RandomSampler,
    SequentialSampler,
    seek,
)
from nvalchemi.errors import ConfigError


def test_random_sampler_covers_all_and_differs_by_epoch_and_seed() -> None:
    sampler = RandomSampler(5000, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(5000))
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert sorted(second) == list(range(5000))
    assert list(RandomSampler(5000, seed=4)) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 300), batch_size=st.integers(1, 40), drop_last=st.booleans(), shuffle=st.booleans(), data=st.data())
def test_batches_sought_equal_batches_replayed(
    n: int, batch_size: int, drop_last: bool, shuffle: bool, data: st.DataObject
) -> None:
    sampler = RandomSampler(n, seed=1) if shuffle else SequentialSampler(n)
    batches = BatchSampler(sampler, batch_size, drop_last)
    replayed = list(batches)
    assert len(replayed) == len(batches)
    assert [index for batch in replayed for index in batch] == list(sampler)[: len(batches) * batch_size if drop_last else n]
    assert all(len(batch) == batch_size for batch in replayed[: n // batch_size])
    position = data.draw(st.integers(0, len(batches)))
    assert list(batches.iter_from(position)) == replayed[position:]
    with pytest.raises(ConfigError):
        batches.iter_from(len(batches) + 1)


def test_a_running_iterator_keeps_its_epoch() -> None:
    batches = BatchSampler(RandomSampler(10_000), 7)
    expected = list(batches)
    running = iter(batches)
    head = [next(running)]
    batches.set_epoch(5)
    assert head + list(running) == expected


def test_seeking_computes_nothing_before_the_position() -> None:
    class Recording(RandomSampler):
        seen: list[int] = []

        def epoch_order(self):
            order = super().epoch_order()

            def recorded(positions):
                self.seen.extend(positions.tolist())
                return order(positions)

            return recorded

    sampler = Recording(1000)
    next(BatchSampler(sampler, 10).iter_from(90))
    assert min(sampler.seen) == 900


@settings(max_examples=80, deadline=None)
@given(n=st.integers(0, 200), replicas=st.integers(1, 16), drop_last=st.booleans(), shuffle=st.booleans())
def test_ranks_divide_the_order_as_torch_does(n: int, replicas: int, drop_last: bool, shuffle: bool) -> None:
    samplers = [DistributedSampler(n, replicas, rank, shuffle, seed=2, drop_last=drop_last) for rank in range(replicas)]
    parts = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1
    assert all(len(part) == len(sampler) for part, sampler in zip(parts, samplers, strict=True))
    whole = list(DistributedSampler(n, 1, 0, shuffle, seed=2))
    dealt = [part[k] for k in range(len(parts[0])) for part in parts]
    assert dealt == (whole * replicas)[: len(dealt)]  # the order does not depend on the number of ranks
    fresh = [part[: len(part) - sampler.num_padded] for part, sampler in zip(parts, samplers, strict=True)]
    flat = [index for part in fresh for index in part]
    assert len(flat) == len(set(flat)) == (n // replicas * replicas if drop_last else n)
    if n and not shuffle:
        for rank in range(replicas):
            theirs = torch.utils.data.DistributedSampler(range(n), replicas, rank, shuffle=False, drop_last=drop_last)
            assert list(theirs) == parts[rank]


def test_protocol_tells_distributed_samplers() -> None:
    assert isinstance(DistributedSampler(10, 2, 1), DistributedSamplerProtocol)
    assert isinstance(torch.utils.data.DistributedSampler(range(4), 2, 0), DistributedSamplerProtocol)
    assert not isinstance(torch.utils.data.SequentialSampler(range(4)), DistributedSamplerProtocol)
    # These are what a loader makes by itself: they must be divided between ranks, not taken for divided.
    assert not isinstance(SequentialSampler(4), DistributedSamplerProtocol)
    assert not isinstance(RandomSampler(4), DistributedSamplerProtocol)
    assert list(DistributedSampler(100, seed=4)) == list(RandomSampler(100, seed=4))


def test_foreign_samplers_are_sought_where_their_order_is_settled() -> None:
    assert list(BatchSampler([3, 1, 2, 0], 3).iter_from(1)) == [[0]]
    theirs = torch.utils.data.DistributedSampler(range(10), 2, 0, seed=1)
    batches = BatchSampler(theirs, 2)
    batches.set_epoch(4)
    assert theirs.epoch == 4
    assert list(batches.iter_from(1)) == list(batches)[1:]
    with pytest.raises(ConfigError, match="cannot be sought"):
        seek(torch.utils.data.RandomSampler(range(10)), 4)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, None])
def test_wrong_batch_sizes(batch_size: object) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        BatchSampler([0], batch_size)


@pytest.mark.parametrize(("replicas", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_wrong_ranks(replicas: int, rank: int) -> None:
    with pytest.raises(ConfigError, match="num_replicas"):
        DistributedSampler(5, replicas, rank)


def test_indices_are_plain_integers() -> None:
    assert {type(index) for index in RandomSampler(10)} == {int}
    assert {type(index) for index in next(iter(BatchSampler(np.arange(4).tolist(), 2)))} == {int}
