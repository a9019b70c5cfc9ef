"""Hamiltonian Monte Carlo and its one-step form."""

from __future__ import annotations

import numpy
import pytest
import torch

from nvalchemi.ebm.samplers import (
    HamiltonianMonteCarlo,
    LangevinDynamics,
    MetropolisAdjustedLangevin,
    NoUTurnSampler,
    RiemannianManifoldHMC,
)
from nvalchemi.ebm.toy import GaussianModel
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import MLPEnergy
from tests.ebm.energies import Ball, Quadratic


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def start(count=2000, dim=2):
    return torch.randn(count, dim, generator=seeded(1))


class Counted(Quadratic):
    """Counts its passes."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("length", [1, 5])
def test_a_leapfrog_step_costs_one_gradient(length):
    model = Counted()
    HamiltonianMonteCarlo(model, 0.1, length).sample(dim=2, n_samples=3, n_steps=7, generator=seeded())
    assert model.passes == 7 * length + 1


@pytest.mark.parametrize("sampler", [HamiltonianMonteCarlo(Ball(), 0.5, 3), MetropolisAdjustedLangevin(Ball(), 0.2)])
def test_a_way_that_leaves_the_numbers_is_refused(sampler):
    """B92: NaN outside radius 1: chains stay finite and inside, other chains move on, and a refusal counts as one."""
    x = torch.rand(400, 2, generator=seeded()) - 0.5
    path, numbers = sampler.sample(x=x, n_steps=30, return_trajectory=True, return_diagnostics=True, generator=seeded())
    assert path.isfinite().all() and (path.square().sum(2) < 1).all()
    states = torch.cat([x[:, None], path], 1)
    moved = (states[:, 1:] != states[:, :-1]).any(2).float().mean(0)
    assert torch.equal(moved, numbers["acceptance_rate"]) and 0.1 < moved.mean() < 0.9
    # Flat inside: the exact samples are uniform in the disc, with mean square radius 1/2.
    assert abs(path[:, -1].square().sum(1).mean() - 0.5) < 3 * (1 / 12 / 400) ** 0.5


def test_the_acceptance_reported_is_that_measured():
    sampler = HamiltonianMonteCarlo(Quadratic(), 1.6, 2)
    path, numbers = sampler.sample(x=start(), n_steps=5, return_trajectory=True, return_diagnostics=True, generator=seeded())
    states = torch.cat([start()[:, None], path], 1)
    assert torch.equal((states[:, 1:] != states[:, :-1]).any(2).float().mean(0), numbers["acceptance_rate"])
    assert 0.5 < numbers["acceptance_rate"].mean() < 0.95


@pytest.mark.parametrize("temperature", [2.0, torch.tensor([1.0, 4.0]).repeat_interleave(1000), lambda step: 2.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: HamiltonianMonteCarlo(Quadratic(), 0.7, 3, temperature=t, jitter=0.1),
        lambda t: MetropolisAdjustedLangevin(Quadratic(), 0.7, temperature=t),
        lambda t: MetropolisAdjustedLangevin(Quadratic(), torch.tensor([0.5, 0.8]).repeat_interleave(1000), temperature=t),
    ],
)
def test_temperatures(make, temperature):
    x = make(temperature).sample(x=start(), n_steps=25, generator=seeded())
    exact = [1.0, 4.0] if isinstance(temperature, torch.Tensor) else [2.0, 2.0]
    for half, variance in zip(x.split(1000), exact, strict=True):
        assert abs(half.var().item() - variance) < 3 * variance * (2 / 2000) ** 0.5


WIDE = GaussianModel(torch.zeros(8), torch.linspace(0.3, 2.0, 8).square().diag())
COV = torch.tensor([[4.0, 0.9], [0.9, 0.25]])


@pytest.mark.parametrize("mass", [2.0, torch.tensor(2.0), 1 / COV.diagonal(), torch.linalg.inv(COV)])
def test_masses_leave_the_target_as_it_is(mass):
    model = GaussianModel([0.0, 0.0], COV)
    x = HamiltonianMonteCarlo(model, 0.5, 4, mass=mass).sample(x=start(), n_steps=30, generator=seeded())
    error = ((COV.diagonal()[:, None] * COV.diagonal() + COV**2) / 2000).sqrt()
    assert ((x.T.cov() - COV).abs() < 3 * error).all()


def test_what_a_mass_is():
    """Number, diagonal and matrix of the same mass make the same moves; the inverse covariance makes directions alike."""
    samples = [
        HamiltonianMonteCarlo(Quadratic(), 0.3, 3, mass=mass).sample(x=start(5), n_steps=3, generator=seeded())
        for mass in (4.0, torch.full((2,), 4.0), 4.0 * torch.eye(2))
    ]
    for other in samples[1:]:
        torch.testing.assert_close(other, samples[0])
    slow = HamiltonianMonteCarlo(Quadratic(), 0.15, 3).sample(x=start(5), n_steps=3, generator=seeded())
    torch.testing.assert_close(slow, samples[0])  # a mass of 4 is half the step
    none = HamiltonianMonteCarlo(Quadratic(), 0.15, 3, mass=None).sample(x=start(5), n_steps=3, generator=seeded())
    assert torch.equal(none, slow)
    mala = MetropolisAdjustedLangevin(Quadratic(), 0.5 * 0.3**2).sample(x=start(5), n_steps=3, generator=seeded())
    torch.testing.assert_close(mala, HamiltonianMonteCarlo(Quadratic(), 0.3, 1).sample(x=start(5), n_steps=3, generator=seeded()))
    image = HamiltonianMonteCarlo(Quadratic(), 0.3, 3, mass=torch.ones(2, 3)).sample(dim=(2, 3), n_samples=4, n_steps=2)
    assert image.shape == (4, 2, 3)
    assert HamiltonianMonteCarlo(Quadratic(), 0.3, 3, mass=torch.eye(6)).sample(x=image, n_steps=2).shape == (4, 2, 3)
    plain = {"x": torch.ones(4, 2), "n_steps": 2}
    tensor, *others = (
        HamiltonianMonteCarlo(Quadratic(), 0.3, 3, mass=mass).sample(**plain, generator=torch.Generator().manual_seed(0))
        for mass in (torch.tensor([1.0, 2.0]), [1.0, 2.0], numpy.array([1.0, 2.0]))
    )
    assert all(torch.equal(other, tensor) for other in others)


@pytest.mark.parametrize(
    "mass",
    [0.0, torch.ones(3), torch.tensor([1.0, -1.0]), torch.eye(3), -torch.eye(2) + 1e-3, torch.tensor([[1.0, 0.9], [0.0, 1.0]])],
)
def test_masses_that_cannot_be(mass):
    with pytest.raises(ConfigError, match=r"mass|coordinate"):
        HamiltonianMonteCarlo(Quadratic(), 0.1, mass=mass).sample(dim=2, n_steps=1)


@pytest.mark.parametrize("first", [1e-3, 50.0])
@pytest.mark.parametrize(
    ("make", "given", "target"),
    [
        (lambda first: HamiltonianMonteCarlo(WIDE, first, 3), {}, 0.8),
        (lambda first: HamiltonianMonteCarlo(WIDE, first, 3), {"target_acceptance": 0.9}, 0.9),
        (lambda first: MetropolisAdjustedLangevin(WIDE, first), {}, 0.57),
    ],
)
def test_the_step_size_is_adapted(make, given, target, first):
    sampler = make(first)
    x = sampler.warm_up(x=start(200, 8), n_steps=100, generator=seeded(), **given)
    assert isinstance(sampler.step_size, float) and 0.05 < sampler.step_size < 5
    _, numbers = sampler.sample(x=x, n_steps=20, return_diagnostics=True, generator=seeded())
    assert abs(numbers["acceptance_rate"].mean().item() - target) < 0.06
    with pytest.raises(ConfigError, match="adapt"):
        sampler.warm_up(dim=8, target_acceptance=1.0)
    with pytest.raises(ConfigError, match="number"):
        make(lambda step: 0.1).warm_up(dim=8)


def test_declarations_that_cannot_be():
    for bad in ({"n_leapfrog_steps": 0}, {"jitter": 1.0}, {"step_size": -1.0}, {"integrator": "euler"}):
        with pytest.raises(ConfigError):
            HamiltonianMonteCarlo(Quadratic(), **bad)


@pytest.mark.parametrize("bad", [0.0, torch.tensor([1.0, 0.0]), torch.tensor([1.0, float("nan")]), lambda step: 0.0])
@pytest.mark.parametrize(
    "kind",
    [
        HamiltonianMonteCarlo,
        MetropolisAdjustedLangevin,
        NoUTurnSampler,
        lambda m, h, temperature: RiemannianManifoldHMC(
            m, lambda x: torch.eye(2).expand(len(x), 2, 2), h, temperature=temperature
        ),
    ],
)
def test_a_test_of_acceptance_needs_a_temperature(kind, bad):
    """At T = 0 every way was refused: the chains stood still without notice."""
    with pytest.raises(ConfigError, match=r"temperature.*a finite number above 0"):
        kind(Quadratic(), 0.1, temperature=bad).sample(dim=2, n_samples=2, n_steps=1)


def test_chains_that_begin_nowhere():
    with pytest.raises(TrainingError, match="1 of 3"):
        HamiltonianMonteCarlo(Ball(), 0.1).sample(x=torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.1, 0.1]]))


def test_nothing_to_do():
    x = start(5)
    for steps, size in ((0, 0.1), (3, 0.0)):
        assert torch.equal(HamiltonianMonteCarlo(Quadratic(), size, 3).sample(x=x, n_steps=steps, generator=seeded()), x)


@pytest.mark.parametrize("force", [False, True])
def test_a_compiled_sampler_gives_the_same(force):
    """One graph of energy and gradient; the weights stay the model's, and nothing is left behind."""
    model = MLPEnergy(2, 8)
    model.force_fp32_gradient = force
    x = start(6)
    for make in (lambda: LangevinDynamics(model, 0.1), lambda: HamiltonianMonteCarlo(model, 0.3, 3)):
        compiled = make().compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            expected = make().sample(x=x, n_steps=4, generator=seeded())
            torch.testing.assert_close(compiled.sample(x=x, n_steps=4, generator=seeded()), expected)
            with torch.no_grad():
                model.net[0].weight.mul_(2.0)
    assert model.training and all(p.grad is None for p in model.parameters())
    with pytest.raises(ConfigError, match="tensors"):
        compiled.energy.gradient([1.0])
    with pytest.raises(ConfigError, match="graph"):
        compiled.energy.gradient(x, create_graph=True)
    assert not list(compiled.energy.parameters())
