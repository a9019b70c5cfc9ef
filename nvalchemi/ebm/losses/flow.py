"""Flow matching: the velocity of a path from noise to data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.ebm.couplings import Coupling
from nvalchemi.ebm.fields import output_of
from nvalchemi.ebm.interpolants import Interpolant
from nvalchemi.ebm.losses.base import vectors
from nvalchemi.ebm.losses.paths import Paths, mean_square
from nvalchemi.ebm.losses.times import Times, TimeWeight
from nvalchemi.ebm.scores import energy_gradient
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import ModelLoss, Terms


class FlowMatching(ModelLoss):
    """Conditional flow matching.

    ::

        L = E w(t) |v(x_t, t) - u_t|² / d,        x_t = α x_1 + σ x_0,  u_t = dx_t/dt

    with x_0 noise, x_1 data, t uniform and w = 1 if nothing else is said, and the mean taken over the d coordinates: Lipman et al., ICLR
    2023; with a coupling of noise and data, Tong et al., TMLR 2024. ``FlowSampler`` integrates v from t = 0 to 1.

    Parameters
    ----------
    model
        The velocity, called ``model(x, t, **conditions)``, alone or in a tuple with activations; or an energy, whose velocity is -∇E(x) at
        all times.
    interpolant
        ``"linear"``, ``"cosine"``, ``"vp"`` or an instance.
    coupling
        How noise and data are paired: a name or an instance; labels stay with their data.
    t_sampler, t_p_mean, t_p_std, train_eps, loss_weight_fn
        The law of the times and their weights w(t): see `nvalchemi.ebm.losses.times.Times`.
    negate_velocity
        Learn -u_t, from data to noise: the sign of an energy's gradient. Then sample with
        ``FlowSampler(model, negate_velocity=True, time_invariant=False)``.
    """

    def __init__(
        self,
        model: nn.Module,
        interpolant: str | Interpolant = "linear",
        coupling: str | Coupling = "independent",
        train_eps: float = 0.0,
        t_sampler: str | Callable[..., Tensor] = "uniform",
        t_p_mean: float = -1.2,
        t_p_std: float = 1.2,
        loss_weight_fn: TimeWeight | None = None,
        negate_velocity: bool = False,
    ) -> None:
        super().__init__(model)
        self.paths = Paths(interpolant, coupling, Times(t_sampler, t_p_mean, t_p_std, train_eps, loss_weight_fn))
        self.negate_velocity = negate_velocity

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        vectors(x, self)
        point = self.paths.draw(x, generator, conditions, together=self.model.training)
        if isinstance(self.model, EnergyModel):
            velocity = -energy_gradient(model, point.x.detach(), create_graph=torch.is_grad_enabled(), **point.conditions)
        else:
            velocity = output_of(model(point.x, point.t, **point.conditions), point.x)
        target = -point.velocity if self.negate_velocity else point.velocity
        return Terms({"loss": mean_square(velocity - target, point.weights)})
