"""Normal distributions, mixtures of them, and the funnel: energies with closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi.ebm.toy.base import Statistics, ToyEnergy
from nvalchemi.errors import ConfigError


def _tensor(values: Any) -> Tensor:
    """A floating tensor: in the dtype given, or torch's default of numbers."""
    tensor = torch.as_tensor(values)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def _cholesky(covariance: Tensor, dim: int) -> Tensor:
    """The lower factor of one or several covariances, float64."""
    matrix = covariance.double()
    if matrix.shape[-2:] != (dim, dim) or not torch.allclose(matrix, matrix.mT):
        raise ConfigError("no such covariance", found=f"shape {tuple(matrix.shape)}", needed=f"symmetric, (..., {dim}, {dim})")
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed.any():
        raise ConfigError("a covariance is not positive definite")
    return factor


class GaussianModel(ToyEnergy):
    """A normal distribution: (x - m)ᵀ C⁻¹ (x - m) / 2.

    Parameters
    ----------
    mean
        (dim,).
    cov
        (dim, dim), positive definite.
    """

    def __init__(self, mean: Any, cov: Any) -> None:
        super().__init__()
        mean, cov = _tensor(mean), _tensor(cov)
        if mean.ndim != 1:
            raise ConfigError("a mean is one vector", found=f"shape {tuple(mean.shape)}")
        self.dim = len(mean)
        factor = _cholesky(cov, self.dim)
        self.mean: Tensor
        self.cov: Tensor
        self.precision: Tensor
        self.register_buffer("mean", mean)
        self.register_buffer("cov", cov)
        self.register_buffer("precision", torch.cholesky_inverse(factor).to(cov.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        delta = x - self.mean
        return 0.5 * ((delta @ self.precision.to(delta.dtype)) * delta).sum(-1)

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        cov = temperature * self.cov.double().cpu()
        return Statistics(
            self.mean.double().cpu(), cov, 0.5 * dim * math.log(2 * math.pi) + 0.5 * float(torch.linalg.slogdet(cov)[1])
        )

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        z = torch.randn(n_samples, dim, dtype=torch.float64, generator=generator)
        return self.mean.double().cpu() + math.sqrt(temperature) * z @ _cholesky(self.cov.cpu(), dim).mT


class HarmonicModel(ToyEnergy):
    """Springs to the origin: k |x|²/2, vectors of any length.

    Parameters
    ----------
    k
        Stiffness.
    """

    def __init__(self, k: float = 1.0) -> None:
        super().__init__()
        if not k > 0.0:
            raise ConfigError("a stiffness is positive", found=k)
        self.k = float(k)

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        return 0.5 * self.k * x.square().flatten(1).sum(1)

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        variance = temperature / self.k
        identity = torch.eye(dim, dtype=torch.float64)
        return Statistics(identity.new_zeros(dim), variance * identity, 0.5 * dim * math.log(2 * math.pi * variance))

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        return math.sqrt(temperature / self.k) * torch.randn(n_samples, dim, dtype=torch.float64, generator=generator)


class GaussianMixtureModel(ToyEnergy):
    """Minus the logarithm of a weighted sum of normal densities, which is normalised: Z = 1 at temperature 1.

    Parameters
    ----------
    means
        (components, dim).
    cov
        The covariances (components, dim, dim), one for all (dim, dim), or a number: that variance in every direction.
    weights
        (components,) positive numbers, of which only the ratios count; equal if not given.
    """

    def __init__(self, means: Any, cov: Any = 1.0, weights: Sequence[float] | Tensor | None = None) -> None:
        super().__init__()
        means, cov = _tensor(means), _tensor(cov)
        if means.ndim != 2:
            raise ConfigError("the means are one vector a component", found=f"shape {tuple(means.shape)}")
        count, self.dim = means.shape
        weight = torch.ones(count) if weights is None else _tensor(weights)
        if weight.shape != (count,) or not bool((weight > 0).all()):
            raise ConfigError("no such weights", found=weight.tolist(), needed=f"{count} positive numbers")
        if cov.ndim == 0:
            cov = cov * torch.eye(self.dim, dtype=means.dtype)
        factor = _cholesky(cov.to(means.dtype), self.dim).expand(count, -1, -1)
        weight = weight.double() / weight.double().sum()
        height = weight.log() - factor.diagonal(dim1=1, dim2=2).log().sum(1) - 0.5 * self.dim * math.log(2 * math.pi)
        identity = torch.eye(self.dim, dtype=torch.float64)
        whiten = torch.linalg.solve_triangular(factor, identity.expand(count, -1, -1), upper=False).mT
        self.means: Tensor
        self.whiten: Tensor
        self.height: Tensor
        self.register_buffer("means", means)
        self.register_buffer("whiten", whiten.to(means.dtype))
        self.register_buffer("height", height.to(means.dtype))
        self.weights, self.factors = weight, factor

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        return -torch.logsumexp(self._log_parts(x), 0)

    def component(self, x: Tensor) -> Tensor:
        """The component (batch,) that most likely made each vector."""
        return self._log_parts(x).argmax(0)

    def _log_parts(self, x: Tensor) -> Tensor:
        """The logarithm of each component's share of the density, (components, batch)."""
        delta = x - self.means.unsqueeze(1)
        white = delta @ self.whiten.to(delta.dtype)
        return self.height.to(delta.dtype).unsqueeze(1) - 0.5 * white.square().sum(-1)

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        if temperature != 1.0:
            raise self._unknown(f"closed form at temperature {temperature}")
        means, weights = self.means.double().cpu(), self.weights
        mean = weights @ means
        apart = means - mean
        spread = (self.factors @ self.factors.mT + apart.unsqueeze(2) * apart.unsqueeze(1)) * weights[:, None, None]
        return Statistics(mean, spread.sum(0), 0.0)

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        if temperature != 1.0:
            raise self._unknown(f"exact samples at temperature {temperature}")
        which = torch.multinomial(self.weights, n_samples, replacement=True, generator=generator)
        z = torch.randn(n_samples, dim, 1, dtype=torch.float64, generator=generator)
        return self.means.double().cpu()[which] + (self.factors[which] @ z).squeeze(-1)


class FunnelModel(ToyEnergy):
    """Neal's funnel: v = x_0 is normal with standard deviation ``scale``, and each other coordinate is normal with variance exp(v).

    Neal, Slice sampling, Annals of Statistics 31, 705 (2003).

    Parameters
    ----------
    dim
        Length of a vector, v included; at least 2.
    scale
        Standard deviation of v.
    """

    def __init__(self, dim: int = 10, scale: float = 3.0) -> None:
        super().__init__()
        if dim < 2 or not scale > 0.0:
            raise ConfigError("no such funnel", found=f"dim={dim}, scale={scale}", needed="dim at least 2, scale positive")
        self.dim, self.scale = dim, float(scale)

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        v, others = x[:, 0], x[:, 1:]
        inside = 0.5 * torch.exp(-v) * others.square().sum(1)
        return inside + 0.5 * (v / self.scale).square() + 0.5 * others.shape[1] * v

    def _neck(self, dim: int, temperature: float) -> tuple[float, float]:
        """Mean and variance of v; at another temperature the width of the others pushes it to one side."""
        return 0.5 * self.scale**2 * (dim - 1) * (temperature - 1.0), temperature * self.scale**2

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        mean, variance = self._neck(dim, temperature)
        center = torch.zeros(dim, dtype=torch.float64)
        center[0] = mean
        widths = torch.full((dim,), temperature * math.exp(mean + 0.5 * variance), dtype=torch.float64)
        widths[0] = variance
        log_z = 0.5 * dim * math.log(2 * math.pi * temperature) + math.log(self.scale) + 0.5 * mean**2 / variance
        return Statistics(center, widths.diag(), log_z)

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        mean, variance = self._neck(dim, temperature)
        x = torch.randn(n_samples, dim, dtype=torch.float64, generator=generator)
        x[:, 0] = mean + math.sqrt(variance) * x[:, 0]
        x[:, 1:] *= math.sqrt(temperature) * torch.exp(0.5 * x[:, :1])
        return x
