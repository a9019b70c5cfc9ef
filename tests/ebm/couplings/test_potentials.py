"""Entropic transport: right at any regularisation, finite always, honest where it is not right."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.ebm.couplings.potentials import potentials


def clouds(n: int, m: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Costs between a Gaussian and eight clusters, over the largest."""
    generator = torch.Generator().manual_seed(seed)
    x0 = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    angle = torch.randint(8, (m,), generator=generator) * (math.pi / 4)
    x1 = 0.2 * torch.randn(m, dim, generator=generator, dtype=torch.float64)
    x1[:, :2] += 4 * torch.stack([angle.cos(), angle.sin()], 1)
    cost = torch.cdist(x0, x1).square()
    return (cost / cost.max()).to(dtype)


def by_logarithms(cost: torch.Tensor, reg: float, sweeps: int) -> torch.Tensor:
    """Plain Sinkhorn, all in logarithms and float64."""
    scaled = cost.double() / -reg
    columns = torch.zeros(cost.shape[1], dtype=torch.float64)
    for _ in range(sweeps):
        rows = -math.log(cost.shape[0]) - torch.logsumexp(scaled + columns, 1)
        columns = -math.log(cost.shape[1]) - torch.logsumexp(scaled + rows[:, None], 0)
    return (scaled + rows[:, None] + columns).exp()


def marginal_errors(plan: torch.Tensor) -> tuple[float, float]:
    plan = plan.double()
    n, m = plan.shape
    return float((plan.sum(1) * n - 1).abs().max()), float((plan.sum(0) * m - 1).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reg", [1.0, 0.05, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize(("n", "m", "dim"), [(64, 64, 2), (40, 90, 2), (128, 128, 32), (1, 5, 2), (5, 1, 2)])
def test_marginals_are_right(n, m, dim, reg, dtype):
    """B98."""
    plan = potentials(clouds(n, m, dim, dtype=dtype), reg)
    assert plan.converged and plan.matrix().dtype == dtype
    rows, columns = marginal_errors(plan.matrix())
    assert rows < 1e-5 and columns < 1.1e-3
    assert plan.error == pytest.approx(columns, abs=2e-5)


@pytest.mark.parametrize("reg", [0.05, 1e-2, 3e-3])
def test_the_plan_is_that_of_plain_sweeps(reg):
    cost = clouds(48, 48, 2, dtype=torch.float64)
    plan = potentials(cost, reg, tolerance=1e-10).matrix()
    expected = by_logarithms(cost, reg, 20_000)
    assert torch.allclose(plan, expected, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("reg", [1e-3, 1.0])
def test_points_at_any_scale_in_float32(scale, reg):
    """B98: regularisation in units of the cost itself, which may be 1e11 times as much: finite, and right or said to be wrong."""
    generator = torch.Generator().manual_seed(1)
    x0, x1 = (scale * torch.randn(64, 2, generator=generator) for _ in range(2))
    plan = potentials(torch.cdist(x0, x1).square(), reg)
    matrix = plan.matrix()
    rows, columns = marginal_errors(matrix)
    assert matrix.isfinite().all() and rows < 1e-5
    assert math.isfinite(plan.error)
    assert columns < 1.1e-3 if plan.converged else plan.error > 1e-3
    assert plan.converged or scale * scale / reg > 1e6
    if scale >= 1 and reg <= 1:
        assert not torch.allclose(matrix, torch.full_like(matrix, 1 / 64**2), rtol=0.5)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 30),
    m=st.integers(1, 30),
    seed=st.integers(0, 1000),
    reg=st.sampled_from([1e-3, 1e-2, 0.3]),
    twins=st.booleans(),
    outlier=st.sampled_from([1.0, 30.0]),
)
def test_hard_cases_stay_finite_and_say_the_truth(n, m, seed, reg, twins, outlier):
    generator = torch.Generator().manual_seed(seed)
    x0, x1 = torch.randn(n, 3, generator=generator), torch.randn(m, 3, generator=generator)
    x1[0] *= outlier
    if twins:
        x0, x1 = x0.round(), x1.round()
    cost = torch.cdist(x0, x1).square()
    plan = potentials(cost / cost.max().clamp(min=1e-9), reg)
    rows, columns = marginal_errors(plan.matrix())
    assert rows < 1e-5
    assert plan.converged == (columns < 1.02e-3) or abs(columns - 1e-3) < 5e-5


def test_too_few_iterations_are_told():
    plan = potentials(clouds(64, 64, 2), 1e-3, n_iters=2)
    assert not plan.converged and plan.error > 1e-2 and plan.updates == 2
    assert plan.matrix().isfinite().all()


def test_equal_costs_give_the_uniform_plan():
    plan = potentials(torch.full((4, 8), 3.0), 1e-3)
    assert plan.converged and torch.allclose(plan.matrix(), torch.full((4, 8), 1 / 32))
