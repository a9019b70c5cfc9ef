"""Modules that keep no activations, in networks that are sharded or replicated: two ranks against one process."""

from __future__ import annotations

import pytest

from tests.distributed.test_ddp import SHARES, assert_same, one_process

CASES = "tests.distributed.recompute_cases:"


@pytest.mark.parametrize("loss", ["first order", "score", "two_phases"])
@pytest.mark.parametrize("parts", ["the blocks", "within the blocks", "around the blocks", "beside the blocks"])
def test_sharded_networks(ranks, loss, parts):
    """Gathered calls within, around and beside what is computed again."""
    assert max(ranks.call(CASES + "sharded", loss, "blocks", parts, False)) < 1e-12


@pytest.mark.parametrize("parts", ["the blocks", "around the blocks"])
def test_sharded_as_a_whole_or_afterwards(ranks, parts):
    assert max(ranks.call(CASES + "sharded", "score", "whole", parts, False)) < 1e-12
    assert max(ranks.call(CASES + "sharded", "score", "blocks", parts, True)) < 1e-12


@pytest.mark.parametrize("parts", ["the blocks", "within the blocks", "around the blocks", "beside the blocks"])
def test_through_the_hooks_of_fully_shard(ranks, parts):
    assert max(ranks.call(CASES + "plain_sharded", parts)) < 1e-12


@pytest.mark.parametrize("name", ["unequal samples", "micro-batches, short last window"])
def test_under_ddp(ranks, name):
    """Each gradient is sent once, also where a loss contains forces, and it is that of one process without recomputing."""
    accumulate, shares = SHARES[name]
    wanted = one_process(accumulate, shares)
    for got in ranks.call(CASES + "replicated", shares, accumulate, False):
        assert_same(got, wanted)
