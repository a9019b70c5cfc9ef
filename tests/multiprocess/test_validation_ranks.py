"""Validation on two ranks gives the numbers of one process, and disturbs no training."""

from __future__ import annotations

import pytest

from nvalchemi.distributed import single_process
from tests.multiprocess import validation_cases as cases

CASES = "tests.multiprocess.validation_cases"
ALONE = single_process("cpu")


def test_forces_with_averaged_weights(ranks):
    """B104: no parameter gradients, no graph kept, the numbers of a plain forward with the averaged weights."""
    for got in [cases.forces(ALONE), *ranks.call(f"{CASES}:forces")]:
        assert got["same"] == [True] * 3 and got["graphs"] and not any(got["graphs"])
        wanted = cases.plain_forward(got["average"])
        assert {key: got["validation"][key] for key in wanted} == pytest.approx(wanted, rel=1e-12)


def test_energies_weigh_by_structures_and_forces_by_atoms(ranks):
    """B106."""
    for got in [cases.weighed(ALONE), *ranks.call(f"{CASES}:weighed")]:
        assert got["energy_mae"] == pytest.approx(2.0, rel=1e-12)
        assert got["forces_mae"] == pytest.approx((8 * 1 + 12 * 2) / 20, rel=1e-12)
        assert got["n"] == 9


def test_how_often_is_validated_changes_no_step(ranks):
    """B108: bitwise, with dropout and torch's shuffled order."""
    never, seldom, often = (ranks.call(f"{CASES}:disturbed", every) for every in (0, 5, 2))
    assert len(never[0]) == 11 and never == seldom == often
    assert cases.disturbed(ALONE, 0) == cases.disturbed(ALONE, 2)
