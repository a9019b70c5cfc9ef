"""Chains and couplings on two ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = "tests.distributed.ebm_cases"


def test_rows_go_to_whom_they_are_for(ranks):
    assert ranks.call(f"{CASES}:exchanged") == [[0, 1, 10], [2, 3, 4, 11, 12, 13, 14]]


def test_ranks_are_counted_within_their_group(ranks):
    assert ranks.call(f"{CASES}:within_a_group") == [(0, 2, None), (1, 2, (0, 1))]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 33), seed=st.integers(0, 1000))
def test_mixing_loses_and_doubles_no_chain(ranks, size, seed):
    both = ranks.call(f"{CASES}:mixed", size, seed)
    assert sorted(both[0] + both[1]) == [*range(size), *range(1000, 1000 + size)]
    for rank, chains in enumerate(both):
        assert len(chains) == size
        foreign = sum((chain >= 1000) != rank for chain in chains)
        assert foreign in (size // 2, size - size // 2)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_mixing_structures_loses_and_doubles_none(ranks, size):
    both = ranks.call(f"{CASES}:mixed_structures", size)
    assert sorted(both[0] + both[1]) == [*range(size), *range(100, 100 + size)]
    assert len(both[0]) == size
