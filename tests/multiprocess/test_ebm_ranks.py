"""Chains and couplings on two ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi.ebm.couplings import SinkhornCoupling
from tests.multiprocess import ebm_cases as cases

CASES = "tests.multiprocess.ebm_cases"


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


@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize(("rows", "reg"), [([24, 24], 0.05), ([9, 31], 1e-3)])
def test_ranks_pair_as_one_process_with_all_rows(ranks, rows, reg, by_group):
    """Whatever the ranks' own generators: rank 0's draws for all."""
    both = ranks.call(f"{CASES}:coupled", rows, reg, by_group)
    x0, x1, labels = (torch.cat(part) for part in zip(*cases.pooled(11, rows), strict=True))
    pairs = SinkhornCoupling(reg=reg)(x0, x1, generator=torch.Generator().manual_seed(5), conditions=labels)
    assert torch.equal(torch.tensor(both[0][0] + both[1][0]), pairs.x1)
    assert both[0][1] + both[1][1] == pairs.conditions.tolist()
    assert any(label >= rows[0] for label in both[0][1]) and any(label < rows[0] for label in both[1][1])
