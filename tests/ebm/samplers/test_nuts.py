"""The no-U-turn sampler, and HMC on a manifold."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.integrators import GeneralisedLeapfrogIntegrator
from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, NoUTurnSampler, RiemannianManifoldHMC
from nvalchemi.ebm.toy import FunnelModel, GaussianModel
from nvalchemi.errors import ConfigError, TrainingError
from tests.ebm.energies import Ball, Quadratic


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_ways_end_where_they_turn():
    """A harmonic oscillator of period 2π: about half a period, whatever the step; a chain of a wider well goes further."""
    counts = []
    for step in (0.4, 0.1):
        _, numbers = NoUTurnSampler(Quadratic(), step).sample(
            dim=5, n_samples=200, n_steps=5, return_diagnostics=True, generator=seeded()
        )
        counts.append(numbers["n_leapfrog_steps"].mean().item() * step)
        assert numbers["divergent"].max() == 0 and numbers["acceptance_rate"].min() > 0.9
    assert all(1.5 < length < 6.3 for length in counts)
    _, wide = NoUTurnSampler(Quadratic(0.01), 0.4).sample(
        dim=5, n_samples=50, n_steps=3, return_diagnostics=True, generator=seeded()
    )
    assert wide["n_leapfrog_steps"].mean() * 0.4 > 15
    _, short = NoUTurnSampler(Quadratic(0.01), 0.4, max_tree_depth=2).sample(
        dim=5, n_steps=3, return_diagnostics=True, generator=seeded()
    )
    assert torch.equal(short["n_leapfrog_steps"], torch.full((3,), 3.0))


@pytest.mark.parametrize(
    "settings",
    [{"temperature": torch.tensor([1.0, 4.0]).repeat_interleave(1500)}, {"mass": 2.0}, {"step_size": lambda step: 0.4}],
)
def test_settings(settings):
    sampler = NoUTurnSampler(Quadratic(), **{"step_size": 0.5, **settings})
    x = sampler.sample(dim=2, n_samples=3000, n_steps=8, generator=seeded())
    exact = (1.0, 4.0) if "temperature" in settings else (1.0, 1.0)
    for half, variance in zip(x.split(1500), exact, strict=True):
        assert abs(half.var().item() - variance) < 3 * variance * (2 / 3000) ** 0.5


def test_the_step_is_adapted():
    model = GaussianModel(torch.zeros(6), torch.linspace(0.2, 2.0, 6).square().diag())
    sampler = NoUTurnSampler(model, 1e-2)
    x = sampler.warm_up(dim=6, n_steps=60, n_samples=100, generator=seeded())
    _, numbers = sampler.sample(x=x, n_steps=10, return_diagnostics=True, generator=seeded())
    assert abs(numbers["acceptance_rate"].mean().item() - 0.8) < 0.06


def test_a_way_that_leaves_the_numbers():
    """B92: it ends there, is counted as divergent, and the chain keeps a finite state."""
    x = 0.5 * (torch.rand(500, 2, generator=seeded()) - 0.5)
    path, numbers = NoUTurnSampler(Ball(), 0.4).sample(
        x=x, n_steps=20, return_trajectory=True, return_diagnostics=True, generator=seeded()
    )
    assert path.isfinite().all() and (path.square().sum(2) < 1).all() and numbers["divergent"].mean() > 0.2
    assert abs(path[:, -1].square().sum(1).mean() - 0.5) < 3 * (1 / 12 / 500) ** 0.5
    with pytest.raises(TrainingError, match="1 of 2"):
        NoUTurnSampler(Ball(), 0.4).sample(x=torch.tensor([[0.0, 0.0], [3.0, 0.0]]))


def test_a_metric_that_fits_the_funnel():
    """Narrow and wide parts in one run: a fixed step loses the neck, a metric that follows the width does not."""
    model = FunnelModel(3, 1.5)

    def metric(x):
        widths = torch.stack([torch.full_like(x[:, 0], 1 / 1.5**2 + 1), (-x[:, 0]).exp(), (-x[:, 0]).exp()], 1)
        return widths.diag_embed()

    start = model.draw(2000, generator=seeded(1)).float()
    sampler = RiemannianManifoldHMC(model, metric, 0.4, 4)
    x, numbers = sampler.sample(x=start, n_steps=8, return_diagnostics=True, generator=seeded())
    assert numbers["acceptance_rate"].min() > 0.8 and numbers["unsolved"].max() < 0.1
    v = x[:, 0].double()
    assert abs(v.mean()) < 3 * 1.5 / 2000**0.5 and abs(v.var() - 2.25) < 3 * 2.25 * (2 / 2000) ** 0.5
    assert ((x[:, 1] * (-0.5 * x[:, 0]).exp()).var() - 1).abs() < 3 * (2 / 2000) ** 0.5


def test_a_constant_metric_is_a_mass():
    mass = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    x = torch.randn(5, 2, generator=seeded(1))
    ours = RiemannianManifoldHMC(Quadratic(), lambda x: mass.expand(len(x), 2, 2), 0.3, 3).sample(
        x=x, n_steps=4, generator=seeded()
    )
    torch.testing.assert_close(
        ours, HamiltonianMonteCarlo(Quadratic(), 0.3, 3, mass=mass).sample(x=x, n_steps=4, generator=seeded())
    )


def test_what_cannot_be_solved_is_refused():
    """Equations without a solution in so few iterations, or a metric that is none: chains stay where they were."""
    x = torch.randn(50, 2, generator=seeded())

    def steep(x):
        return (1 + 20 * x.square()).diag_embed()

    _, numbers = RiemannianManifoldHMC(Quadratic(), steep, 2.0, 1, n_fixed_point_steps=2).sample(
        x=x, n_steps=3, return_diagnostics=True, generator=seeded()
    )
    assert numbers["unsolved"].min() > 0.5
    none = RiemannianManifoldHMC(Quadratic(), lambda x: -torch.eye(2).expand(len(x), 2, 2), 0.1, 1)
    assert torch.equal(none.sample(x=x, n_steps=2, generator=seeded()), x)


def test_declarations_that_cannot_be():
    for bad in ({"max_tree_depth": 0}, {"max_energy_error": 0.0}, {"step_size": -1.0}):
        with pytest.raises(ConfigError):
            NoUTurnSampler(Quadratic(), **bad)
    for bad in ({"n_leapfrog_steps": 0}, {"n_fixed_point_steps": 0}):
        with pytest.raises(ConfigError):
            RiemannianManifoldHMC(Quadratic(), lambda x: x, **bad)
    with pytest.raises(ConfigError, match="vectors"):
        RiemannianManifoldHMC(Quadratic(), lambda x: x).sample(dim=(2, 2))
    for wrong in (lambda x: torch.eye(2), lambda x: torch.eye(3).expand(len(x), 3, 3), lambda x: torch.eye(2).expand(7, 2, 2)):
        with pytest.raises(ConfigError, match=r"one matrix a chain.*needed: \(4, 2, 2\)"):
            RiemannianManifoldHMC(Quadratic(), wrong).sample(dim=2, n_samples=4, n_steps=1)
    with pytest.raises(ConfigError, match="do not separate"):
        RiemannianManifoldHMC(Quadratic(), lambda x: x, integrator="leapfrog")


def test_an_integrator_of_ones_own():
    """By name or made before, it is the same; and its settings are those that count."""
    x = torch.randn(50, 2, generator=seeded())

    def run(**made):
        sampler = RiemannianManifoldHMC(Quadratic(), lambda x: (1 + x.square()).diag_embed(), 0.3, 2, **made)
        return sampler.sample(x=x, n_steps=2, generator=seeded(), return_diagnostics=True)

    by_name, numbers = run(n_fixed_point_steps=5)
    made, _ = run(integrator=GeneralisedLeapfrogIntegrator(5))
    assert torch.equal(by_name, made) and numbers["unsolved"].max() < 1
    assert run(integrator=GeneralisedLeapfrogIntegrator(5, tolerance=1e-30))[1]["unsolved"].min() > 0.9
