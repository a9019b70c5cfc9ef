"""Energy-based losses on two ranks take the steps of one process on the same global batch with the same noise."""

from __future__ import annotations

import pytest

from tests.distributed.ebm_loss_cases import CASES, SHARES, by_hand

HERE = "tests.distributed.ebm_loss_cases"


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(ranks, name, share):
    """B36, B40: each rank has noise of its own; a bias in the head gets its gradient, zero or not."""
    accumulate, sizes = SHARES[share]
    wanted = by_hand(name, accumulate, sizes)
    for got in ranks.call(f"{HERE}:train", name, accumulate, sizes):
        assert len(got["gradients"]) == len(wanted["gradients"])
        for ours, theirs in zip(got["gradients"], wanted["gradients"], strict=True):
            scale = max(float(g.abs().max()) for g in theirs)
            assert scale > 0
            assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-12 * scale
        assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-11)
        for a, b in zip(got["weights"], wanted["weights"], strict=True):
            assert float((a - b).abs().max()) <= 1e-12
