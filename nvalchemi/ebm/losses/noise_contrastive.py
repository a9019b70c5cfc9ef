"""Noise-contrastive estimation: data told from noise of a known density."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nvalchemi.ebm.losses.base import ScalarEnergyLoss, vectors
from nvalchemi.ebm.losses.contrastive import both_energies
from nvalchemi.ebm.samples import normal_like
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import Terms


@runtime_checkable
class NoiseDistribution(Protocol):
    """A density that can be drawn from and evaluated."""

    def sample(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """As many samples as ``like`` has rows, of its shape, dtype and device."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density (batch,) at ``x`` (batch, ...), normalised."""


class GaussianNoise:
    """The normal distribution with independent coordinates.

    Parameters
    ----------
    mean, std
        Numbers, or tensors of the shape of a sample.
    """

    def __init__(self, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> None:
        if not bool((torch.as_tensor(std) > 0).all()):
            raise ConfigError("no such noise", found=f"std={std}", needed="positive numbers")
        self.mean, self.std = mean, std

    @classmethod
    def fit(cls, x: Tensor) -> GaussianNoise:
        """Mean and standard deviation of each coordinate of data (n, ...)."""
        return cls(x.mean(0), x.std(0))

    def sample(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """See `NoiseDistribution`."""
        mean, std = self._at(like)
        return mean + std * normal_like(like, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """See `NoiseDistribution`."""
        mean, std = self._at(x)
        logs = -0.5 * ((x - mean) / std).square() - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return logs.flatten(1).sum(1)

    def _at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = torch.as_tensor(self.mean).to(x), torch.as_tensor(self.std).to(x)
        if not all(value.ndim == 0 or value.shape == x.shape[1:] for value in (mean, std)):
            raise ConfigError(
                "the noise is of other samples",
                found=f"a mean of shape {tuple(mean.shape)}, a deviation of shape {tuple(std.shape)}",
                needed=f"numbers, or {tuple(x.shape[1:])}",
            )
        return mean, std


class NoiseContrastiveEstimation(ScalarEnergyLoss):
    """Noise-contrastive estimation.

    ::

        L = E_data softplus(-h(x)) + ν E_noise softplus(h(x')),        h = -E - log p_noise - log ν

    the log-likelihood, with the sign changed, of telling data from ν times as much noise: Gutmann and Hyvärinen, AISTATS 2010 and JMLR 13,
    307 (2012). At its minimum exp(-E) is the density of the data with its normalisation: give the energy's head a bias, which then learns
    the log of the partition function.

    A call gives ``(loss, noise)``. With conditions, such as labels y, exp(-E) is the density given y: the noise beside a sample has its label.

    Parameters
    ----------
    model
        The energy of vectors (batch, ...), in units of kT.
    noise_distribution
        Has ``sample(like, generator)`` and ``log_prob(x)``; the standard normal by default. `GaussianNoise.fit` is nearer to the data.
    noise_ratio
        ν, a whole number.
    """

    def __init__(self, model: EnergyModel, noise_distribution: NoiseDistribution | None = None, noise_ratio: int = 1) -> None:
        super().__init__(model)
        ratio: Any = noise_ratio
        if not isinstance(ratio, int) or ratio < 1:
            raise ConfigError("no such ratio of noise to data", found=repr(ratio), needed="a whole number of at least 1")
        noise: Any = GaussianNoise() if noise_distribution is None else noise_distribution
        if not isinstance(noise, NoiseDistribution):
            raise ConfigError("noise that cannot be drawn or evaluated", found=type(noise).__name__, needed="sample and log_prob")
        self.noise_distribution, self.noise_ratio = noise, noise_ratio

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        vectors(x, self)
        noise = self.noise_distribution.sample(x.repeat(self.noise_ratio, *[1] * (x.ndim - 1)), generator)
        if noise.shape != (self.noise_ratio * len(x), *x.shape[1:]):
            raise ConfigError(
                "the noise is of other samples", found=tuple(noise.shape), needed=(self.noise_ratio * len(x), *x.shape[1:])
            )
        data, other = both_energies(model, x, noise, conditions)
        offset = math.log(self.noise_ratio)
        of_data = softplus(data + self._log_prob(x) + offset)
        of_noise = softplus(-other - self._log_prob(noise) - offset)
        return Terms({"loss": of_data + of_noise.reshape(self.noise_ratio, len(x)).sum(0)}, noise)

    def _log_prob(self, x: Tensor) -> Tensor:
        found = self.noise_distribution.log_prob(x)
        if found.shape != (len(x),):
            raise ConfigError("log_prob of the noise is not one number a sample", found=tuple(found.shape), needed=f"({len(x)},)")
        return found
