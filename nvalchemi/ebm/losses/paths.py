"""What the losses along paths from noise to data share: the draw of a point on each path, and means over coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi.ebm.couplings import (
    Coupling,
    ExactOTCoupling,
    GreedyCoupling,
    IndependentCoupling,
    SinkhornCoupling,
    UnbalancedSinkhornCoupling,
)
from nvalchemi.ebm.interpolants import Interpolant, column, get_interpolant
from nvalchemi.ebm.losses.times import Times
from nvalchemi.ebm.samples import normal_like
from nvalchemi.errors import ConfigError

COUPLINGS: dict[str, type[Coupling]] = {
    "independent": IndependentCoupling,
    "ot": ExactOTCoupling,
    "exact_ot": ExactOTCoupling,
    "greedy": GreedyCoupling,
    "sinkhorn": SinkhornCoupling,
    "unbalanced_sinkhorn": UnbalancedSinkhornCoupling,
}


def get_coupling(coupling: str | Coupling) -> Coupling:
    """The coupling of a name, with its usual settings; an instance stays itself."""
    if isinstance(coupling, Coupling):
        return coupling
    if coupling not in COUPLINGS:
        raise ConfigError("unknown coupling", found=repr(coupling), needed=f"{', '.join(COUPLINGS)} or a Coupling")
    return COUPLINGS[coupling]()


class Point(NamedTuple):
    """A point on the path of each sample: x_t and u_t at time t from ``noise`` to ``data``; conditions belong to the data.

    ``weights`` are those of the pairs, of mean 1, times those of the times; None where all are 1.
    """

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
        A name (``"independent"``, ``"ot"`` or ``"exact_ot"``, ``"greedy"``, ``"sinkhorn"``, ``"unbalanced_sinkhorn"``) or an instance.
    times
        The law of the times; uniform if not given.
    """

    def __init__(self, interpolant: str | Interpolant, coupling: str | Coupling, times: Times | None = None) -> None:
        self.interpolant, self.coupling = get_interpolant(interpolant), get_coupling(coupling)
        self.times = Times() if times is None else times

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
        t = self.times.draw(data, generator)
        x, velocity = self.interpolant.interpolate(x0, data, t)
        return Point(x0, data, t, x, velocity, self.times.weights(t, weights), own)


def mean_square(difference: Tensor, weights: Tensor | None = None) -> Tensor:
    """The squares, whose mean over the coordinates is what counts, times the weights of the samples, (batch,)."""
    squares = difference.square()
    return squares if weights is None else squares * column(weights, squares)
