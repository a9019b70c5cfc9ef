"""Compiled networks that are replicated or sharded: two ranks against one process."""

from __future__ import annotations

import pytest

from tests.multiprocess.test_ddp import SHARES, assert_same, one_process

CASES = "tests.multiprocess.compile_cases:"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_ddp(ranks):
    """PaiNN with its derivative by hand, on batches of unlike sizes."""
    _, shares = SHARES["unequal samples"]
    wanted = one_process(1, shares)
    for got in ranks.call(CASES + "replicated", shares, limit=250):
        assert_same(got, wanted)


def test_blocks_of_a_sharded_network(ranks):
    """Compiled where a loss is of first order; one of second order goes past the compiled blocks."""
    for first, second, calls in ranks.call(CASES + "sharded"):
        assert max(first, second) < 1e-12
        assert calls == [3, 3]
