"""Two ranks take the rates that their world asks for, and one of them says so."""

from __future__ import annotations

import pytest


def test_rates_of_two_ranks(ranks):
    words = "SGD: lr 0.01 × 2 (linear in the world size, 2) = 0.02"
    first, second = ranks.call("tests.multiprocess.rates_cases:scaled", "linear")
    assert first == ({"model": 0.02}, {"model": words}, [words])
    assert second == ({"model": 0.02}, {"model": words}, [])


def test_rates_as_declared(ranks):
    """Nothing is scaled; that the batch has grown is told once."""
    for rank, (rates, scaled, said) in enumerate(ranks.call("tests.multiprocess.rates_cases:scaled", None)):
        assert rates == {"model": pytest.approx(0.01)} and scaled == {}
        assert [line.startswith("optimizer 'model': the batch of a step is that of 2 processes") for line in said] == [True] * (
            rank == 0
        )
