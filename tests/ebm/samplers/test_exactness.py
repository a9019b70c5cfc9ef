"""Samplers with a test of acceptance draw from the target exactly: mean, covariance, weights of modes, energies.

Every chain gives one sample, so samples are independent and standard errors are those of independent samples.
"""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, MetropolisAdjustedLangevin, NoUTurnSampler, RiemannianManifoldHMC
from nvalchemi.ebm.toy import GaussianMixtureModel, GaussianModel

CHAINS = 3000


def correlated(dim=10):
    """Correlations between all coordinates, and standard deviations from 0.5 to 2."""
    generator = torch.Generator().manual_seed(4)
    root = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    cov = root @ root.mT / dim + 0.5 * torch.eye(dim, dtype=torch.float64)
    width = torch.linspace(0.5, 2.0, dim, dtype=torch.float64) / cov.diagonal().sqrt()
    return GaussianModel(torch.linspace(-1.0, 1.0, dim).double(), width[:, None] * cov * width).float()


def curved(x):
    """A metric that depends on the position, and is not diagonal."""
    a, b = 1 + 0.5 * x[:, 0].cos(), 1 + 0.3 * x[:, 1].tanh()
    off = 0.3 * x[:, 0].sin()
    return torch.stack([torch.stack([a + 0.5, off], 1), torch.stack([off, b + 0.5], 1)], 1)


def modes():
    return GaussianMixtureModel([[-1.5, 0.0], [1.5, 0.5]], [[0.6, 0.1], [0.1, 0.4]], [0.3, 0.7])


SAMPLERS = {
    "mala": (
        lambda model: MetropolisAdjustedLangevin(model, 0.08),
        150,
        lambda model: MetropolisAdjustedLangevin(model, 0.4),
        80,
    ),
    "hmc": (
        lambda model: HamiltonianMonteCarlo(model, 0.35, 6, jitter=0.2),
        20,
        lambda model: HamiltonianMonteCarlo(model, 0.6, 4),
        40,
    ),
    "nuts": (lambda model: NoUTurnSampler(model, 0.4), 6, lambda model: NoUTurnSampler(model, 0.5), 15),
    "rmhmc": (
        lambda model: RiemannianManifoldHMC(model, lambda x: model.precision.expand(len(x), -1, -1), 0.5, 3),
        8,
        lambda model: RiemannianManifoldHMC(model, curved, 0.5, 4),
        6,
    ),
}


def assert_moments(x, known):
    x, cov = x.double(), known.covariance
    mean_error = (cov.diagonal() / len(x)).sqrt()
    assert ((x.mean(0) - known.mean).abs() / mean_error).max() < 3
    delta = x - known.mean
    products = delta.unsqueeze(2) * delta.unsqueeze(1)
    error = products.std(0) / len(x) ** 0.5
    assert ((products.mean(0) - cov).abs() / error).max() < 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_correlated_normal_distribution(name):
    model = correlated()
    make, steps, _, _ = SAMPLERS[name]
    x = make(model).sample(dim=10, n_samples=CHAINS, n_steps=steps, generator=torch.Generator().manual_seed(0))
    assert_moments(x, model.statistics())


@pytest.mark.parametrize("name", SAMPLERS)
def test_two_modes(name):
    """The weights of the modes are the means of their shares of the density."""
    model = modes()
    _, _, make, steps = SAMPLERS[name]
    generator = torch.Generator().manual_seed(1)
    # A metric makes small steps of wide jumps: it is tried from exact samples, which it must leave as they are.
    start = model.draw(CHAINS, generator=generator).float() if name == "rmhmc" else torch.randn(CHAINS, 2, generator=generator)
    x = make(model).sample(x=start, n_steps=steps, generator=torch.Generator().manual_seed(0))
    assert_moments(x, model.statistics())
    share = model._log_parts(x.double()).softmax(0)[0]
    assert abs(share.mean() - 0.3) < 3 * share.std() / CHAINS**0.5
    assert abs(0.5 - 0.3) > 3 * share.std() / CHAINS**0.5
