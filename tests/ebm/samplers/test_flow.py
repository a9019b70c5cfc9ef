"""Flows whose velocity, score, noise and data are known: from a standard normal to another normal distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nvalchemi.ebm.interpolants import get_interpolant
from nvalchemi.ebm.samplers import FlowSampler
from nvalchemi.ebm.samplers.flow import DIFFUSIONS
from nvalchemi.errors import ConfigError, TrainingError
from tests.ebm.energies import Labelled, Quadratic

MEAN = torch.tensor([2.0, -1.0], dtype=torch.float64)
WIDTH = 0.5


class Exact(nn.Module):
    """What a perfect model would predict at each point and time."""

    def __init__(self, path, prediction, sign=1.0):
        super().__init__()
        self.path, self.prediction, self.sign = get_interpolant(path), prediction, sign
        self.calls = 0

    def forward(self, x, t, shift=0.0):
        self.calls += 1
        assert t.shape == x.shape[:1]
        alpha, d_alpha, sigma, d_sigma = self.path.at(t, x)
        variance = alpha**2 * WIDTH**2 + sigma**2
        away = (x - alpha * MEAN.to(x)) / variance
        noise, data = sigma * away, MEAN.to(x) + alpha * WIDTH**2 * away
        known = {"score": -away, "noise": noise, "data": data, "velocity": d_alpha * data + d_sigma * noise}
        return self.sign * known[self.prediction] + shift


def noise(count=8000):
    return torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_target(x):
    assert ((x.mean(0) - MEAN).abs() < 3 * WIDTH / len(x) ** 0.5).all()
    assert ((x.var(0) - WIDTH**2).abs() < 3 * WIDTH**2 * (2 / len(x)) ** 0.5).all()


@pytest.mark.parametrize("prediction", ["velocity", "score", "noise", "data"])
@pytest.mark.parametrize("path", ["linear", "cosine", "vp"])
def test_the_probability_flow(path, prediction):
    """The flow of a normal distribution is affine: each point ends at the mean plus its width, and comes back."""
    sampler = FlowSampler(Exact(path, prediction), interpolant=path, prediction=prediction, rtol=1e-7, atol=1e-7)
    z = noise(50)
    x = sampler.sample(x=z)
    loose = {"vp": 0.03}.get(path, 0.0) + (0.01 if sampler.interval() != (0.0, 1.0) else 1e-5)
    assert (x - (MEAN + WIDTH * z)).abs().max() < loose
    assert (sampler.sample(x=x, reverse=True) - z).abs().max() < (1e-2 if path == "vp" else 1e-4)


@pytest.mark.parametrize("prediction", ["velocity", "score", "noise", "data"])
@pytest.mark.parametrize(("path", "form"), [("linear", "sigma"), ("cosine", "linear"), ("vp", "sigma")])
def test_the_stochastic_equation(path, form, prediction):
    sampler = FlowSampler(Exact(path, prediction), "sde", path, prediction, diffusion_form=form, last_step_size=0.02)
    assert_target(sampler.sample(x=noise(), n_steps=80, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("last", ["mean", "euler", "tweedie", None])
def test_every_diffusion_has_the_same_end(form, last):
    given = {"last_step": last, "last_step_size": 0.02, "diffusion_norm": 0.5}
    sampler = FlowSampler(Exact("linear", "velocity"), "sde", diffusion_form=form, integrator="euler_maruyama", **given)
    x = sampler.sample(x=noise(3000), n_steps=150, generator=torch.Generator().manual_seed(1))
    assert (x.mean(0) - MEAN).abs().max() < 0.06 and (x.std(0) / WIDTH - 1).abs().max() < 0.06
    apart = (x - (MEAN + WIDTH * noise(3000))).std()
    assert apart > 0.1, "nothing random happened"


def test_steps_on_the_way():
    z, model = noise(20), Exact("linear", "velocity")
    fixed = FlowSampler(model, integrator="rk4")
    path, numbers = fixed.sample(x=z, n_steps=8, thin=4, return_trajectory=True, return_diagnostics=True)
    assert path.shape == (20, 2, 2) and torch.equal(path[:, -1], fixed.sample(x=z, n_steps=8)) and set(numbers) == {"mean", "var"}
    halfway = 0.5 * MEAN + math.sqrt(0.25 * WIDTH**2 + 0.25) * z
    torch.testing.assert_close(path[:, 0], halfway, rtol=0, atol=1e-3)
    adaptive = FlowSampler(model, rtol=1e-6, atol=1e-6)
    between = adaptive.sample(x=z, n_steps=2, return_trajectory=True)
    torch.testing.assert_close(between[:, 0], halfway, rtol=0, atol=1e-4)
    model.calls = 0
    adaptive.sample(x=z, n_steps=1000)
    assert model.calls < 200, "an adaptive integrator takes its own steps"
    noisy = FlowSampler(model, "sde", integrator="euler")
    model.calls = 0
    states = noisy.sample(x=z, n_steps=6, return_trajectory=True, generator=torch.Generator().manual_seed(3))
    assert states.shape == (20, 6, 2) and model.calls == 6
    assert torch.equal(states[:, -1], noisy.sample(x=z, n_steps=6, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(fixed.sample(x=z, n_steps=0), z)
    assert fixed.sample(dim=2, n_samples=3, n_steps=2).dtype == torch.float32


def test_conditions_and_signs_reach_the_model():
    z = noise(5)
    plain = FlowSampler(Exact("linear", "velocity"), integrator="rk4").sample(x=z, n_steps=10)
    turned = FlowSampler(Exact("linear", "velocity", -1.0), integrator="rk4", negate_velocity=True, time_invariant=False)
    turned = turned.sample(x=z, n_steps=10)
    torch.testing.assert_close(turned, plain)
    shifted = FlowSampler(Exact("linear", "velocity"), integrator="rk4").sample(x=z, n_steps=10, shift=1.0)
    assert (shifted - plain).min() > 0.1
    # An energy is a velocity down its slope: x' = -x.
    energy = FlowSampler(Quadratic(), integrator="rk4").sample(x=z, n_steps=10)
    torch.testing.assert_close(energy, math.exp(-1) * z, rtol=1e-5, atol=0)
    stiff = FlowSampler(Labelled(), integrator="rk4").sample(x=z, n_steps=20, a=torch.arange(5.0))
    torch.testing.assert_close(stiff, torch.exp(-torch.arange(5.0, dtype=z.dtype))[:, None] * z, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("settings", "zero"), [({}, False), ({"time_invariant": True}, True), ({"negate_velocity": True}, True)])
@pytest.mark.parametrize("how", [{"integrator": "heun"}, {}, {"mode": "sde"}])
def test_a_field_of_equilibrium_matching_is_told_no_time(settings, zero, how):
    """It was trained at t = 0 alone: what it says at other times is what its first weights made of them."""
    seen = []

    def field(x, t):
        seen.append(t)
        return 0.0 * x

    model = torch.nn.Module()
    model.forward = field
    FlowSampler(model, **settings, **how).sample(x=noise(3), n_steps=4)
    assert (torch.stack(seen) == 0).all() == zero


def test_the_prior():
    z = torch.randn(4, 3, 2)
    found = FlowSampler(Quadratic()).prior_logp(z)
    torch.testing.assert_close(found, torch.distributions.Normal(0.0, 1.0).log_prob(z).sum((1, 2)))


def test_what_cannot_be():
    model = Exact("linear", "velocity")
    for bad in (
        {"mode": "flow"},
        {"prediction": "energy"},
        {"interpolant": "line"},
        {"integrator": "leapfrog"},
        {"mode": "sde", "integrator": "dopri5"},
        {"diffusion_form": "none"},
        {"last_step": "last"},
        {"last_step_size": 0.0},
        {"sample_eps": 0.5},
    ):
        with pytest.raises(ConfigError):
            FlowSampler(model, **bad)
    with pytest.raises(ConfigError, match="backwards"):
        FlowSampler(model, "sde").sample(dim=2, reverse=True)
    with pytest.raises(ConfigError, match="n_steps=1"):
        FlowSampler(model, "sde").sample(dim=2, n_steps=1)
    with pytest.raises(TrainingError, match="EulerMaruyamaIntegrator from t = 0 to 1"):
        FlowSampler(model, integrator="euler").sample(x=noise(3), n_steps=3, shift=math.nan)
