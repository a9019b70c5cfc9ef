"""The score of an energy, -∇E, and the divergence of a gradient field: exactly, or by random directions.

The gradient ∇E keeps its graph, whose backward pass visits every parameter of the energy, its output bias included (see
`nvalchemi.models.gradient`), so a loss of scores trains on several ranks as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.ebm.samples import normal_like, positions, signs_like, spread, total
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.gradient import anchor, attach, differentiable, leaf, plain, second_gradient

PROJECTIONS = ("rademacher", "sphere", "gaussian")
"""Laws of random directions with mean 0 and covariance 1: signs, a sphere of radius √d, the normal distribution."""


def energy_gradient(model: EnergyModel, x: Any, *, create_graph: bool = False, **conditions: Any) -> Tensor:
    """Give ∇E(x), of the shape of the positions; ``conditions`` are handed to the energy by name.

    With its graph it can be differentiated once, with respect to the parameters, of which those that it does not depend on are visited.
    """
    if not conditions and isinstance(x, Batch) and "forces" in model.outputs and (model.training or not create_graph):
        with torch.set_grad_enabled(create_graph):  # a network may have a faster way to forces than differentiation
            found = model.predict(x, ("energy", "forces"))
        gradient = -found["forces"].to(x.positions.dtype)
        return anchor(gradient, found["energy"].sum()) if create_graph else gradient
    if not create_graph:
        return model.energy_and_gradient(x, **conditions)[1]
    energy, gradient = model.energy_and_gradient(x, True, anchored=False, **conditions)
    return attach(gradient, energy) if energy.requires_grad else gradient


def score(model: EnergyModel, x: Any, *, create_graph: bool = False, **conditions: Any) -> Tensor:
    """Give the score -∇E(x), of the shape of the positions; of a batch of structures it is the forces."""
    return -energy_gradient(model, x, create_graph=create_graph, **conditions)


def differentiable_gradient(model: EnergyModel, x: Any, **conditions: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Give the positions as a leaf, and E and ∇E there, which can be differentiated with respect to them.

    The gradient is not anchored: a loss that is made of it says ``attach(loss, energy)`` (`nvalchemi.models.gradient`).
    """
    with differentiable():
        at = leaf(positions(x))
        there = x.replace(positions=at) if isinstance(x, Batch) else at
        return at, *model.energy_and_gradient(there, True, anchored=False, **conditions)


def exact_divergence(field: Tensor, at: Tensor) -> Tensor:
    """Give the divergence of a field at each sample, (batch,): one pass backward for each of the d coordinates.

    Parameters
    ----------
    field
        (batch, ...), computed from ``at`` row by row.
    at
        The same shape.
    """
    if field.shape != at.shape:
        raise ConfigError("a field and its points differ in shape", found=tuple(field.shape), needed=tuple(at.shape))
    with differentiable():
        result = field.new_zeros(len(field))
        for i, column in enumerate(field.reshape(len(field), -1).unbind(1)):
            result = result + second_gradient(column, at).reshape(len(at), -1)[:, i]
        return result


def sliced_derivatives(field: Tensor, at: Tensor, direction: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """Give v·F and v·(∂F/∂x)v at each sample, (batch,), by one pass backward.

    The mean of the latter over directions of covariance 1 is the divergence: Hutchinson, Commun. Stat. Simul. Comput. 19, 433 (1990).

    Parameters
    ----------
    field, at, direction
        F, the points and v: of the positions' shape.
    x
        The samples, which say what belongs together.
    """
    with differentiable():
        direction = plain(direction)
        along = total(field * direction, x)
        return along, total(second_gradient(along, at) * direction, x)


def random_direction(x: Any, kind: str, generator: torch.Generator | None) -> Tensor:
    """Draw one direction of covariance 1 a sample, of the positions' shape.

    Parameters
    ----------
    x
        The samples.
    kind
        One of `PROJECTIONS`.
    generator
        Where the numbers come from.
    """
    at = positions(x)
    if kind == "rademacher":
        return signs_like(at, generator)
    v = normal_like(at, generator)
    if kind == "gaussian":
        return v
    if kind != "sphere":
        raise ConfigError("unknown law of directions", found=repr(kind), needed=", ".join(PROJECTIONS))
    scale = torch.sqrt(total(torch.ones_like(v), x) / total(v * v, x))
    return v * spread(scale, x)
