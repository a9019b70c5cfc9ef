"""The score of an energy, -∇E, and the divergence of a gradient field: exactly, or by random directions.

The gradient ∇E keeps its graph, and with it every parameter of the energy, its output bias included (see
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
from nvalchemi.models.gradient import differentiable, directional_derivative, input_gradient, leaf

PROJECTIONS = ("rademacher", "sphere", "gaussian")
"""Laws of random directions with mean 0 and covariance 1: signs, a sphere of radius √d, the normal distribution."""


def energy_gradient(model: EnergyModel, x: Any, *, create_graph: bool = False, **conditions: Any) -> Tensor:
    """Give ∇E(x), of the shape of the positions; ``conditions`` are handed to the energy by name."""
    if not conditions:
        return model.gradient(x, create_graph=create_graph)
    return differentiable_gradient(model, x, create_graph=create_graph, **conditions)[1]


def score(model: EnergyModel, x: Any, *, create_graph: bool = False, **conditions: Any) -> Tensor:
    """Give the score -∇E(x), of the shape of the positions; of a batch of structures it is the forces."""
    return -energy_gradient(model, x, create_graph=create_graph, **conditions)


def differentiable_gradient(model: EnergyModel, x: Any, *, create_graph: bool = True, **conditions: Any) -> tuple[Tensor, Tensor]:
    """Give the positions as a leaf, and ∇E there, which can be differentiated with respect to them."""
    with differentiable():
        at = leaf(positions(x))
        there = x.replace(positions=at) if isinstance(x, Batch) else at
        if not conditions:
            return at, model.gradient(there, create_graph=create_graph)
        return at, input_gradient(model(there, **conditions), at, create_graph=create_graph)


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
        columns = field.reshape(len(field), -1).unbind(1)
        terms = [
            directional_derivative(column, at, torch.ones_like(column)).reshape(len(at), -1)[:, i]
            for i, column in enumerate(columns)
        ]
        return torch.stack(terms).sum(0)


def sliced_divergence(field: Tensor, at: Tensor, direction: Tensor, x: Any) -> Tensor:
    """Give v·(∂F/∂x)v at each sample, (batch,), by one pass backward.

    Its mean over directions of covariance 1 is the divergence: Hutchinson, Commun. Stat. Simul. Comput. 19, 433 (1990).

    Parameters
    ----------
    field, at, direction
        F, the points and v: of the positions' shape.
    x
        The samples, which say what belongs together.
    """
    with differentiable():
        return total(directional_derivative(field, at, direction) * direction, x)


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
