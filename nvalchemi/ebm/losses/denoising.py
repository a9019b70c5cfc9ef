"""Denoising score matching: the score at noisy data points back to the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nvalchemi.data import Batch
from nvalchemi.ebm.losses.base import ScoreLoss, check_conditions
from nvalchemi.ebm.samples import centred, moved, normal_like, positions, spread, total
from nvalchemi.ebm.scores import energy_gradient
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.potential import InteratomicPotential
from nvalchemi.objective import Terms


class DenoisingScoreMatching(ScoreLoss):
    """Denoising score matching.

    With one noise scale σ::

        L = 1/2 E |s(x + σ z) + z / σ|²,        s = -∇E,  z standard normal

    whose minimum is the score of the data with noise of scale σ: Vincent, Neural Comput. 23, 1661 (2011). With several scales each sample
    takes one of them by chance, and its term is multiplied by σ², so that no scale outweighs the others::

        L = 1/2 E |σ s(x + σ z) + z|²

    as Song and Ermon, NeurIPS 2019. Of structures near their equilibrium this teaches forces without labels: Zaidi et al., ICLR 2023,
    arXiv:2206.00133. The squares are summed over the coordinates of a sample (all atoms of a structure) and averaged over
    samples.

    The energy of a `nvalchemi.models.InteratomicPotential` does not change with a translation, so its score cannot answer noise that
    moves a structure as a whole, periodic or not. z is then drawn without it: its mean over the atoms of each structure is taken off
    (the normal distribution of coordinates with a fixed centre: Köhler, Klein and Noé, ICML 2020). Gradients are the same for the same
    noise; the loss is lower by 3/(2 σ²), which could not be learned. Any other energy gets the whole noise.

    Parameters
    ----------
    model
        The energy, in units of kT. Of vectors (batch, ...), or of a `nvalchemi.data.Batch`, whose positions are what gets the noise.
    noise_scale
        σ in the unit of the data, or several.
    conditional
        Tell the model the scale, (batch,): it is called as ``model(x, sigma=...)``.
    use_autograd, functional_model
        Change nothing: see `ScoreLoss`.
    """

    def __init__(
        self,
        model: EnergyModel,
        noise_scale: float | Sequence[float] = 0.01,
        conditional: bool = False,
        *,
        use_autograd: bool = True,
        functional_model: nn.Module | None = None,
    ) -> None:
        super().__init__(model, use_autograd=use_autograd, functional_model=functional_model)
        given: Any = noise_scale
        try:
            self.noise_scale = tuple(float(s) for s in given) if isinstance(given, Iterable) else float(given)
        except (TypeError, ValueError):
            self.noise_scale = ()
        scales = (self.noise_scale,) if isinstance(self.noise_scale, float) else self.noise_scale
        if not scales or not all(0 < s < float("inf") for s in scales):
            raise ConfigError("no such noise", found=f"noise_scale={noise_scale}", needed="a positive number, or several")
        self.conditional = conditional

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        check_conditions(conditions, x)
        at, graph = positions(x).detach(), torch.is_grad_enabled()
        noise, count = normal_like(at, generator), len(x)
        if isinstance(x, Batch) and isinstance(self.model, InteratomicPotential):
            noise = centred(noise, x)
        # s + z/σ = -(∇E - z/σ): the sign falls away in the square
        if isinstance(self.noise_scale, float):
            sigma = self.noise_scale
            told = {"sigma": at.new_full((count,), sigma)} if self.conditional else {}
            noisy = moved(x, torch.add(at, noise, alpha=sigma))
            gradient = energy_gradient(model, noisy, create_graph=graph, **conditions, **told)
            difference = torch.add(gradient, noise, alpha=-1 / sigma)
        else:
            which = torch.randint(len(self.noise_scale), (count,), generator=generator, device=at.device)
            scales = at.new_tensor(self.noise_scale)[which]
            told, scale = {"sigma": scales} if self.conditional else {}, spread(scales, x)
            noisy = moved(x, torch.addcmul(at, scale, noise))
            gradient = energy_gradient(model, noisy, create_graph=graph, **conditions, **told)
            difference = torch.addcmul(-noise, scale, gradient)
        return Terms({"loss": 0.5 * total(difference.square(), x)})
