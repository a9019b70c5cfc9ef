"""Integrators: order, tolerance, noise, names."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.ebm import integrators
from nvalchemi.ebm.integrators import get_integrator, symplectic_integrator
from nvalchemi.errors import ConfigError, TrainingError


def swinging(x, t):
    """x' = i ω x + cos t for two numbers as one complex one, of a frequency that grows with time."""
    return torch.stack([-x[:, 1] * (1 + t) + math.cos(t), x[:, 0] * (1 + t)], 1)


def exact(x, start, stop):
    return get_integrator("dopri8", rtol=1e-12, atol=1e-12).integrate(swinging, x, [start, stop])


START = torch.tensor([[1.0, 0.0], [0.3, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "order"), [("euler", 1), ("euler_maruyama", 1), ("heun", 2), ("midpoint", 2), ("rk4", 4), ("rk4_38", 4)]
)
@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.2)])
def test_the_order_of_fixed_steps(name, order, span):
    scheme, wrong = get_integrator(name), []
    assert scheme.order == order
    for count in (40, 80):
        times = torch.linspace(*span, count + 1, dtype=torch.float64).tolist()
        wrong.append((scheme.integrate(swinging, START, times) - exact(START, *span)).abs().max().item())
    assert math.log2(wrong[0] / wrong[1]) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(("name", "loose"), [("adaptive_heun", 1e-3), ("bosh3", 1e-4), ("dopri5", 1e-6), ("dopri8", 1e-9)])
@pytest.mark.parametrize("span", [(0.0, 2.0), (2.0, 0.5)])
def test_adaptive_steps_keep_the_tolerance(name, loose, span):
    counts = []
    for tolerance in (loose, loose / 100):
        calls: list[float] = []

        def field(x, t, calls=calls):
            calls.append(t)
            return swinging(x, t)

        out = get_integrator(name, rtol=tolerance, atol=tolerance).integrate(field, START, span)
        assert (out - exact(START, *span)).abs().max() < 30 * tolerance
        assert min(span) <= min(calls) and max(calls) <= max(span) + 1e-12
        counts.append(len(calls))
    # A hundred times the accuracy costs 100^(1/order) times the steps.
    assert counts[1] < 2.0 * counts[0] * 100 ** (1 / get_integrator(name).order)


def test_the_numbers_of_dopri8_are_those_of_eighth_order():
    scheme, wrong = get_integrator("dopri8"), []
    for h in (0.4, 0.2):
        x, t = START, 0.0
        while t < 0.79:
            x, _, _ = scheme._attempt(scheme.table(), swinging, x, swinging(x, t), t, h)
            t += h
        wrong.append((x - exact(START, 0.0, 0.8)).abs().max().item())
    assert math.log2(wrong[0] / wrong[1]) > 7


@pytest.mark.parametrize("name", ["rk4", "dopri5"])
def test_the_way_between(name):
    times = [0.0, 0.3, 0.9, 1.5]
    settings = {"rtol": 1e-8, "atol": 1e-8} if name == "dopri5" else {}
    states = list(get_integrator(name, **settings).path(swinging, START, times))
    assert len(states) == 3
    for t, state in zip(times[1:], states, strict=True):
        assert (state - exact(START, 0.0, t)).abs().max() < (1e-6 if name == "dopri5" else 0.2)
    assert torch.equal(get_integrator(name).integrate(swinging, START, [0.0]), START)


def test_each_sample_keeps_its_tolerance():
    """A hard sample among thousands of easy ones is not averaged away."""
    rate = torch.full((4096, 1), 0.01, dtype=torch.float64)
    rate[7] = 10.0
    x = get_integrator("dopri5", rtol=1e-4, atol=1e-9).integrate(lambda x, t: -rate * x, torch.ones_like(rate), [0.0, 1.0])
    assert abs(x[7].item() / math.exp(-10.0) - 1) < 0.01 and abs(x[0].item() - math.exp(-0.01)) < 1e-4


def test_fields_that_cannot_be_followed():
    with pytest.raises(TrainingError, match="time 0\\.5"):
        get_integrator("dopri5").integrate(lambda x, t: x * (1.0 if t < 0.5 else float("nan")), START, [0.0, 1.0])
    with pytest.raises(TrainingError, match="3 steps"):
        get_integrator("bosh3", rtol=1e-9, max_steps=3).integrate(swinging, START, [0.0, 9.0])
    for bad in ({"rtol": -1.0}, {"rtol": 0.0, "atol": 0.0}, {"max_steps": 0}):
        with pytest.raises(ConfigError):
            get_integrator("dopri5", **bad)


@pytest.mark.parametrize(("name", "order"), [("euler_maruyama", 1), ("heun", 2)])
def test_noise(name, order):
    """x' = -x + noise of rate √2: the stationary variance is 1 / (1 - h/2), or with Heun's slopes right to second order."""
    h, generator = 0.25, torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 1, generator=generator, dtype=torch.float64)

    def increment(x, t, h):
        return math.sqrt(2 * h) * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    times = [h * i for i in range(33)]
    variance = get_integrator(name).integrate(lambda x, t: -x, x, times, increment).var().item()
    expected = 1 / (1 - h / 2) if order == 1 else 2 * h * (1 - h / 2) ** 2 / (1 - (1 - h + h**2 / 2) ** 2)
    assert abs(variance - expected) < 3 * expected * (2 / 40_000) ** 0.5
    for other in ("rk4", "dopri5"):
        with pytest.raises(ConfigError, match="stochastic"):
            get_integrator(other).integrate(lambda x, t: -x, x, times, increment)


def test_names():
    for name in ("euler", "heun", "rk4", "dopri5"):
        scheme = get_integrator(name)
        assert get_integrator(scheme) is scheme
    leapfrog = symplectic_integrator("leapfrog")
    assert isinstance(leapfrog, integrators.LeapfrogIntegrator) and symplectic_integrator(leapfrog) is leapfrog
    for ask in (get_integrator, symplectic_integrator):
        with pytest.raises(ConfigError, match="needed"):
            ask("runge")
