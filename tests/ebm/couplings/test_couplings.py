"""What all couplings share: what belongs to a target goes with it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from nvalchemi.ebm.couplings import (
    ExactOTCoupling,
    GreedyCoupling,
    IndependentCoupling,
    ReflowCoupling,
    SinkhornCoupling,
    UnbalancedSinkhornCoupling,
)
from nvalchemi.ebm.couplings.sinkhorn import drawn
from nvalchemi.ebm.couplings.unbalanced import unbalanced_plan
from nvalchemi.ebm.samplers import FlowSampler
from nvalchemi.errors import ConfigError, DataError
from tests.ebm.couplings.test_potentials import clouds

PAIRING = [
    IndependentCoupling(),
    ExactOTCoupling(),
    GreedyCoupling(),
    SinkhornCoupling(),
    SinkhornCoupling(reg=1e-3),
    UnbalancedSinkhornCoupling(),
]
names = [repr(coupling) for coupling in PAIRING]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(n: int, seed: int, dim: int = 2) -> torch.Tensor:
    return torch.randn(n, dim, generator=seeded(seed))


class Both(NamedTuple):
    label: torch.Tensor
    text: list[torch.Tensor]


@pytest.mark.parametrize("coupling", PAIRING, ids=names)
def test_a_label_stays_with_its_target(coupling):
    """B96."""
    x0, x1, index = normal(64, 1), normal(64, 2), torch.arange(64)
    pairs = coupling(x0, x1, generator=seeded(), conditions=index)
    assert torch.equal(pairs.x1, x1[pairs.conditions])
    nested = {"label": index, "several": (index.float(), [x1[:, :1]]), "named": Both(index, [index]), "none": None}
    again = coupling(x0, x1, generator=seeded(), conditions=nested)
    assert torch.equal(again.x1, pairs.x1)
    assert torch.equal(again.conditions["label"], pairs.conditions)
    assert torch.equal(again.conditions["several"][0].long(), pairs.conditions)
    assert torch.equal(again.conditions["several"][1][0], pairs.x1[:, :1])
    assert isinstance(again.conditions["named"], Both) and torch.equal(again.conditions["named"].text[0], pairs.conditions)
    assert again.conditions["none"] is None


@pytest.mark.parametrize("coupling", PAIRING, ids=names)
def test_pairs_unpack_and_keep_no_graph(coupling):
    start = normal(64, 1).requires_grad_()
    x0, x1 = coupling(start * 2, normal(64, 2).requires_grad_() * 2, generator=seeded())
    assert torch.equal(x0, start * 2) and not x0.requires_grad and not x1.requires_grad
    assert x1.shape == x0.shape


@pytest.mark.parametrize("coupling", PAIRING, ids=names)
def test_pairs_are_the_generators(coupling):
    torch.manual_seed(0)
    first = coupling(normal(64, 1), normal(64, 2), generator=seeded(3)).x1
    torch.manual_seed(1)
    assert torch.equal(coupling(normal(64, 1), normal(64, 2), generator=seeded(3)).x1, first)
    if isinstance(coupling, (SinkhornCoupling, UnbalancedSinkhornCoupling)) and coupling.reg > 0.01:
        assert not torch.equal(coupling(normal(64, 1), normal(64, 2), generator=seeded(4)).x1, first)


@pytest.mark.parametrize("coupling", PAIRING, ids=names)
def test_what_does_not_fit_is_refused(coupling):
    with pytest.raises(DataError, match="no x1"):
        coupling(normal(4, 1))
    with pytest.raises(DataError, match="cannot be paired"):
        coupling(normal(4, 1), normal(4, 1, dim=3))
    with pytest.raises(DataError, match="conditions do not fit"):
        coupling(normal(4, 1), normal(4, 2), conditions={"a": torch.zeros(3)})
    with pytest.raises(DataError, match="travel with their samples"):
        coupling(normal(4, 1), normal(4, 2), conditions=["a"])


@pytest.mark.parametrize("coupling", PAIRING[1:], ids=names[1:])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_samples_that_are_not_finite_are_refused(coupling, bad):
    x1 = normal(8, 2)
    x1[3, 1] = bad
    with pytest.raises(DataError, match="not finite"):
        coupling(normal(8, 1), x1)


def test_draws_follow_the_plan():
    """Counts of 20000 draws a row against the weights, within five standard errors."""
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0, 6.0, 0.0], [5.0, 0.0, 0.0, 0.0, 0.0, 5.0]])
    draws = torch.rand(2, 20_000, generator=seeded(), dtype=torch.float64)
    for row in range(2):
        chosen = drawn(weights[row].expand(20_000, 6).clone(), draws[row])
        share = torch.bincount(chosen, minlength=6) / 20_000
        wanted = weights[row] / weights[row].sum()
        assert ((share - wanted).abs() <= 5 * (wanted * (1 - wanted) / 20_000).sqrt()).all()
    edges = drawn(weights[:1].expand(2, 6).clone(), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert edges.tolist() == [1, 4]


def test_sinkhorn_near_zero_is_the_exact_pairing_and_far_is_independent():
    x0, x1 = normal(64, 1), normal(64, 2)
    exact = (x0 - ExactOTCoupling()(x0, x1).x1).square().sum()
    sharp = SinkhornCoupling(reg=2e-4)(x0, x1, generator=seeded())
    assert (sharp.x0 - sharp.x1).square().sum() < 1.15 * exact
    blunt = SinkhornCoupling(reg=100.0)(x0, x1, generator=seeded())
    independent = torch.cdist(x0, x1).square().mean() * 64
    assert 0.6 * independent < (blunt.x0 - blunt.x1).square().sum() < 1.5 * independent


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_regularisation_is_in_units_of_the_distances(scale):
    first = SinkhornCoupling(reg=0.05)(normal(64, 1), normal(64, 2), generator=seeded()).x1
    scaled = SinkhornCoupling(reg=0.05)(scale * normal(64, 1), scale * normal(64, 2), generator=seeded()).x1
    assert torch.allclose(scaled, scale * first)


@pytest.mark.parametrize("reg", [1e-3, 1.0])
def test_scale_100_in_float32(reg):
    """B98: no warning, hence marginals within 1e-3 of their value."""
    pairs = SinkhornCoupling(reg=reg)(100 * normal(64, 1), 100 * normal(64, 2), generator=seeded())
    assert pairs.x1.isfinite().all()


def test_a_plan_that_is_not_right_is_told():
    with pytest.warns(RuntimeWarning, match="raise n_iters or reg"):
        SinkhornCoupling(reg=1e-3, n_iters=1)(normal(64, 1), normal(64, 2))
    with pytest.warns(RuntimeWarning, match="raise n_iters or reg"):
        UnbalancedSinkhornCoupling(reg=1e-3, n_iters=1)(normal(64, 1), normal(64, 2))


def test_as_many_targets_as_there_are():
    pairs = SinkhornCoupling()(normal(10, 1), normal(30, 2), conditions=torch.arange(30))
    assert pairs.x1.shape == (10, 2) and torch.equal(pairs.x1, normal(30, 2)[pairs.conditions])
    with pytest.raises(DataError, match="as many"):
        IndependentCoupling()(normal(10, 1), normal(30, 2))


@pytest.mark.parametrize("settings", [{"reg": 0.0}, {"reg": -1.0}, {"reg": float("nan")}, {"n_iters": 0}])
@pytest.mark.parametrize("kind", [SinkhornCoupling, UnbalancedSinkhornCoupling])
def test_settings_that_cannot_work_are_refused(kind, settings):
    with pytest.raises(ConfigError):
        kind(**settings)


def test_an_outlier_weighs_less():
    x0, x1 = normal(64, 1), normal(64, 2)
    x0[0] = 12.0
    pairs = UnbalancedSinkhornCoupling(reg=0.01, reg_marginal=0.05, n_iters=500)(x0, x1)
    assert pairs.weights.shape == (64,) and pairs.weights.mean() == pytest.approx(1.0, abs=1e-5)
    assert pairs.weights[0] < 0.1 and pairs.weights[1:].min() > 0.5
    stiff = UnbalancedSinkhornCoupling(reg=0.05, reg_marginal=100.0, n_iters=5000)(x0, x1)
    assert (stiff.weights - 1).abs().max() < 0.02


def test_the_unbalanced_plan_has_the_least_objective():
    """No neighbour of the plan is better: the gradient of the objective by the plan's logarithm vanishes."""
    cost = clouds(12, 15, 2, dtype=torch.float64)
    reg, rho = 0.05, 0.3
    plan, _ = unbalanced_plan(cost, reg, rho, 10_000, tolerance=1e-13)
    rows, columns = plan.sum(1, keepdim=True), plan.sum(0, keepdim=True)
    slope = cost + reg * plan.log() + rho * (rows * 12).log() + rho * (columns * 15).log()
    assert slope.abs().max() < 1e-10


def test_reflow_makes_its_targets():
    coupling = ReflowCoupling(lambda x: 2 * x)
    x0, x1 = coupling(normal(8, 1))
    assert torch.equal(x1, 2 * x0)
    shift = torch.arange(8.0)[:, None]
    pairs = ReflowCoupling(lambda x, shift: x + shift)(normal(8, 1), normal(8, 5), conditions={"shift": shift})
    assert torch.equal(pairs.x1, pairs.x0 + shift) and torch.equal(pairs.conditions["shift"], shift)
    with pytest.raises(DataError, match="by name"):
        ReflowCoupling(lambda x, shift: x + shift)(normal(8, 1), conditions=shift)

    class Flow:
        def sample(self, *, x, n_steps, generator):
            return x + n_steps * torch.randn(x.shape, generator=generator)

    made = ReflowCoupling(Flow(), n_steps=3)(normal(8, 1), generator=seeded(7)).x1
    assert torch.allclose(made, normal(8, 1) + 3 * torch.randn(8, 2, generator=seeded(7)))
    with pytest.raises(DataError, match="same shape"):
        ReflowCoupling(lambda x: x[:, :1])(normal(8, 1))


def test_reflow_takes_a_flow_sampler():
    class Field(torch.nn.Module):
        def forward(self, x, t, label):
            return label[:, None].expand_as(x)

    label = torch.arange(8.0)
    pairs = ReflowCoupling(FlowSampler(Field()), n_steps=4)(normal(8, 1), conditions={"label": label})
    assert torch.allclose(pairs.x1, pairs.x0 + label[:, None], atol=1e-5)


@pytest.mark.parametrize("coupling", PAIRING, ids=names)
def test_autocast_changes_no_pair(coupling):
    """In bf16 products near targets are alike; couplings are called inside of a step's autocast."""
    x0, x1 = normal(256, 1) + 30, normal(256, 2) + 30
    plain = coupling(x0, x1, generator=seeded()).x1
    with torch.autocast("cpu", torch.bfloat16):
        found = coupling(x0, x1, generator=seeded()).x1
    assert torch.equal(found, plain)
