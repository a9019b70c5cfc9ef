"""Equilibrium matching: a gradient field, the same at all times, that vanishes at the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.ebm.couplings import Coupling
from nvalchemi.ebm.fields import ENERGY_TYPES, energy_terms, output_of
from nvalchemi.ebm.interpolants import Interpolant
from nvalchemi.ebm.losses.base import vectors
from nvalchemi.ebm.losses.paths import Paths, Point, mean_square
from nvalchemi.ebm.losses.times import Times, TimeWeight
from nvalchemi.ebm.scores import energy_gradient
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.gradient import all_plain, attach, differentiable, input_gradient, leaf, plain
from nvalchemi.objective import ModelLoss, Terms

Decay = Callable[[Tensor], Tensor]
DECAYS = ("truncated", "linear", "constant")


class EquilibriumMatching(ModelLoss):
    """Equilibrium matching.

    ::

        L = E w(t) |g(x_t) + c(t) u_t|² / d,        x_t = α x_1 + σ x_0,  u_t = dx_t/dt

    with x_0 noise, x_1 data, t uniform and w = 1 if nothing else is said, and the mean taken over the d coordinates: Wang and Du, Equilibrium
    matching, 2025 (where the target of the linear path is written (ε - x) c(γ)). g points from the data to the noise, as the gradient of
    an energy does. c is λ times

    - ``"truncated"``: min(1, (1 - t) / (1 - a)), the paper's choice; ``"linear"``: 1 - t; ``"constant"``: 1;
    - or a function of t.

    Parameters
    ----------
    model
        An energy, whose gradient is g; or a field, called ``model(x, t, **conditions)``, which may give ``(output, activations)``.
    prediction
        What the output is: ``"velocity"``, g itself; of a field also ``"noise"``, then L = E |f - x_0|² / d, or ``"score"``, then
        L = E |σ f + x_0|² / d.
    energy_type
        Of a field f: ``"none"``, g = f; ``"dot"`` or ``"mean"``, g = ∇(x·f); ``"l2"``, g = -∇|f|²/2. `nvalchemi.ebm.fields.EqMEnergy`
        then is the energy.
    interpolant, coupling
        As in `FlowMatching`.
    loss_weight
        Of a noise or a score: ``"velocity"`` times (λ/σ)² or ``"likelihood"`` times λ/σ², with λ = σ² α'/α - σ σ' that of the velocity
        v = α'/α x + λ s. Where α is 0 at t = 0 both grow without bound towards it: keep away by ``train_eps``. Ma et al., arXiv:2401.08740;
        Song et al., NeurIPS 2021.
    t_sampler, t_p_mean, t_p_std, train_eps, loss_weight_fn
        The law of the times and their weights w(t): see `nvalchemi.ebm.losses.times.Times`.
    ct, ct_threshold, ct_multiplier
        c, a and λ.
    apply_dispersion, dispersion_weight
        Add dispersion_weight · log E_ij exp(-|z_i - z_j|² / d) of the activations z that the field gives, over the pairs of the batch
        (of the last of them where there are several): Wang and He, Diffuse and disperse, 2025.
    time_invariant
        Tell a field t = 0 always, as ``FlowSampler(field, negate_velocity=True)`` does; with False, give that the same.

    Notes
    -----
    Dispersion is a property of the batch that a rank sees.
    """

    def __init__(
        self,
        model: nn.Module,
        prediction: str = "velocity",
        energy_type: str = "none",
        interpolant: str | Interpolant = "linear",
        coupling: str | Coupling = "independent",
        loss_weight: str | None = None,
        train_eps: float = 0.0,
        t_sampler: str | Callable[..., Tensor] = "uniform",
        t_p_mean: float = -1.2,
        t_p_std: float = 1.2,
        loss_weight_fn: TimeWeight | None = None,
        ct: str | Decay = "truncated",
        ct_threshold: float = 0.8,
        ct_multiplier: float = 4.0,
        apply_dispersion: bool = False,
        dispersion_weight: float = 0.5,
        time_invariant: bool = True,
    ) -> None:
        super().__init__(model)
        if prediction not in ("velocity", "score", "noise") or energy_type not in ("none", *ENERGY_TYPES):
            raise ConfigError(
                "equilibrium matching does not know that",
                found=f"prediction={prediction!r}, energy_type={energy_type!r}",
                needed=f"velocity, score or noise; none, {', '.join(ENERGY_TYPES)}",
            )
        scalar = isinstance(model, EnergyModel)
        if (prediction != "velocity" and (scalar or energy_type != "none")) or (
            scalar and (energy_type != "none" or apply_dispersion)
        ):
            raise ConfigError(
                "a prediction, an energy_type and activations are a field's",
                found=f"{type(model).__name__}, prediction={prediction!r}, energy_type={energy_type!r}",
                needed="prediction='velocity' where there is an energy; energy_type='none' and no dispersion for an EnergyModel",
            )
        if (isinstance(ct, str) and ct not in DECAYS) or not 0 < ct_threshold < 1 or not ct_multiplier > 0:
            raise ConfigError(
                "no such decay of the target",
                found=f"ct={ct!r}, ct_threshold={ct_threshold}, ct_multiplier={ct_multiplier}",
                needed=f"{', '.join(DECAYS)} or a function of t; a threshold between 0 and 1; a positive multiplier",
            )
        if loss_weight not in (None, "velocity", "likelihood") or (loss_weight and prediction == "velocity"):
            raise ConfigError(
                "no such weight of the times",
                found=f"loss_weight={loss_weight!r} with prediction={prediction!r}",
                needed="velocity or likelihood, where the prediction is noise or score",
                fix="loss_weight_fn takes any function of the time",
            )
        self.paths = Paths(interpolant, coupling, Times(t_sampler, t_p_mean, t_p_std, train_eps, loss_weight_fn))
        self.prediction, self.energy_type, self.loss_weight = prediction, energy_type, loss_weight
        self.ct, self.ct_threshold, self.ct_multiplier = ct, ct_threshold, ct_multiplier
        self.apply_dispersion, self.dispersion_weight = apply_dispersion, dispersion_weight
        self.time_invariant = time_invariant
        self.parts = ("loss", "dispersion") if apply_dispersion else ("loss",)

    def decay(self, t: Tensor) -> Tensor:
        """c(t), of the shape of ``t``."""
        if not isinstance(self.ct, str):
            return self.ct_multiplier * self.ct(t)
        if self.ct == "constant":
            return torch.full_like(t, self.ct_multiplier)
        if self.ct == "linear":
            return self.ct_multiplier * (1 - t)
        return ((1 - t) * (self.ct_multiplier / (1 - self.ct_threshold))).clamp(max=self.ct_multiplier)

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        vectors(x, self)
        point = self.paths.draw(x, generator, conditions, together=self.model.training)
        output, activations = self._output(model, point)
        column = (-1, *[1] * (x.ndim - 1))
        if self.prediction == "velocity":
            difference = torch.addcmul(output, self.decay(point.t).reshape(column), point.velocity)
        elif self.prediction == "noise":
            difference = output - point.noise
        else:
            difference = self.paths.interpolant.at(point.t, x)[2] * output + point.noise
        values = {"loss": mean_square(difference, self._weights(point))}
        if self.apply_dispersion:
            values["dispersion"] = (self.dispersion_weight * dispersion(_last(activations))).expand(len(x))
        return Terms(values)

    def _weights(self, point: Point) -> Tensor | None:
        """The weights of the samples, (batch,); None where all are 1."""
        if self.loss_weight is None:
            return point.weights
        alpha, d_alpha, sigma, d_sigma = self.paths.interpolant.coefficients(point.t)
        over_sigma = sigma * d_alpha / alpha - d_sigma
        own = over_sigma.square() if self.loss_weight == "velocity" else over_sigma / sigma
        return own if point.weights is None else own * point.weights

    def _output(self, model: Any, point: Point) -> tuple[Tensor, Any]:
        """The field or the gradient at the points, and the field's activations where it gives them."""
        if isinstance(self.model, EnergyModel):
            return energy_gradient(model, point.x, create_graph=torch.is_grad_enabled(), **point.conditions), None
        t = torch.zeros_like(point.t) if self.time_invariant else point.t
        if self.energy_type == "none":
            output = model(point.x, t, **point.conditions)
            return output_of(output, point.x), output[1] if isinstance(output, tuple) else None
        with differentiable():
            at = leaf(point.x)
            output = model(at, plain(t), **all_plain(point.conditions))
            field, activations = output if isinstance(output, tuple) else (output, None)
            energy = energy_terms(field, at, self.energy_type).sum()
            return attach(input_gradient(energy, at, create_graph=True, anchored=False), energy), activations


def dispersion(z: Tensor) -> Tensor:
    """Log of the mean over all pairs i, j of exp(-|z_i - z_j|² / d), a scalar, of activations (batch, ...)."""
    z = z.flatten(1)
    squares = torch.nn.functional.pdist(z).square() / z.shape[1]
    # each pair counts twice, and each sample with itself has distance 0
    pairs = torch.cat([squares, squares, squares.new_zeros(len(z))])
    return torch.logsumexp(-pairs, 0) - torch.log(pairs.new_tensor(float(len(pairs))))


def _last(activations: Any) -> Tensor:
    found = activations[-1] if isinstance(activations, (list, tuple)) and activations else activations
    if not isinstance(found, Tensor):
        raise ConfigError(
            "dispersion is of activations, and the field gives none",
            found=type(found).__name__,
            fix="return (output, activations) from the field, or leave apply_dispersion out",
        )
    return found
