"""Landscapes with several minima, curved valleys and barriers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvalchemi.ebm.toy.base import Separable, Statistics, ToyEnergy
from nvalchemi.errors import ConfigError


class DoubleWellModel(Separable):
    """Two wells in every coordinate: h (x² - b²)², summed; vectors of any length.

    Parameters
    ----------
    barrier_height
        h: in one coordinate the barrier at 0 is h b⁴.
    b
        The wells lie at -b and b.
    """

    def __init__(self, barrier_height: float = 2.0, b: float = 1.0) -> None:
        super().__init__()
        if not (barrier_height > 0.0 and b > 0.0):
            raise ConfigError("no such wells", found=f"barrier_height={barrier_height}, b={b}", needed="both positive")
        self.barrier_height, self.b = float(barrier_height), float(b)
        self.bound = math.sqrt(self.b**2 + math.sqrt(40.0 / self.barrier_height))

    def profile(self, x: Tensor) -> Tensor:
        """See `Separable.profile`."""
        return self.barrier_height * (x.square() - self.b**2).square()


class RastriginModel(Separable):
    """A bowl with a minimum near every integer: a + x² - a cos 2πx, summed; the lowest is 0 at 0. Vectors of any length.

    Parameters
    ----------
    a
        Depth of the ripples.
    """

    def __init__(self, a: float = 10.0) -> None:
        super().__init__()
        if not a >= 0.0:
            raise ConfigError("a depth is not negative", found=a)
        self.a = float(a)
        self.bound = 8.0  # x² alone is 64 there, and the ripples are never below 0

    def profile(self, x: Tensor) -> Tensor:
        """See `Separable.profile`."""
        return self.a + x.square() - self.a * torch.cos(2 * math.pi * x)


class AckleyModel(ToyEnergy):
    """Ackley's function: -a exp(-b √(mean x²)) - exp(mean cos c x) + a + e; the lowest is 0 at 0. Vectors of any length.

    It stays bounded far out, so exp(-E) has no integral and no statistics: a landscape for descent, not for sampling without bounds.
    Ackley, A connectionist machine for genetic hillclimbing (1987).
    """

    def __init__(self, a: float = 20.0, b: float = 0.2, c: float = 2 * math.pi) -> None:
        super().__init__()
        self.a, self.b, self.c = float(a), float(b), float(c)

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim)."""
        square = x.square().flatten(1).mean(1)
        # The root has no slope at 0, where its derivative divides by zero; there the gradient is taken to be 0.
        radius = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
        ripple = torch.exp(torch.cos(self.c * x).flatten(1).mean(1))
        return self.a + math.e - self.a * torch.exp(-self.b * radius) - ripple

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        raise self._unknown("statistics: exp(-E) has no integral")

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        raise self._unknown("exact samples: exp(-E) has no integral")


class RosenbrockModel(ToyEnergy):
    """A curved valley: the sum of (a - x_i)² + b (x_{i+1} - x_i²)²; the lowest is 0 at (a, a²) in two dimensions.

    In two dimensions x_0 is normal around a with variance T/2, and x_1 given it is normal around x_0² with variance T/(2b). For longer
    vectors there is no closed form.
    """

    def __init__(self, a: float = 1.0, b: float = 100.0) -> None:
        super().__init__()
        if not b > 0.0:
            raise ConfigError("no such valley", found=f"b={b}", needed="b positive")
        self.a, self.b = float(a), float(b)

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, dim), dim at least 2."""
        first, second = x[:, :-1], x[:, 1:]
        return ((self.a - first).square() + self.b * (second - first.square()).square()).sum(1)

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        if dim != 2:
            raise self._unknown(f"closed form in {dim} dimensions")
        s = 0.5 * temperature
        mean = torch.tensor([self.a, self.a**2 + s], dtype=torch.float64)
        both = 2 * self.a * s
        last = 4 * self.a**2 * s + 2 * s**2 + s / self.b
        cov = torch.tensor([[s, both], [both, last]], dtype=torch.float64)
        return Statistics(mean, cov, math.log(math.pi * temperature) - 0.5 * math.log(self.b))

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        if dim != 2:
            raise self._unknown(f"exact samples in {dim} dimensions")
        z = math.sqrt(0.5 * temperature) * torch.randn(n_samples, 2, dtype=torch.float64, generator=generator)
        first = self.a + z[:, 0]
        return torch.stack([first, first.square() + z[:, 1] / math.sqrt(self.b)], 1)


class MuellerBrownModel(ToyEnergy):
    """The Müller-Brown surface: three minima and two saddles in two dimensions, energies from -147 up.

    Müller and Brown, Theoretica Chimica Acta 53, 75 (1979). Statistics are integrated by quadrature; at a temperature of about 15
    chains pass between the minima.

    Attributes
    ----------
    minima
        (3, 2), from the lowest (-146.70) to the highest (-80.77).
    """

    dim = 2

    def __init__(self) -> None:
        super().__init__()
        self.minima: Tensor
        self.terms: Tensor
        self.register_buffer("minima", torch.tensor([[-0.558224, 1.441726], [0.623499, 0.028038], [-0.050011, 0.466694]]))
        rows = [
            [-200.0, -1.0, 0.0, -10.0, 1.0, 0.0],
            [-100.0, -1.0, 0.0, -10.0, 0.0, 0.5],
            [-170.0, -6.5, 11.0, -6.5, -0.5, 1.5],
            [15.0, 0.7, 0.6, 0.7, -1.0, 1.0],
        ]
        self.register_buffer("terms", torch.tensor(rows).T.unsqueeze(1).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Energies (batch,) of vectors (batch, 2)."""
        height, a, b, c, x0, y0 = self.terms.to(x.dtype)
        dx, dy = x[:, :1] - x0, x[:, 1:] - y0
        return (height * torch.exp(a * dx.square() + b * dx * dy + c * dy.square())).sum(1)

    def _statistics(self, dim: int, temperature: float) -> Statistics:
        side = torch.linspace(-2.25, 2.25, 901, dtype=torch.float64)
        grid = torch.cartesian_prod(side, side + 0.75)
        log_density = -self(grid.to(self.terms.device)).cpu() / temperature
        log_z = torch.logsumexp(log_density, 0)
        weight = (log_density - log_z).exp()
        mean = weight @ grid
        apart = grid - mean
        return Statistics(mean, (apart * weight.unsqueeze(1)).mT @ apart, float(log_z + 2 * (side[1] - side[0]).log()))

    def _draw(self, n_samples: int, dim: int, temperature: float, generator: torch.Generator | None) -> Tensor:
        raise self._unknown("exact samples")
