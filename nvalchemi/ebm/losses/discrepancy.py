"""Energy discrepancy: data told from data that noise moved away and back, without scores or chains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from nvalchemi.ebm.losses.base import ScalarEnergyLoss, vectors
from nvalchemi.ebm.losses.contrastive import both_energies
from nvalchemi.ebm.samples import normal_like
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.objective import Terms


class EnergyDiscrepancy(ScalarEnergyLoss):
    """Energy discrepancy with Gaussian noise.

    ::

        L = E log(w/M + 1/M Σ_j exp(E(x) - E(x + √t ξ + √t ξ_j))),        j = 1 .. M

    an estimate of E_data E(x) - E U(x + √t ξ), U the energy smoothed with noise of variance t: Schröder et al., NeurIPS 2023. Small t is
    near to score matching, large t to maximum likelihood. With conditions, such as labels y, E(x') is told those of x.

    Parameters
    ----------
    model
        The energy of vectors (batch, ...), in units of kT.
    t
        Variance of the noise, in the squared unit of the data.
    n_samples
        M.
    w
        Keeps the logarithm from below where all M energies are high.
    """

    def __init__(self, model: EnergyModel, t: float = 0.25, n_samples: int = 4, w: float = 1.0) -> None:
        super().__init__(model)
        if not t > 0 or n_samples < 1 or w < 0:
            raise ConfigError(
                "energy discrepancy cannot be like this",
                found=f"t={t}, n_samples={n_samples}, w={w}",
                needed="t above 0, n_samples at least 1, w at least 0",
            )
        self.t, self.n_samples, self.w = t, n_samples, w

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        vectors(x, self)
        scale, m = math.sqrt(self.t), self.n_samples
        away = (x + scale * normal_like(x, generator)).expand(m, *x.shape)
        back = away + scale * torch.empty_like(away, memory_format=torch.contiguous_format).normal_(generator=generator)
        data, others = both_energies(model, x, back.flatten(0, 1), conditions)
        logits = data - others.reshape(m, len(x))
        if self.w:
            logits = torch.cat([logits, logits.new_full((1, len(x)), math.log(self.w))])
        return Terms({"loss": torch.logsumexp(logits, 0) - math.log(m)})
