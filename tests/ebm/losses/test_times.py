"""Laws of the times of losses along paths, and what each time weighs."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.ebm.couplings import UnbalancedSinkhornCoupling
from nvalchemi.ebm.losses import EnergyMatching, EquilibriumMatching, FlowMatching
from nvalchemi.ebm.losses.times import Times
from nvalchemi.errors import ConfigError
from tests.ebm.losses.test_paths import CROSS, SQUARE, A, T, field, matching, mean, mlp
from tests.ebm.quadratic import assert_closed_form, seeded, standard_normal

LOSSES = {
    "flow": FlowMatching,
    "equilibrium": lambda m, **s: EquilibriumMatching(m, ct="constant", ct_multiplier=1.0, **s),
    "energy": lambda m, **s: matching(m, sigma=0.0, flow_weight_cutoff=1.0, lambda_cd=0.0, **s),
}


@pytest.mark.parametrize(("mean_", "std"), [(-1.2, 1.2), (0.0, 0.5)])
def test_the_lognormal_law(mean_, std):
    """log((1 - t) / t) is normal."""
    count = 100_000
    t = Times("lognormal", mean_, std).draw(torch.empty(count, dtype=torch.float64), seeded())
    logarithm = ((1 - t) / t).log()
    assert abs(float(logarithm.mean()) - mean_) < 4 * std / math.sqrt(count)
    assert abs(float(logarithm.std()) / std - 1) < 4 / math.sqrt(2 * count)
    near = Times("lognormal", 0.0, 9.0, train_eps=0.1).draw(torch.empty(1000), seeded())
    assert float(near.min()) == pytest.approx(0.1) and float(near.max()) == pytest.approx(0.9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_law_is_the_losss(name):
    """The root of a uniform number has the density 2 t: drawing so, or weighing by it, is the mean times 2 t."""

    def rising(count, *, device, dtype, generator):
        return torch.rand(count, device=device, dtype=dtype, generator=generator).sqrt()

    w = 2 * T
    loss, slope = A**2 * mean(w * SQUARE) + 2 * A * mean(w * CROSS) + 2 * mean(w), 2 * A * mean(w * SQUARE) + 2 * mean(w * CROSS)
    assert_closed_form(lambda model: LOSSES[name](model, t_sampler=rising), A, loss, slope)
    assert_closed_form(lambda model: LOSSES[name](model, loss_weight_fn=lambda t: 2 * t), A, loss, slope)


@pytest.mark.parametrize("name", LOSSES)
def test_times_are_the_generators(name):
    x = standard_normal(2, 8)
    first, again, other = (LOSSES[name](mlp(), t_sampler="lognormal")(x, generator=seeded(s)).item() for s in (0, 0, 1))
    assert first == again != other


def test_weights_of_times_and_of_pairs_are_multiplied():
    x = standard_normal(2, 8)
    pairs = FlowMatching(field(), coupling=UnbalancedSinkhornCoupling()).paths.draw(x, seeded(), {})
    both = FlowMatching(field(), coupling="unbalanced_sinkhorn", loss_weight_fn=torch.exp).paths.draw(x, seeded(), {})
    torch.testing.assert_close(both.weights, pairs.weights * pairs.t.exp())


@pytest.mark.parametrize("path", ["linear", "cosine", "vp"])
@pytest.mark.parametrize("prediction", ["noise", "score"])
@pytest.mark.parametrize("weight", ["velocity", "likelihood"])
def test_weighted_noise_and_score(path, prediction, weight):
    """``velocity`` makes the loss that of the velocity; ``likelihood`` is λ times the square of the score's error."""
    net, x = field(), standard_normal(2, 6)
    loss_fn = EquilibriumMatching(net, prediction, interpolant=path, loss_weight=weight, train_eps=0.05)
    found, point = loss_fn(x, generator=seeded()), loss_fn.paths.draw(x, seeded(), {})
    output, way = net(point.x, torch.zeros(6, dtype=torch.float64)), loss_fn.paths.interpolant
    if weight == "velocity":
        wanted = (way.velocity(output, point.x, point.t, prediction) - point.velocity).square().mean()
    else:
        alpha, d_alpha, sigma, d_sigma = way.at(point.t, x)
        score = output if prediction == "score" else -output / sigma
        rate = sigma.square() * d_alpha / alpha - sigma * d_sigma
        wanted = (rate * (score + point.noise / sigma).square()).mean()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


def test_what_cannot_be_is_told():
    x = standard_normal(2, 4)
    for settings, match in (
        ({"t_sampler": "logit"}, "uniform, lognormal or a function"),
        ({"t_p_std": 0.0}, "positive deviation"),
        ({"loss_weight_fn": 2.0}, "a function of the times"),
        ({"loss_weight": "velocity"}, "where the prediction is noise or score"),
        ({"loss_weight": "score", "prediction": "noise"}, "velocity or likelihood"),
    ):
        with pytest.raises(ConfigError, match=match):
            EquilibriumMatching(field(), **settings)
    for settings in (
        {"t_sampler": lambda count, **_: torch.rand(1)},
        {"loss_weight_fn": lambda t: t[:, None]},
        {"loss_weight_fn": lambda t: 1.0},
    ):
        for make in (FlowMatching, EquilibriumMatching, lambda m, **s: EnergyMatching(m, lambda_cd=0.0, **s)):
            with pytest.raises(ConfigError, match=r"not one number a sample.*\(4,\)"):
                make(mlp(), **settings)(x)
