"""Exact and greedy pairing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from nvalchemi.ebm.couplings import ExactOTCoupling, GreedyCoupling
from nvalchemi.ebm.couplings.assignment import exact_assignment, greedy_assignment
from nvalchemi.ebm.couplings.base import squared_distances
from nvalchemi.errors import ConfigError, DataError
from tests.ebm.couplings.test_potentials import clouds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m", "dim"), [(1, 1, 2), (5, 5, 2), (5, 9, 2), (47, 47, 3), (150, 150, 2), (200, 200, 32)])
def test_exact_is_the_least(n, m, dim, dtype):
    cost = clouds(n, m, dim, dtype=dtype)
    columns = exact_assignment(cost)
    rows, least = linear_sum_assignment(cost.double().numpy())
    assert columns.unique().numel() == n
    assert float(cost.double()[torch.arange(n), columns].sum()) == pytest.approx(
        cost.double().numpy()[rows, least].sum(), abs=1e-9
    )


@pytest.mark.parametrize("cost", [torch.zeros(120, 120), torch.eye(120), -1e6 * torch.eye(120), 1e-9 * torch.rand(120, 120)])
def test_exact_takes_any_finite_cost(cost):
    columns = exact_assignment(cost)
    rows, least = linear_sum_assignment(cost.double().numpy())
    assert float(cost.double()[torch.arange(120), columns].sum()) == pytest.approx(
        cost.double().numpy()[rows, least].sum(), rel=1e-9
    )


def sorted_scan(cost: torch.Tensor) -> list[int]:
    taken: dict[int, int] = {}
    for flat in cost.flatten().argsort(stable=True).tolist():
        row, column = divmod(flat, cost.shape[1])
        if row not in taken and column not in taken.values():
            taken[row] = column
    return [taken[row] for row in range(cost.shape[0])]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 12), more=st.integers(0, 5), seed=st.integers(0, 1000), levels=st.sampled_from([3, 10**6]))
def test_greedy_is_the_scan_of_sorted_costs(n, more, seed, levels):
    cost = torch.randint(levels, (n, n + more), generator=torch.Generator().manual_seed(seed)).float()
    assert greedy_assignment(cost).tolist() == sorted_scan(cost)


@pytest.mark.parametrize("coupling", [ExactOTCoupling(), GreedyCoupling()])
def test_sources_stay_and_each_target_comes_once(coupling):
    x0, x1 = torch.randn(50, 2, 3), torch.randn(50, 2, 3)
    pairs = coupling(x0, x1)
    assert torch.equal(pairs.x0, x0)
    order = [(x1 == row).flatten(1).all(1).nonzero().item() for row in pairs.x1]
    assert sorted(order) == list(range(50))
    assert (pairs.x0 - pairs.x1).square().sum() < (x0 - x1).square().sum()


@pytest.mark.parametrize("kind", [ExactOTCoupling, GreedyCoupling])
def test_a_group_is_refused_with_the_reason(kind):
    with pytest.raises(ConfigError, match="SinkhornCoupling"):
        kind(process_group=object())
    with pytest.raises(DataError, match="3 sources, 2 targets"):
        kind()(torch.zeros(3, 2), torch.zeros(2, 2))


def test_distances_do_not_know_the_origin():
    """Float32 far from the origin: distances of 1 at coordinates of 1e3."""
    x0, x1 = torch.randn(60, 2), torch.randn(60, 2)
    near, far = squared_distances(x0, x1), squared_distances(x0 + 1000, x1 + 1000)
    assert torch.allclose(near, far, atol=1e-3)
    exact = torch.cdist(x0.double(), x1.double()).square()
    assert torch.allclose(near.double(), exact / exact.max(), atol=1e-6)
    assert squared_distances(x0.bfloat16(), x1.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("n", [40, 150])
def test_where_the_targets_are_and_how_large_changes_no_exact_pairing(n):
    """The sum of squared distances over the pairs is a constant less twice the sum of the products."""
    x0, x1 = torch.randn(n, 2, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)
    order = torch.arange(n)
    cost = torch.cdist(x0, x1).square().numpy()
    least = linear_sum_assignment(cost)[1].tolist()
    for move, scale in ((0.0, 1.0), (1e5, 1.0), (-3.0, 1e-3), (0.0, 1e4)):
        assert ExactOTCoupling()(x0, scale * (x1 + move), conditions=order).conditions.tolist() == least
    far = ExactOTCoupling()((x0 - 500).float(), (x1 + 500).float(), conditions=order).conditions
    assert cost[order, far].sum() == pytest.approx(cost[order, least].sum(), rel=1e-4)


def test_exact_pairing_of_more_targets_than_sources_is_by_the_distances_themselves():
    """Which targets are left out depends on where they are."""
    x0, x1 = torch.tensor([[0.0], [1.0]]), torch.tensor([[9.0], [0.1], [0.9]])
    assert ExactOTCoupling()(x0, x1).x1.flatten().tolist() == pytest.approx([0.1, 0.9])


@pytest.mark.parametrize("coupling", [ExactOTCoupling(), GreedyCoupling()])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_or_has_no_finite_distance_is_refused(coupling, bad):
    x0, x1 = torch.randn(100, 2), torch.randn(100, 2)
    x1[3, 1] = bad
    with pytest.raises(DataError, match="not finite"):
        coupling(x0, x1)
    with pytest.raises(DataError, match="not finite"):
        coupling(x1, x0)


@pytest.mark.parametrize("coupling", [ExactOTCoupling(), GreedyCoupling()])
def test_points_that_are_all_alike_are_paired(coupling):
    x0, order = torch.randn(120, 2), torch.arange(120)
    assert sorted(coupling(x0, torch.ones(120, 2), conditions=order).conditions.tolist()) == order.tolist()
