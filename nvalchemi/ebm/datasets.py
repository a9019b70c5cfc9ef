"""The usual sets of points in the plane: independent draws of distributions that are known exactly.

Every function takes the number of points, then a generator, and gives (n, 2). Points of different calls with one generator are
independent draws of the same distribution: nothing is shuffled, scaled or balanced by what was drawn. A set for a loader or a store is
made by `write_points` and read by `nvalchemi.data.datapipes.ArrayZarrReader`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data.datapipes import ArrayZarrWriter
from nvalchemi.errors import ConfigError

Generator = torch.Generator | None


class _Draws:
    """Random numbers of one call, all of one dtype and of the generator's device."""

    def __init__(self, n: int, generator: Generator, dtype: torch.dtype) -> None:
        if n < 0:
            raise ConfigError("a set of points has a number of points", found=n)
        self.n, self.generator, self.dtype = n, generator, dtype
        self.device = torch.device("cpu") if generator is None else generator.device

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.n, *shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.n, *shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def choice(self, of: int) -> Tensor:
        return torch.randint(of, (self.n,), generator=self.generator, device=self.device)


def _on_circle(angle: Tensor, radius: Tensor | float = 1.0) -> Tensor:
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


def gaussian_mixture(
    n: int,
    generator: Generator = None,
    *,
    n_components: int = 8,
    radius: float = 1.0,
    noise: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gaussians of standard deviation ``noise``, equally likely, on a circle: centre k at the angle 2πk / ``n_components``."""
    draws = _Draws(n, generator, dtype)
    angle = draws.choice(n_components).to(dtype) * (2 * math.pi / n_components)
    return _on_circle(angle, radius) + noise * draws.normal(2)


def eight_gaussians(
    n: int, generator: Generator = None, *, scale: float = 2.0, noise: float = 0.02, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Eight Gaussians on a circle of radius ``scale``, the first at (``scale``, 0); see `gaussian_mixture`."""
    return gaussian_mixture(n, generator, n_components=8, radius=scale, noise=noise, dtype=dtype)


def two_moons(n: int, generator: Generator = None, *, noise: float = 0.05, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two half circles of radius 1, open to each other: around (0, 0) above, and around (1, 1/2) below; equally likely."""
    draws = _Draws(n, generator, dtype)
    upper = _on_circle(math.pi * draws.uniform())
    lower = torch.tensor([1.0, 0.5], dtype=dtype, device=draws.device) - upper
    return torch.where(draws.choice(2)[:, None] == 0, upper, lower) + noise * draws.normal(2)


def swiss_roll(
    n: int, generator: Generator = None, *, arclength: float = 1.5, noise: float = 0.02, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A spiral: radius and angle t, uniform from ``arclength`` π to 3 ``arclength`` π, over the root mean square of a coordinate."""
    draws = _Draws(n, generator, dtype)
    first, last = arclength * math.pi, 3 * arclength * math.pi
    t = first + (last - first) * draws.uniform()
    size = math.sqrt((first * first + first * last + last * last) / 6)
    return _on_circle(t, t / size) + noise * draws.normal(2)


def circle(
    n: int, generator: Generator = None, *, radius: float = 1.0, noise: float = 0.05, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A circle around the origin, uniform in angle."""
    draws = _Draws(n, generator, dtype)
    return _on_circle(2 * math.pi * draws.uniform(), radius) + noise * draws.normal(2)


def checkerboard(
    n: int, generator: Generator = None, *, range_limit: int = 4, noise: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The fields of side 1 in [-``range_limit``, ``range_limit``]² whose column and row add up to an odd number, uniformly."""
    draws = _Draws(n, generator, dtype)
    column = draws.choice(2 * range_limit)
    row = 2 * draws.choice(range_limit)
    row += (column + 1) % 2
    corner = torch.stack([column, row], 1).to(dtype) - range_limit
    return corner + draws.uniform(2) + noise * draws.normal(2)


def pinwheel(
    n: int,
    generator: Generator = None,
    *,
    n_classes: int = 5,
    radial_scale: float = 2.0,
    angular_scale: float = 0.1,
    spiral_scale: float = 5.0,
    noise: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Curved blades: at distance s ``radial_scale`` a blade has turned by s ``spiral_scale``; s² is uniform from 0 to 1.

    ``angular_scale`` is the standard deviation of the angle within a blade.
    """
    draws = _Draws(n, generator, dtype)
    s = draws.uniform().sqrt()
    angle = draws.choice(n_classes).to(dtype) * (2 * math.pi / n_classes) + spiral_scale * s + angular_scale * draws.normal()
    return _on_circle(angle, radial_scale * s) + noise * draws.normal(2)


def grid(
    n: int,
    generator: Generator = None,
    *,
    n_per_dim: int = 10,
    range_limit: float = 1.0,
    noise: float = 0.01,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The points of a square grid in [-``range_limit``, ``range_limit``]², ``n_per_dim`` a side, equally likely."""
    draws = _Draws(n, generator, dtype)
    side = torch.linspace(-range_limit, range_limit, n_per_dim, dtype=dtype, device=draws.device)
    return torch.stack([side[draws.choice(n_per_dim)], side[draws.choice(n_per_dim)]], 1) + noise * draws.normal(2)


DATASETS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (gaussian_mixture, eight_gaussians, two_moons, swiss_roll, circle, checkerboard, pinwheel, grid)
}
"""The sets by name."""


def write_points(store: Any, name: str, n: int, seed: int = 0, **settings: Any) -> int:
    """Draw a set and write it to a zarr store of dense arrays.

    Parameters
    ----------
    store
        Path of the new store's folder, or a zarr store object.
    name
        One of `DATASETS`.
    n, seed
        How many points, and the seed from which they are drawn.
    **settings
        Of the set's function. Name, seed and settings are kept in the store's metadata.

    Returns
    -------
    int
        Points written.

    Raises
    ------
    ConfigError
        For an unknown name.
    DataError
        Where there is a store already.
    """
    if name not in DATASETS:
        raise ConfigError("no such set of points", found=name, needed=f"one of {', '.join(DATASETS)}")
    points = DATASETS[name](n, torch.Generator().manual_seed(seed), **settings)
    written = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in settings.items()}
    return ArrayZarrWriter(store, metadata={"name": name, "seed": seed, "settings": written}).write(points)
