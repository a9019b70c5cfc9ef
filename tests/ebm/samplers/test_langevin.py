"""Unadjusted Langevin dynamics, and with it what all samplers share."""

from __future__ import annotations

import weakref

import pytest
import torch

from nvalchemi.ebm.integrators import EulerMaruyamaIntegrator
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import MLPEnergy
from tests.ebm.energies import Ball, Noted, Quadratic


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("step_size", "temperature", "noise_scale"), [(0.1, 1.0, 1.0), (0.5, 2.0, 1.0), (0.5, 1.0, 0.5)])
def test_the_variance_is_that_of_the_update(step_size, temperature, noise_scale):
    """B94: for E = x²/2 the chain is autoregressive, and its variance s² T / (1 - h/2)."""
    sampler = LangevinDynamics(Quadratic(), step_size, noise_scale, temperature=temperature)
    exact = noise_scale**2 * temperature / (1 - step_size / 2)
    start = torch.randn(20000, 2, generator=seeded(1)) * exact**0.5
    x = sampler.sample(x=start, n_steps=int(8 / step_size), generator=seeded())
    error = exact * (2 / x.numel()) ** 0.5
    assert abs(x.var().item() - exact) < 3 * error
    assert abs(exact - noise_scale**2 * temperature) > 3 * error, "the bias would not be seen"


def test_the_bias_at_a_small_step():
    """B94: step 0.01, variance 1.005: what a step adds to the variance over what it takes from it."""
    start = torch.zeros(2000, 1000)
    added = LangevinDynamics(Quadratic(), 0.01).sample(x=start, n_steps=1, generator=seeded()).square().mean().item()
    kept = LangevinDynamics(Quadratic(), 0.01, noise_scale=0.0).sample(x=torch.ones(1, 1), n_steps=1).item()
    assert kept == pytest.approx(0.99)
    assert abs(added / (1 - kept**2) - 1.005) < 3 * 0.001


def test_decay_is_a_pull_to_zero():
    """With h = 1/2 and d = 1 the pull of E = x²/2 doubles: variance 1 / (2 (1 - h))."""
    x = LangevinDynamics(Quadratic(), 0.5, decay=1.0).sample(dim=2, n_samples=20000, n_steps=20, generator=seeded())
    assert abs(x.var().item() - 1.0) < 3 * (2 / x.numel()) ** 0.5


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_of_nothing_moves_nothing(steps):
    """B90: step size 0, or no step, gives back the beginning, as another tensor."""
    x = torch.randn(5, 3, 2, generator=seeded())
    before = x.clone()
    for size in (0.0, torch.zeros(5), lambda step: 0.0):
        out = LangevinDynamics(Quadratic(), size).sample(x=x, n_steps=steps)
        assert torch.equal(out, before) and out.data_ptr() != x.data_ptr()
    moved = LangevinDynamics(Quadratic(), 0.1).sample(x=x, n_steps=steps)
    assert torch.equal(x, before) and torch.equal(moved, before) == (steps == 0)


def test_one_number_a_chain():
    """B102: a number and equal numbers agree; two values give two temperatures; another length is an error."""
    x = torch.randn(4000, 2, generator=seeded(1))

    def run(noise=1.0, size=0.1, temperature=1.0):
        sampler = LangevinDynamics(Quadratic(), size, noise, temperature=temperature)
        return sampler.sample(x=x, n_steps=60, generator=seeded())

    same = run()
    for other in (
        run(torch.ones(4000)),
        run(size=torch.full((4000,), 0.1)),
        run(temperature=torch.ones(4000)),
        run(torch.tensor(1.0)),
    ):
        torch.testing.assert_close(other, same, rtol=1e-4, atol=1e-5)
    for values in (
        run(torch.tensor([1.0, 3.0]).repeat_interleave(2000)),
        run(temperature=torch.tensor([1.0, 9.0]).repeat_interleave(2000)),
    ):
        for half, exact in ((values[:2000], 1 / 0.95), (values[2000:], 9 / 0.95)):
            assert abs(half.var().item() - exact) < 3 * exact * (2 / 4000) ** 0.5
    with pytest.raises(ConfigError, match=r"temperature .*\(3,\) for 4000 samples"):
        run(temperature=torch.ones(3))
    with pytest.raises(ConfigError, match=r"noise_scale .*\(4000, 1\)"):
        run(torch.ones(4000, 1))


def test_settings_are_functions_of_the_step():
    seen = []

    def size(step):
        seen.append(step)
        return 0.1 if step < 2 else 0.0

    sampler = LangevinDynamics(Quadratic(), size, noise_scale=0.0)
    out = sampler.sample(x=torch.ones(1, 1), n_steps=4)
    assert seen[:4] == [0, 1, 2, 3] and out.item() == pytest.approx(0.81)
    rows = LangevinDynamics(Quadratic(), lambda step: torch.tensor([0.1, 0.5]), 0.0).sample(x=torch.ones(2, 1), n_steps=1)
    torch.testing.assert_close(rows, torch.tensor([[0.9], [0.5]]))


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), "0.1", None, True, torch.tensor([0.1, -0.1])])
def test_settings_that_cannot_be(bad):
    with pytest.raises(ConfigError):
        LangevinDynamics(Quadratic(), bad)
    with pytest.raises(ConfigError):
        LangevinDynamics(Quadratic(), 0.1, temperature=bad)
    if not isinstance(bad, torch.Tensor):  # one number a chain is looked at when it is declared: every look waits for the device
        with pytest.raises(ConfigError):
            LangevinDynamics(Quadratic(), lambda step: bad).sample(dim=2, n_steps=1)


def test_declarations_and_calls_that_do_not_fit():
    with pytest.raises(ConfigError, match="EnergyModel"):
        LangevinDynamics(torch.nn.Linear(2, 1), 0.1)
    with pytest.raises(ConfigError, match="range"):
        LangevinDynamics(Quadratic(), 0.1, clamp=(1.0, -1.0))
    with pytest.raises(ConfigError, match="decay"):
        LangevinDynamics(Quadratic(), 0.1, decay=-1.0)
    sampler = LangevinDynamics(Quadratic(), 0.1)
    for call in (
        {},
        {"x": torch.zeros(2, 2, dtype=torch.int64)},
        {"x": [1.0]},
        {"x": torch.zeros(())},
        {"dim": 2, "thin": 0},
        {"dim": 2, "n_steps": -1},
    ):
        with pytest.raises(ValueError):
            sampler.sample(**call)
    with pytest.raises(ConfigError, match="meta"):
        sampler.sample(x=torch.zeros(2, 2, device="meta"), generator=seeded())


def test_clamp_bounds_every_coordinate():
    out = LangevinDynamics(Quadratic(), 0.5, clamp=(-0.5, 0.25)).sample(dim=3, n_samples=100, n_steps=5, generator=seeded())
    assert out.max().item() == 0.25 and out.min().item() == -0.5


@pytest.mark.parametrize("step_size", [5.0, lambda step: 5.0])
def test_chains_that_explode_are_an_error(step_size):
    """The error names the steps and the step size, and does not wait for the end."""
    with pytest.raises(TrainingError, match=r"between step 51 and step 100.*10 of 10 chains.*step size 5\.0"):
        LangevinDynamics(Quadratic(), step_size).sample(dim=2, n_samples=10, n_steps=100_000, generator=seeded())
    x = torch.zeros(3, 2)
    x[1] = 2.0
    with pytest.raises(TrainingError, match=r"at step 1;.*1 of 3"):
        LangevinDynamics(Ball(), 0.001).sample(x=x.requires_grad_(), n_steps=1, generator=seeded())


@pytest.mark.parametrize("steps", [10, 1000])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_sampling_leaves_no_trace(mode, steps):
    """B100: no graph, no parameter gradients, modes and flags as they were, in any mode."""
    model = Noted()
    with mode():
        out = LangevinDynamics(model, 0.01).sample(dim=2, n_samples=4, n_steps=steps, generator=seeded())
    assert not out.requires_grad and not out.is_inference()
    assert len(model.modes) == steps and not any(model.modes)
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.net] == [False, True, True, True]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_modes_are_restored_after_an_error():
    """B100"""
    model = Noted()
    model.fail_at = 3
    with pytest.raises(RuntimeError, match="asked"):
        LangevinDynamics(model, 0.01).sample(dim=2, n_steps=10)
    assert [m.training for m in model.net] == [False, True, True, True] and torch.is_grad_enabled()


def test_a_step_keeps_nothing_of_those_before():
    """B100: memory is flat: no more energies are alive after 1000 steps than after 10."""
    alive: list[weakref.ref] = []

    class Watched(Quadratic):
        def forward(self, x):
            energy = super().forward(x)
            alive.append(weakref.ref(energy))
            alive.append(weakref.ref(x))
            return energy

    counts = []
    LangevinDynamics(Watched(), 0.01).sample(
        dim=2, n_steps=200, progress=lambda done, total: counts.append(sum(r() is not None for r in alive))
    )
    assert len(alive) == 400 and max(counts) <= 2


def test_the_generator_is_the_only_source():
    sampler = LangevinDynamics(MLPEnergy(2), 0.1)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = sampler.sample(dim=2, n_samples=3, n_steps=5, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sampler.sample(dim=2, n_samples=3, n_steps=5, generator=seeded()), first)
    assert not torch.equal(sampler.sample(dim=2, n_samples=3, n_steps=5, generator=seeded(1)), first)
    drawn = sampler.sample(dim=2, n_samples=3, n_steps=5)
    torch.manual_seed(3)
    assert torch.equal(sampler.sample(dim=2, n_samples=3, n_steps=5), drawn)
    generator = seeded()
    half = sampler.sample(x=sampler.sample(x=drawn, n_steps=2, generator=generator), n_steps=3, generator=generator)
    assert torch.equal(sampler.sample(x=drawn, n_steps=5, generator=seeded()), half)


def test_what_is_kept_on_the_way():
    sampler, x = LangevinDynamics(Quadratic(), 0.1), torch.randn(6, 2, 3, dtype=torch.float64, generator=seeded())
    whole = sampler.sample(x=x, n_steps=7, return_trajectory=True, generator=seeded())
    last = sampler.sample(x=x, n_steps=7, generator=seeded())
    assert whole.shape == (6, 7, 2, 3) and whole.dtype == torch.float64 and torch.equal(whole[:, -1], last)
    path, numbers = sampler.sample(x=x, n_steps=7, thin=3, return_trajectory=True, return_diagnostics=True, generator=seeded())
    assert torch.equal(path, whole[:, 2::3])
    assert {name: tuple(t.shape) for name, t in numbers.items()} == {"mean": (2, 2, 3), "var": (2, 2, 3), "energy": (2,)}
    torch.testing.assert_close(numbers["mean"], path.mean(0))
    torch.testing.assert_close(numbers["var"], path.var(0, correction=0))
    torch.testing.assert_close(numbers["energy"], path.square().sum((2, 3)).mean(0) / 2)
    final, numbers = sampler.sample(x=x, n_steps=7, return_diagnostics=True, generator=seeded())
    assert torch.equal(final, last) and len(numbers["energy"]) == 7


def test_dtype_and_place_come_from_the_energy():
    assert LangevinDynamics(MLPEnergy(3).double(), 0.1).sample(dim=3, n_samples=2, n_steps=1).dtype == torch.float64
    assert LangevinDynamics(Quadratic(), 0.1).sample(dim=(2, 2), n_samples=4, n_steps=1).shape == (4, 2, 2)
    assert LangevinDynamics(Quadratic(), 0.1).sample(x=torch.zeros(4, 2).half(), n_steps=2).dtype == torch.float16
    high = torch.full((4, 2), 2e4).half()
    assert torch.equal(LangevinDynamics(Quadratic(0.0), 0.0).sample(x=high, n_steps=2), high), "finite, though the sum is not"


def test_progress():
    seen = []
    sampler = LangevinDynamics(Quadratic(), 0.1)
    sampler.sample(dim=1, n_steps=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    sampler.sample(dim=1, n_steps=3, progress=True)


def test_heun_has_an_error_of_second_order():
    """For E = x²/2 a step keeps 1 - h + h²/2 of x and (1 - h/2) of the noise."""
    h = 0.5
    exact = 2 * h * (1 - h / 2) ** 2 / (1 - (1 - h + h**2 / 2) ** 2)
    sampler = LangevinDynamics(Quadratic(), h, integrator="heun")
    x = sampler.sample(x=exact**0.5 * torch.randn(20000, 2, generator=seeded(1)), n_steps=16, generator=seeded())
    assert abs(x.var().item() - exact) < 3 * exact * (2 / 40000) ** 0.5
    assert abs(exact - 1.0) < abs(1 / (1 - h / 2) - 1.0) / 3
    plain = LangevinDynamics(Quadratic(), 0.1)
    same = LangevinDynamics(Quadratic(), 0.1, integrator=type("Mine", (EulerMaruyamaIntegrator,), {})())
    for size in (0.1, torch.tensor([0.1, 0.2, 0.3])):
        plain.step_size = same.step_size = size
        torch.testing.assert_close(*(s.sample(x=torch.ones(3, 2), n_steps=3, generator=seeded()) for s in (plain, same)))
    for name, words in (("rk4", "stochastic"), ("dopri5", "stochastic"), ("leapfrog", "unknown")):
        with pytest.raises(ConfigError, match=words):
            LangevinDynamics(Quadratic(), 0.1, integrator=name)
