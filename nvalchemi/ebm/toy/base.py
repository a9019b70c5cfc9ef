"""What the known energies share, and statistics by quadrature where there is no formula."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is known of the density exp(-E(x) / T) / Z.

    Parameters
    ----------
    mean
        (dim,) float64.
    covariance
        (dim, dim) float64.
    log_z
        The logarithm of Z.
    """

    mean: Tensor
    covariance: Tensor
    log_z: float


class ToyEnergy(EnergyModel):
    """An energy of vectors (batch, dim) without parameters.

    Attributes
    ----------
    dim
        The length of a vector; None where any length will do.
    """

    dim: int | None = None

    def statistics(self, dim: int | None = None, temperature: float = 1.0) -> Statistics:
        """Mean, covariance and normalisation of exp(-E / T), exact to about 1e-8 where they are integrated by quadrature.

        Parameters
        ----------
        dim
            Needed where the energy takes vectors of any length.
        temperature
            T.

        Raises
        ------
        ConfigError
            Where they are not known.
        """
        return self._statistics(self._length(dim), self._positive(temperature))

    def draw(
        self, n_samples: int, dim: int | None = None, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent exact samples of exp(-E / T), (n_samples, dim) float64 on the CPU.

        Without ``generator`` they come from torch's default generator.

        Raises
        ------
        ConfigError
            Where there is no way to draw them.
        """
        return self._draw(n_samples, self._length(dim), self._positive(temperature), generator)

    @abstractmethod
    def _statistics(self, dim: int, temperature: float) -> Statistics:
        """See `statistics`."""

    @abstractmethod
    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        """See `draw`."""

    def _length(self, dim: int | None) -> int:
        found = self.dim if dim is None else dim
        if found is None:
            raise ConfigError(f"{type(self).__name__} takes vectors of any length", fix="say which with dim")
        if found < 1 or (self.dim is not None and found != self.dim):
            raise ConfigError(f"{type(self).__name__} has no vectors of that length", found=found, needed=self.dim)
        return found

    def _positive(self, temperature: float) -> float:
        if not 0.0 < temperature < math.inf:
            raise ConfigError("a temperature is positive", found=temperature)
        return float(temperature)

    def _unknown(self, what: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} has no {what}")


class Separable(ToyEnergy):
    """A sum over coordinates of one function of one number."""

    bound: float = 0.0
    """Beyond it the density is below 1e-16 of its greatest value, at temperature 1."""

    @abstractmethod
    def profile(self, x: Tensor) -> Tensor:
        """The energy of each coordinate, of the shape of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        return self.profile(x).flatten(1).sum(1)

    def _grid(self, temperature: float) -> tuple[Tensor, Tensor]:
        """A grid and the logarithm of the density on it."""
        bound = self.bound * max(1.0, math.sqrt(temperature))
        x = torch.linspace(-bound, bound, 200_001, dtype=torch.float64)
        return x, -self.profile(x) / temperature

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        # The trapezoid rule is exact to all digits for functions that are smooth and vanish with all derivatives at both ends.
        x, log_density = self._grid(temperature)
        log_z = torch.logsumexp(log_density, 0)
        weight = (log_density - log_z).exp()
        mean = weight @ x
        variance = weight @ (x - mean).square()
        identity = torch.eye(dim, dtype=torch.float64)
        return Statistics(mean.expand(dim).clone(), variance * identity, dim * float(log_z + (x[1] - x[0]).log()))

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        x, log_density = self._grid(temperature)
        weight = (log_density - log_density.max()).exp()
        below = torch.cat([weight.new_zeros(1), (0.5 * (weight[1:] + weight[:-1])).cumsum(0)])
        wanted = torch.rand(n_samples, dim, dtype=torch.float64, generator=generator) * below[-1]
        right = torch.searchsorted(below, wanted, right=True).clamp_(1, len(x) - 1)
        share = (wanted - below[right - 1]) / (below[right] - below[right - 1])
        return x[right - 1] + share * (x[right] - x[right - 1])
