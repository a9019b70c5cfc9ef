"""At which times losses along paths look, and how much each time weighs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import ConfigError

TimeWeight = Callable[[Tensor], Tensor]
TIMES = ("uniform", "lognormal")
LOWEST = 1e-4
"""The least time of the lognormal law."""


class Times:
    """The law of the times t of a batch, from 0 (noise) to 1 (data).

    Parameters
    ----------
    t_sampler
        ``"uniform"``, ``"lognormal"``, or a function ``(count, device=..., dtype=..., generator=...)`` that gives times (count,) in [0, 1].
    t_p_mean, t_p_std
        Of the lognormal law: the noise over the data, s = (1 - t) / t, has the logarithm ``t_p_mean`` + ``t_p_std`` z with z standard
        normal, so t = 1 / (1 + s) is logit-normal around 1 / (1 + exp(t_p_mean)): Karras et al., NeurIPS 2022; Esser et al., ICML 2024.
    train_eps
        Times stay this far from 0 and 1: uniform ones are drawn in between, lognormal ones are moved there. A function keeps to its own.
    loss_weight_fn
        w(t), a function from times (batch,) to the weights of the samples' losses, (batch,); 1 if not given.

    Raises
    ------
    ConfigError
        For settings that cannot be.
    """

    def __init__(
        self,
        t_sampler: str | Callable[..., Tensor] = "uniform",
        t_p_mean: float = -1.2,
        t_p_std: float = 1.2,
        train_eps: float = 0.0,
        loss_weight_fn: TimeWeight | None = None,
    ) -> None:
        if not callable(t_sampler) and t_sampler not in TIMES:
            raise ConfigError("no such law of times", found=repr(t_sampler), needed=f"{', '.join(TIMES)} or a function")
        if not 0 <= train_eps < 0.5:
            raise ConfigError("no times are left", found=f"train_eps={train_eps}", needed="at least 0 and less than 0.5")
        weight: Any = loss_weight_fn
        if not (t_p_std > 0 and math.isfinite(t_p_mean)) or not (weight is None or callable(weight)):
            raise ConfigError(
                "no such law of times",
                found=f"t_p_mean={t_p_mean}, t_p_std={t_p_std}, loss_weight_fn={weight!r}",
                needed="a finite mean, a positive deviation, and a function of the times",
            )
        self.t_sampler, self.t_p_mean, self.t_p_std, self.train_eps = t_sampler, t_p_mean, t_p_std, train_eps
        self.loss_weight_fn = loss_weight_fn

    def draw(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """One time for each row of ``like``, of its dtype and on its device."""
        count = len(like)
        if callable(self.t_sampler):
            t = self.t_sampler(count, device=like.device, dtype=like.dtype, generator=generator)
            return checked("t_sampler", t, count)
        t = torch.empty(count, dtype=like.dtype, device=like.device)
        if self.t_sampler == "uniform":
            return t.uniform_(self.train_eps, 1 - self.train_eps, generator=generator)
        t.normal_(self.t_p_mean, self.t_p_std, generator=generator)
        return torch.sigmoid(t.neg_()).clamp_(max(LOWEST, self.train_eps), 1 - self.train_eps)

    def weights(self, t: Tensor, others: Tensor | None) -> Tensor | None:
        """The weights of the samples' losses, (batch,), times ``others``; None where all are 1."""
        if self.loss_weight_fn is None:
            return others
        own = checked("loss_weight_fn", self.loss_weight_fn(t), len(t))
        return own if others is None else own * others


def checked(name: str, found: Any, count: int) -> Tensor:
    """What a function of a user's gave, if it is one number a sample."""
    if not isinstance(found, Tensor) or found.shape != (count,):
        raise ConfigError(
            f"{name} gives not one number a sample",
            found=tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__,
            needed=f"a tensor ({count},)",
        )
    return found
