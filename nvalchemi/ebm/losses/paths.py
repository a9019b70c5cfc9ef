"""What the losses along paths from noise to data share: the draw of a point on each path, and means over coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi.ebm.couplings import Coupling, ExactOTCoupling, GreedyCoupling, IndependentCoupling, SinkhornCoupling
from nvalchemi.ebm.interpolants import Interpolant, column, get_interpolant
from nvalchemi.ebm.samples import normal_like
from nvalchemi.errors import ConfigError

COUPLINGS: dict[str, type[Coupling]] = {
    "independent": IndependentCoupling,
    "ot": ExactOTCoupling,
    "greedy": GreedyCoupling,
    "sinkhorn": SinkhornCoupling,
}


def get_coupling(coupling: str | Coupling) -> Coupling:
    """The coupling of a name, with its usual settings; an instance stays itself."""
    if isinstance(coupling, Coupling):
        return coupling
    if coupling not in COUPLINGS:
        raise ConfigError("unknown coupling", found=repr(coupling), needed=f"{', '.join(COUPLINGS)} or a Coupling")
    return COUPLINGS[coupling]()


class Point(NamedTuple):
    """A point on the path of each sample: x_t and u_t at time t from ``noise`` to ``data``; conditions belong to the data."""

    noise: Tensor
    data: Tensor
    t: Tensor
    x: Tensor
    velocity: Tensor
    weights: Tensor | None
    conditions: dict[str, Any]


class Paths:
    """Draws noise, its pairing with the data, times, and the points there.

    Parameters
    ----------
    interpolant
        A name (``"linear"``, ``"cosine"``, ``"vp"``) or an instance.
    coupling
        A name (``"independent"``, ``"ot"``, ``"greedy"``, ``"sinkhorn"``) or an instance.
    train_eps
        Times are uniform in [train_eps, 1 - train_eps].
    """

    def __init__(self, interpolant: str | Interpolant, coupling: str | Coupling, train_eps: float = 0.0) -> None:
        if not 0 <= train_eps < 0.5:
            raise ConfigError("no times are left", found=f"train_eps={train_eps}", needed="at least 0 and less than 0.5")
        self.interpolant, self.coupling, self.train_eps = get_interpolant(interpolant), get_coupling(coupling), train_eps

    def draw(
        self, x1: Tensor, generator: torch.Generator | None, conditions: Mapping[str, Any], *, together: bool = True
    ) -> Point:
        """One point a sample of the data ``x1``, (batch, ...).

        A condition named ``x0`` is where the paths begin, in place of standard normal noise. Unless ``together``, a coupling of the
        rows of several ranks pairs those of this one.
        """
        own = {name: value for name, value in conditions.items() if name != "x0"}
        start = conditions["x0"] if "x0" in conditions else normal_like(x1, generator)
        if type(self.coupling) is IndependentCoupling and not own:
            x0, data, weights = (
                start,
                x1.detach(),
                None,
            )  # what it would give; the call is a few percent of a small network's step
        else:
            coupling = self.coupling if together else self.coupling.on_this_rank()
            pairs = coupling(start, x1, generator=generator, conditions=own or None)
            (x0, data), weights, own = pairs, pairs.weights, pairs.conditions or {}
        t = torch.empty(len(data), dtype=data.dtype, device=data.device)
        t.uniform_(self.train_eps, 1 - self.train_eps, generator=generator)
        x, velocity = self.interpolant.interpolate(x0, data, t)
        return Point(x0, data, t, x, velocity, weights, own)


def mean_square(difference: Tensor, weights: Tensor | None = None) -> Tensor:
    """The squares, whose mean over the coordinates is what counts, times the weights of the pairs, (batch,) and of mean 1."""
    squares = difference.square()
    return squares if weights is None else squares * column(weights, squares)
