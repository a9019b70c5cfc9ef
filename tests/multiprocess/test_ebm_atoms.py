"""Losses of structures on two ranks, with unequal shares, take the steps of one process on the same structures with the same noise."""

from __future__ import annotations

import pytest

from tests.multiprocess.ebm_atom_cases import CASES, by_hand
from tests.multiprocess.test_ebm_losses import assert_same


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(ranks, name):
    """B36, B40: a structure counts the same on either rank, whatever its size and whatever the others are."""
    wanted = by_hand(name)
    for got in ranks.call("tests.multiprocess.ebm_atom_cases:train", name):
        assert_same(got, wanted)
