"""Interpolants against finite differences and the closed form of Gaussian data."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.interpolants import (
    INTERPOLANTS,
    CosineInterpolant,
    LinearInterpolant,
    VariancePreservingInterpolant,
    get_interpolant,
)
from nvalchemi.errors import ConfigError

TIMES = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_derivatives(name):
    path, h = get_interpolant(name), 1e-6
    _, d_alpha, _, d_sigma = path.coefficients(TIMES)
    late, early = path.coefficients(TIMES + h), path.coefficients(TIMES - h)
    torch.testing.assert_close(d_alpha, (late[0] - early[0]) / (2 * h), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(d_sigma, (late[2] - early[2]) / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", INTERPOLANTS)
def test_noise_at_zero_and_data_at_one(name):
    x0, x1 = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    path = get_interpolant(name)
    start, _ = path.interpolate(x0, x1, torch.zeros(3, dtype=torch.float64))
    end, _ = path.interpolate(x0, x1, torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(end, x1)
    torch.testing.assert_close(start, x0, rtol=0, atol=0.02 if name == "vp" else 1e-12)


def test_known_values():
    t = torch.tensor([0.25], dtype=torch.float64)
    assert [float(c) for c in LinearInterpolant().coefficients(t)] == [0.25, 1.0, 0.75, -1.0]
    alpha, _, sigma, _ = CosineInterpolant().coefficients(t * 2)
    assert float(alpha) == pytest.approx(0.5**0.5) and float(sigma) == pytest.approx(0.5**0.5)
    alpha, _, sigma, _ = VariancePreservingInterpolant(0.1, 20.0).coefficients(torch.tensor([0.5], dtype=torch.float64))
    assert float(alpha) == pytest.approx(torch.exp(torch.tensor(-0.25 * 0.25 * 19.9 - 0.025, dtype=torch.float64)).item())
    assert float(alpha**2 + sigma**2) == pytest.approx(1.0)


@pytest.mark.parametrize("name", INTERPOLANTS)
@pytest.mark.parametrize("kind", ["velocity", "score", "noise", "data"])
def test_predictions_of_gaussian_data(name, kind):
    """Data N(0, v): the means given x are linear in x, so each prediction gives the same velocity and the exact score."""
    path, variance = get_interpolant(name), 2.5
    x = torch.randn(19, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alpha, d_alpha, sigma, d_sigma = path.at(TIMES, x)
    total = alpha**2 * variance + sigma**2
    means = {"data": alpha * variance / total * x, "noise": sigma / total * x, "score": -x / total}
    means["velocity"] = d_alpha * means["data"] + d_sigma * means["noise"]
    velocity = path.velocity(means[kind], x, TIMES, kind)
    torch.testing.assert_close(velocity, means["velocity"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(path.score(velocity, x, TIMES), means["score"], rtol=1e-8, atol=1e-8)


def test_wrong_shapes_and_names_are_told():
    path = LinearInterpolant()
    with pytest.raises(ConfigError, match="differ in shape"):
        path.interpolate(torch.zeros(3, 2), torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ConfigError, match="one time a sample"):
        path.interpolate(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(ConfigError, match="linear, cosine, vp"):
        get_interpolant("quadratic")
    with pytest.raises(ConfigError, match="unknown prediction"):
        path.velocity(torch.zeros(3, 2), torch.zeros(3, 2), torch.full((3,), 0.5), "energy")
    with pytest.raises(ConfigError, match="sigma_min"):
        VariancePreservingInterpolant(0.0, 1.0)
