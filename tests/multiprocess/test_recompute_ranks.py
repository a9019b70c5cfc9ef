"""Modules that keep no activations, in networks that are sharded or replicated: two ranks against one process."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import recompute_cases as cases
from tests.multiprocess.test_ddp import SHARES, assert_same, one_process

CASES = "tests.multiprocess.recompute_cases:"


@pytest.mark.parametrize("loss", ["first order", "score", "two_phases"])
@pytest.mark.parametrize("parts", ["the blocks", "within the blocks", "around the blocks", "beside the blocks"])
def test_sharded_networks(ranks, loss, parts):
    """Gathered calls within, around and beside what is computed again."""
    if (loss, parts) == ("two_phases", "around the blocks") and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        with pytest.raises(AssertionError, match="TrainingError: Net cannot be computed again around parts that are sharded"):
            ranks.call(CASES + "sharded", loss, "blocks", parts, False, breaks=True)
        return
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


@pytest.mark.parametrize("loss", ["first", "second"])
@pytest.mark.parametrize(("hooks", "accumulate"), [("recomputed", 1), ("recomputed", 3), ("compiled", 1)])
def test_under_fsdp2_hook(ranks, loss, hooks, accumulate):
    """Ten steps of a sharded network, its blocks recomputed or compiled, are those of one process that does neither."""
    wanted = cases.under_fsdp2(single_process("cpu"), loss, accumulate, "")
    for got in ranks.call(CASES + "under_fsdp2", loss, accumulate, hooks):
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        for a, b in zip(got["weights"], wanted["weights"], strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)
