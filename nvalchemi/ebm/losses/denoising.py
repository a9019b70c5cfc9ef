"""Denoising score matching: the score at noisy data points back to the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi.ebm.losses.base import ScalarEnergyLoss
from nvalchemi.ebm.samples import moved, normal_like, positions, spread, total
from nvalchemi.ebm.scores import energy_gradient
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import Terms


class DenoisingScoreMatching(ScalarEnergyLoss):
    """Denoising score matching.

    With one noise scale σ::

        L = 1/2 E |s(x + σ z) + z / σ|²,        s = -∇E,  z standard normal

    whose minimum is the score of the data with noise of scale σ: Vincent, Neural Comput. 23, 1661 (2011). With several scales each sample
    takes one of them by chance, and its term is multiplied by σ², so that no scale outweighs the others::

        L = 1/2 E |σ s(x + σ z) + z|²

    as Song and Ermon, NeurIPS 2019. The squares are summed over the coordinates of a sample (all atoms of a structure) and averaged over
    samples.

    Parameters
    ----------
    model
        The energy, in units of kT. Of vectors (batch, ...), or of a `nvalchemi.data.Batch`, whose positions are what gets the noise.
    noise_scale
        σ in the unit of the data, or several.
    conditional
        Tell the model the scale, (batch,): it is called as ``model(x, sigma=...)``.
    """

    def __init__(self, model: EnergyModel, noise_scale: float | Sequence[float] = 0.01, conditional: bool = False) -> None:
        super().__init__(model)
        self.noise_scale = float(noise_scale) if isinstance(noise_scale, (int, float)) else tuple(float(s) for s in noise_scale)
        scales = (self.noise_scale,) if isinstance(self.noise_scale, float) else self.noise_scale
        if not scales or not all(0 < s < float("inf") for s in scales):
            raise ConfigError("no such noise", found=f"noise_scale={noise_scale}", needed="positive numbers")
        self.conditional = conditional

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        at, several = positions(x), not isinstance(self.noise_scale, float)
        sigma = self._scales(at, len(x), generator)
        noise = normal_like(at, generator)
        scale = spread(sigma, x) if isinstance(sigma, Tensor) else sigma
        if self.conditional:
            conditions = {**conditions, "sigma": sigma if isinstance(sigma, Tensor) else at.new_full((len(x),), sigma)}
        noisy = moved(x, (at + scale * noise).detach())
        gradient = energy_gradient(model, noisy, create_graph=torch.is_grad_enabled(), **conditions)
        # s + z/σ = -(∇E - z/σ): the sign falls away in the square
        difference = scale * gradient - noise if several else gradient - noise / scale
        return Terms({"loss": 0.5 * total(difference.square(), x)})

    def _scales(self, at: Tensor, samples: int, generator: torch.Generator | None) -> Tensor | float:
        """The one scale, or one of them for each sample, (batch,)."""
        if isinstance(self.noise_scale, float):
            return self.noise_scale
        which = torch.randint(len(self.noise_scale), (samples,), generator=generator, device=at.device)
        return at.new_tensor(self.noise_scale)[which]
