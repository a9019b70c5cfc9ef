"""Known energies: statistics, exact samples and gradients agree with each other."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.ebm import toy
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel

COV = [[1.0, 0.6, 0.1], [0.6, 2.0, -0.3], [0.1, -0.3, 0.5]]
MODELS = {
    "gaussian": (toy.GaussianModel([1.0, -1.0, 0.0], COV), 3),
    "mixture": (toy.GaussianMixtureModel([[-2.0, 0.0], [2.0, 1.0], [0.0, 3.0]], [[0.3, 0.1], [0.1, 0.2]], [1, 2, 1]), 2),
    "harmonic": (toy.HarmonicModel(2.0), 3),
    "double well": (toy.DoubleWellModel(), 2),
    "rastrigin": (toy.RastriginModel(3.0), 2),
    "rosenbrock": (toy.RosenbrockModel(1.0, 5.0), 2),
    "funnel": (toy.FunnelModel(3, 0.7), 3),
    "mueller-brown": (toy.MuellerBrownModel(), 2),
    "ackley": (toy.AckleyModel(), 2),
}
DRAWN = [name for name in MODELS if name not in ("mueller-brown", "ackley")]


@pytest.mark.parametrize("name", MODELS)
def test_an_energy_is_an_energy_model(name):
    model, dim = MODELS[name]
    assert isinstance(model, EnergyModel) and not list(model.parameters())
    x = torch.randn(5, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert model(x).shape == (5,) and model(x).dtype == torch.float64
    assert torch.autograd.gradcheck(model.double(), x.clone().requires_grad_())
    with torch.no_grad():
        found = model.gradient(x)
    assert found.dtype == torch.float64 and not found.requires_grad
    for dtype in (torch.float32, torch.bfloat16):
        assert model.gradient(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("name", DRAWN)
def test_exact_samples_have_the_statistics(name, temperature):
    model, dim = MODELS[name]
    if name == "mixture" and temperature != 1.0:
        for call in (model.statistics, lambda **kw: model.draw(3, **kw)):
            with pytest.raises(ConfigError, match=r"1\.5"):
                call(temperature=temperature)
        return
    known = model.statistics(dim, temperature)
    x = model.draw(40_000, dim, temperature, torch.Generator().manual_seed(0))
    assert x.dtype == torch.float64 and x.shape == (40_000, dim)
    delta = x - known.mean
    for found, exact in (
        (delta, torch.zeros(dim)),
        ((delta.unsqueeze(2) * delta.unsqueeze(1)).flatten(1), known.covariance.flatten()),
    ):
        error = found.std(0) / len(x) ** 0.5
        assert ((found.mean(0) - exact).abs() < 4 * error).all()
    # E[exp(E/T) q(x)] over exact samples is the integral of q over Z, for any density q: here one narrower than the target.
    q = torch.distributions.MultivariateNormal(x.median(0).values, 0.1 * torch.eye(dim, dtype=torch.float64))
    ratio = torch.exp(model(x) / temperature + q.log_prob(x) + known.log_z)
    assert abs(ratio.mean() - 1.0) < 4 * ratio.std() / len(x) ** 0.5


def test_normalisations_in_closed_form():
    model = toy.GaussianModel(torch.zeros(3, dtype=torch.float64), torch.tensor(COV, dtype=torch.float64))
    exact = torch.distributions.MultivariateNormal(model.mean, model.cov)
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(-model(x) - model.statistics().log_z, exact.log_prob(x))
    funnel = toy.FunnelModel(2).statistics()
    assert funnel.log_z == pytest.approx(math.log(2 * math.pi * 3.0)) and funnel.covariance[1, 1].item() == pytest.approx(
        math.exp(4.5)
    )
    assert toy.HarmonicModel(4.0).statistics(2).covariance.tolist() == [[0.25, 0.0], [0.0, 0.25]]
    assert toy.RastriginModel(0.0).statistics(1).log_z == pytest.approx(0.5 * math.log(math.pi), abs=1e-9)


def test_the_surface_of_mueller_and_brown():
    model = toy.MuellerBrownModel()
    torch.testing.assert_close(model(model.minima), torch.tensor([-146.6995, -108.1667, -80.7678]), atol=1e-3, rtol=0)
    assert model.gradient(model.minima).abs().max() < 0.02
    torch.testing.assert_close(
        model(torch.tensor([[-0.8220, 0.6243], [0.2125, 0.2930]])), torch.tensor([-40.6648, -72.2489]), atol=1e-3, rtol=0
    )
    cold = model.statistics(temperature=0.5)
    torch.testing.assert_close(cold.mean.float(), model.minima[0], atol=5e-3, rtol=0)


def test_lowest_points():
    for model, at in (
        (toy.AckleyModel(), [0.0, 0.0]),
        (toy.RastriginModel(), [0.0, 0.0]),
        (toy.RosenbrockModel(2.0), [2.0, 4.0]),
    ):
        x = torch.tensor([at])
        assert model(x).abs().item() < 1e-5 and model.gradient(x).abs().max() < 1e-4
        assert (model(x + 0.05 * torch.randn(50, 2)) > 0).all()


def test_the_component_of_a_mixture():
    model = toy.GaussianMixtureModel([[-4.0, 0.0], [4.0, 0.0]], 1.0)
    assert model.component(torch.tensor([[-3.0, 1.0], [5.0, 0.0], [0.1, 9.0]])).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: toy.GaussianModel([0.0, 0.0], [[1.0, 2.0], [2.0, 1.0]]),
        lambda: toy.GaussianModel([0.0, 0.0], [[1.0, 0.5], [0.0, 1.0]]),
        lambda: toy.GaussianModel([0.0], [[1.0, 0.0], [0.0, 1.0]]),
        lambda: toy.GaussianModel([[0.0]], [[1.0]]),
        lambda: toy.GaussianMixtureModel([0.0, 1.0]),
        lambda: toy.GaussianMixtureModel([[0.0], [1.0]], weights=[1.0, 0.0]),
        lambda: toy.HarmonicModel(0.0),
        lambda: toy.DoubleWellModel(-1.0),
        lambda: toy.FunnelModel(1),
        lambda: toy.RosenbrockModel(1.0, 0.0),
        lambda: toy.RastriginModel(-1.0),
        lambda: toy.HarmonicModel().statistics(),
        lambda: toy.HarmonicModel().statistics(2, temperature=0.0),
        lambda: toy.FunnelModel(3).statistics(4),
        lambda: toy.RosenbrockModel().statistics(3),
        lambda: toy.RosenbrockModel().draw(2, 3),
        lambda: toy.AckleyModel().statistics(2),
        lambda: toy.AckleyModel().draw(2, 2),
        lambda: toy.MuellerBrownModel().draw(2),
    ],
)
def test_what_there_is_not(make):
    with pytest.raises(ConfigError):
        make()
