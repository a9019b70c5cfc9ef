"""Underdamped Langevin dynamics, and descent without noise."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.samplers import GradientDescentSampler, NesterovSampler, UnderdampedLangevin
from nvalchemi.ebm.toy import RosenbrockModel
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from tests.ebm.energies import Quadratic


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("step", "friction", "temperature", "mass"), [(0.3, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 1.0), (1.0, 0.5, 1.0, 4.0)]
)
def test_positions_in_a_quadratic_well_are_exact(step, friction, temperature, mass):
    """BAOAB has no error in the positions of a harmonic oscillator, whatever the (stable) step."""
    sampler = UnderdampedLangevin(Quadratic(), step, friction, temperature, mass)
    x, numbers = sampler.sample(dim=4, n_samples=5000, n_steps=60, return_diagnostics=True, generator=seeded())
    assert abs(x.var().item() - temperature) < 3 * temperature * (2 / x.numel()) ** 0.5
    # Momenta do have one: after the last half kick their variance is T (1 - h² k / 4 m).
    exact = temperature * (1 - step**2 / mass / 4)
    assert numbers["kinetic_temperature"][-20:].mean().item() == pytest.approx(exact, rel=0.05)


class Cone(EnergyModel):
    """2 sqrt(1 + x²) in one dimension: a slope that is not linear, and a curvature with a bound."""

    def forward(self, x):
        return 2 * (1 + x.square()).sqrt().sum(1)


def test_the_error_is_of_second_order():
    grid = torch.linspace(-30, 30, 60_001, dtype=torch.float64)[:, None]
    weight = torch.softmax(-Cone()(grid), 0)
    exact = float(weight @ (1 / (1 + grid[:, 0].square())))
    wrong = []
    for step in (1.2, 0.6):
        x = UnderdampedLangevin(Cone(), step, 1.0).sample(dim=1, n_samples=60_000, n_steps=int(24 / step), generator=seeded())
        seen = 1 / (1 + x.square())
        wrong.append(abs(seen.mean().item() - exact))
        error = 3 * seen.std().item() / 60_000**0.5
    assert wrong[0] > 2 * error, "the bias would not be seen"
    assert wrong[1] < wrong[0] / 4 + error


def test_settings_one_a_chain_and_by_step():
    temperature = torch.tensor([1.0, 4.0]).repeat_interleave(2000)
    for sampler in (
        UnderdampedLangevin(Quadratic(), 0.5, temperature=temperature),
        UnderdampedLangevin(
            Quadratic(), lambda step: torch.full((4000,), 0.5), friction=torch.ones(4000), temperature=temperature
        ),
    ):
        x = sampler.sample(dim=2, n_samples=4000, n_steps=40, generator=seeded())
        for half, exact in zip(x.split(2000), (1.0, 4.0), strict=True):
            assert abs(half.var().item() - exact) < 3 * exact * (2 / 4000) ** 0.5
    with pytest.raises(ConfigError, match="friction"):
        UnderdampedLangevin(Quadratic(), 0.5, friction=torch.ones(3)).sample(dim=2, n_samples=4, n_steps=1)
    with pytest.raises(ConfigError, match="friction"):
        UnderdampedLangevin(Quadratic(), 0.5, friction=-1.0)


def test_one_gradient_a_step_and_no_friction():
    """Without friction the energy is kept, and a step of nothing moves nothing."""
    calls = []

    class Counted(Quadratic):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    x = torch.randn(50, 3, generator=seeded())
    UnderdampedLangevin(Counted(), 0.01, friction=0.0).sample(x=x, n_steps=20, generator=seeded())
    assert len(calls) == 21
    assert torch.equal(UnderdampedLangevin(Quadratic(), 0.0).sample(x=x, n_steps=3), x)
    assert torch.equal(UnderdampedLangevin(Quadratic(), 0.1).sample(x=x, n_steps=0), x)


def test_descent():
    x = torch.tensor([[2.0, -1.0]])
    out = GradientDescentSampler(Quadratic(), lambda step: 0.5).sample(x=x, n_steps=3)
    torch.testing.assert_close(out, x / 8)
    v, at = torch.zeros_like(x), x.clone()
    for _ in range(4):
        v = 0.9 * v - 0.1 * (at + 0.9 * v)
        at = at + v
    torch.testing.assert_close(NesterovSampler(Quadratic(), 0.1, momentum=0.9).sample(x=x, n_steps=4), at)
    valley = torch.tensor([[-1.0, 1.0]])
    slow = GradientDescentSampler(RosenbrockModel(), 5e-4).sample(x=valley, n_steps=500)
    fast = NesterovSampler(RosenbrockModel(), 5e-4, momentum=0.95).sample(x=valley, n_steps=500)
    assert RosenbrockModel()(fast) < 0.01 < RosenbrockModel()(slow)
    with pytest.raises(ConfigError, match="momentum"):
        NesterovSampler(Quadratic(), 0.1, momentum=1.0)
