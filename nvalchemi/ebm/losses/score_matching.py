"""Score matching without noise: the squared score and its divergence at the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nvalchemi.data import Batch
from nvalchemi.ebm.losses.base import ScoreLoss, check_conditions
from nvalchemi.ebm.samples import total
from nvalchemi.ebm.scores import PROJECTIONS, differentiable_gradient, exact_divergence, random_direction, sliced_derivatives
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.gradient import attach
from nvalchemi.objective import Terms


class ScoreMatching(ScoreLoss):
    """Score matching.

    ::

        L = E [1/2 |s(x)|² + ∇·s(x)] = E [1/2 |∇E(x)|² - ΔE(x)],        s = -∇E

    Up to a constant half the mean squared distance to the score of the data: Hyvärinen, JMLR 6, 695 (2005).

    Parameters
    ----------
    model
        The energy of vectors (batch, ...), in units of kT; of a `nvalchemi.data.Batch` with ``"hutchinson"``.
    hessian_method
        ``"exact"``: one pass backward for each of the d coordinates. ``"hutchinson"``: one pass, an unbiased estimate of the trace by one
        random direction of signs.
    use_autograd, functional_model
        Change nothing: see `ScoreLoss`.
    """

    def __init__(
        self,
        model: EnergyModel,
        hessian_method: str = "exact",
        *,
        use_autograd: bool = True,
        functional_model: nn.Module | None = None,
    ) -> None:
        super().__init__(model, use_autograd=use_autograd, functional_model=functional_model)
        if hessian_method not in ("exact", "hutchinson"):
            raise ConfigError("unknown hessian_method", found=repr(hessian_method), needed="exact or hutchinson")
        self.hessian_method = hessian_method

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        check_conditions(conditions, x)
        at, energy, gradient = differentiable_gradient(model, x, **conditions)
        if self.hessian_method == "hutchinson":
            _, laplacian = sliced_derivatives(gradient, at, random_direction(x, "rademacher", generator), x)
        elif isinstance(x, Batch):
            raise ConfigError("an exact trace of structures of unequal sizes", fix='give hessian_method="hutchinson"')
        else:
            laplacian = exact_divergence(gradient, at)
        return Terms({"loss": attach(torch.add(-laplacian, total(gradient.square(), x), alpha=0.5), energy)})


class SlicedScoreMatching(ScoreLoss):
    """Sliced score matching.

    ::

        L = E [1/2 (v·s(x))² + v·(∂s/∂x)v],        s = -∇E,  v of mean 0 and covariance 1

    averaged over ``n_projections`` directions for each sample: Song, Garg, Shi and Ermon, UAI 2019.

    Parameters
    ----------
    model
        The energy, in units of kT, of vectors (batch, ...) or of a `nvalchemi.data.Batch`.
    n_projections
        Directions a sample: each costs one pass backward.
    projection_type
        ``"rademacher"`` (signs), ``"sphere"`` (of radius √d) or ``"gaussian"``.
    use_autograd, functional_model
        Change nothing: see `ScoreLoss`.
    """

    def __init__(
        self,
        model: EnergyModel,
        n_projections: int = 5,
        projection_type: str = "rademacher",
        *,
        use_autograd: bool = True,
        functional_model: nn.Module | None = None,
    ) -> None:
        super().__init__(model, use_autograd=use_autograd, functional_model=functional_model)
        if n_projections < 1 or projection_type not in PROJECTIONS:
            raise ConfigError(
                "no such projections",
                found=f"n_projections={n_projections}, projection_type={projection_type!r}",
                needed=f"at least 1; {', '.join(PROJECTIONS)}",
            )
        self.n_projections, self.projection_type = n_projections, projection_type

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        check_conditions(conditions, x)
        at, energy, gradient = differentiable_gradient(model, x, **conditions)
        terms = []
        for _ in range(self.n_projections):
            v = random_direction(x, self.projection_type, generator)
            along, divergence = sliced_derivatives(gradient, at, v, x)
            terms.append(torch.add(-divergence, along.square(), alpha=0.5))
        return Terms({"loss": attach(torch.stack(terms).mean(0), energy)})
