"""Integrators: order, tolerance, noise, names."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.ebm import integrators
from nvalchemi.ebm.chains import DenseChains
from nvalchemi.ebm.integrators import (
    GeneralisedLeapfrogIntegrator,
    generalised_integrator,
    get_integrator,
    symplectic_integrator,
)
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.ebm.samplers.mechanics import Mechanics
from nvalchemi.ebm.toy import GaussianModel
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import EnergyModel


def swinging(x, t):
    """x' = i ω x + cos t for two numbers as one complex one, of a frequency that grows with time."""
    return torch.stack([-x[:, 1] * (1 + t) + math.cos(t), x[:, 0] * (1 + t)], 1)


def exact(x, start, stop):
    return get_integrator("dopri8", rtol=1e-12, atol=1e-12).integrate(swinging, x, [start, stop])


START = torch.tensor([[1.0, 0.0], [0.3, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("euler", 1),
        ("euler_maruyama", 1),
        ("backward_euler_maruyama", 1),
        ("heun", 2),
        ("midpoint", 2),
        ("rk4", 4),
        ("rk4_38", 4),
        ("rk438", 4),
    ],
)
@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.2)])
def test_the_order_of_fixed_steps(name, order, span):
    scheme, wrong = get_integrator(name), []
    assert scheme.order == order
    for count in (40, 80):
        times = torch.linspace(*span, count + 1, dtype=torch.float64).tolist()
        wrong.append((scheme.integrate(swinging, START, times) - exact(START, *span)).abs().max().item())
    assert math.log2(wrong[0] / wrong[1]) == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(
    "name", ["euler", "heun", "rk4", "adaptive_heun", "bosh3", "dopri5", "dopri8", "backward_euler_maruyama"]
)
def test_nothing_is_integrated(name):
    assert get_integrator(name).integrate(lambda x, t: -x, torch.zeros(0, 3), [0.0, 0.5, 1.0]).shape == (0, 3)


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


@pytest.mark.parametrize("name", ["euler_maruyama", "heun", "backward_euler_maruyama"])
def test_noise(name):
    """x' = -x + noise of rate √2: the stationary variance is 1 / (1 -+ h/2), or with Heun's slopes right to second order."""
    h, generator = 0.25, torch.Generator().manual_seed(0)
    x = torch.randn(40_000, 1, generator=generator, dtype=torch.float64)

    def increment(x, t, h):
        return math.sqrt(2 * h) * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    times = [h * i for i in range(33)]
    variance = get_integrator(name).integrate(lambda x, t: -x, x, times, increment).var().item()
    heun = 2 * h * (1 - h / 2) ** 2 / (1 - (1 - h + h**2 / 2) ** 2)
    expected = {"euler_maruyama": 1 / (1 - h / 2), "heun": heun, "backward_euler_maruyama": 1 / (1 + h / 2)}[name]
    assert abs(variance - expected) < 3 * expected * (2 / 40_000) ** 0.5
    for other in ("rk4", "dopri5"):
        with pytest.raises(ConfigError, match="stochastic"):
            get_integrator(other).integrate(lambda x, t: -x, x, times, increment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_implicit_step_of_a_stiff_equation(dtype):
    """Where explicit steps, and plain iterations of the equation, explode: h a is up to 500, and x' = x / (1 + h a) exactly."""
    a, h = torch.logspace(0, 3, 10, dtype=dtype), 0.5
    x = torch.randn(100, 10, generator=torch.Generator().manual_seed(0), dtype=dtype)
    scheme = get_integrator("backward_euler_maruyama")
    torch.testing.assert_close(scheme.step(lambda x, t: -a * x, x, 0.0, h), x / (1 + h * a), rtol=0, atol=1e-3)
    steps = torch.linspace(0.01, 0.5, 100, dtype=dtype)[:, None]  # one a row
    torch.testing.assert_close(scheme.step(lambda x, t: -a * x, x, 0.0, steps), x / (1 + steps * a), rtol=0, atol=1e-3)
    for shape in ((0, 2), (3, 0), (1, 1), (2, 3, 4, 4)):
        x = torch.ones(shape, dtype=dtype)
        torch.testing.assert_close(scheme.step(lambda x, t: -3 * x, x, 0.0, 1.0), x / 4, rtol=1e-3, atol=0)


def test_implicit_langevin_dynamics():
    """Stiff and soft directions at one step: the variance of each is 1 / (a (1 + h a / 2)); where h is each chain's, of each."""
    a = torch.tensor([1.0, 1e3], dtype=torch.float64)
    model, generator = GaussianModel(torch.zeros(2, dtype=torch.float64), (1 / a).diag()), torch.Generator().manual_seed(0)
    h = torch.tensor([0.5, 1.0], dtype=torch.float64).repeat_interleave(5000)
    sampler = LangevinDynamics(model, h, integrator="backward_euler_maruyama")
    x = sampler.sample(model.draw(10_000, generator=generator), n_steps=20, generator=generator)
    for step in (0.5, 1.0):
        ratio = x[h == step].var(0) * a * (1 + step * a / 2)
        assert ((ratio - 1).abs() < 4 * (2 / 5000) ** 0.5).all()
    assert not sampler.even_calls and LangevinDynamics(model).even_calls


def test_an_implicit_step_that_is_not_found():
    x = torch.tensor([[0.0], [3.0], [torch.nan]])
    with pytest.raises(TrainingError, match=r"was not solved in 50 iterations.*2 of 3 rows at step size 1.0"):
        get_integrator("backward_euler_maruyama").step(lambda x, t: x.abs() + 1e-3 * x.square() * (x > 1), x, 0.0, 1.0)
    for bad in ({"n_iterations": 0}, {"tolerance": 0.0}):
        with pytest.raises(ConfigError, match="no equation"):
            get_integrator("backward_euler_maruyama", **bad)


def turning(x, p):
    """∂H/∂x and ∂H/∂p of H = (1 + x²) p² / 2 + x⁴ / 4, summed over coordinates."""
    return x * p.square() + x**3, (1 + x.square()) * p


def generalised(x, p, h, n, **settings):
    scheme = GeneralisedLeapfrogIntegrator(**{"n_fixed_point_steps": 60, "tolerance": 1e-13, **settings})
    return scheme.way(lambda x, p: turning(x, p)[0], lambda x, p: turning(x, p)[1], x, p, h, n)


def test_the_generalised_leapfrog_method():
    """It is of second order, goes back as it came, and keeps volumes."""
    generator = torch.Generator().manual_seed(0)
    x, p = torch.randn(2, 20, 1, generator=generator, dtype=torch.float64)

    def flow(z, t):
        return torch.cat([turning(*z.split(1, 1))[1], -turning(*z.split(1, 1))[0]], 1)

    there = get_integrator("dopri8", rtol=1e-12, atol=1e-12).integrate(flow, torch.cat([x, p], 1), [0.0, 0.4])
    wrong = []
    for n in (10, 20):
        *end, solved = generalised(x, p, 0.4 / n, n)
        assert solved.all()
        wrong.append(float((torch.cat(end, 1) - there).abs().max()))
    assert math.log2(wrong[0] / wrong[1]) == pytest.approx(2, abs=0.1)
    x1, p1, _ = generalised(x, p, 0.04, 10)
    x2, p2, _ = generalised(x1, -p1, 0.04, 10)
    torch.testing.assert_close(x2, x, rtol=0, atol=1e-11)
    torch.testing.assert_close(p2, -p, rtol=0, atol=1e-11)
    volume = torch.autograd.functional.jacobian(
        lambda z: torch.cat(generalised(z[None, :1], z[None, 1:], 0.1, 3)[:2], 1)[0],
        torch.tensor([0.7, -0.4], dtype=torch.float64),
    )
    assert float(torch.linalg.det(volume)) == pytest.approx(1, abs=1e-9)
    assert not generalised(5 * x, 5 * p, 1.0, 1, n_fixed_point_steps=3)[2].any()


def test_the_generalised_leapfrog_method_of_a_separable_energy_is_leapfrog():
    x, p = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = GeneralisedLeapfrogIntegrator(1).way(lambda x, p: x**3, lambda x, p: p, x, p, 0.1, 5)
    model = EnergyModel()
    model.forward = lambda x: 0.25 * (x**4).sum(1)
    mechanics = Mechanics(model, DenseChains(x), 1.0)
    y, q = x.clone(), p.clone()
    symplectic_integrator("leapfrog").way(mechanics, y, q, mechanics.gradient(x), 0.1, 5)
    torch.testing.assert_close(found[0], y)
    torch.testing.assert_close(found[1], q)


def test_names():
    for name in ("euler", "heun", "rk4", "dopri5"):
        scheme = get_integrator(name)
        assert get_integrator(scheme) is scheme
    for name in ("generalised_leapfrog", "generalized_leapfrog"):
        made = generalised_integrator(name, n_fixed_point_steps=3)
        assert made.n_fixed_point_steps == 3 and generalised_integrator(made) is made
    leapfrog = symplectic_integrator("leapfrog")
    assert isinstance(leapfrog, integrators.LeapfrogIntegrator) and symplectic_integrator(leapfrog) is leapfrog
    for ask in (get_integrator, symplectic_integrator, generalised_integrator):
        with pytest.raises(ConfigError, match="needed"):
            ask("runge")
