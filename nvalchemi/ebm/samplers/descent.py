"""Down the gradient without noise: the ways to minima."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nvalchemi.ebm.samplers.base import NOTHING, EnergySampler, Run
from nvalchemi.ebm.settings import Setting, add_, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class GradientDescentSampler(EnergySampler):
    """Gradient descent: x <- x - h grad E(x).

    Parameters
    ----------
    model
        The energy.
    step_size
        h: a number, one number a chain (batch,), or a function of the step that gives either.
    """

    def __init__(self, model: EnergyModel, step_size: Setting = 1e-3) -> None:
        super().__init__(model, step_size)

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        chains, x = run.chains, run.chains.start
        for step in range(run.n_steps):
            h = spread(value("step_size", self.step_size, step, chains), chains)
            add_(x, -h, chains.gradient(self.energy, x))
            yield x, NOTHING


class NesterovSampler(EnergySampler):
    """Nesterov's accelerated descent: v <- m v - h grad E(x + m v), x <- x + v.

    Nesterov, Soviet Mathematics Doklady 27, 372 (1983). The velocity is zero at the beginning of a call.

    Parameters
    ----------
    model
        The energy.
    step_size
        h: a number, one number a chain (batch,), or a function of the step that gives either.
    momentum
        m, at least 0 and less than 1.
    """

    def __init__(self, model: EnergyModel, step_size: Setting = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(model, step_size)
        if not 0.0 <= momentum < 1.0:
            raise ConfigError("no such momentum", found=momentum, needed="at least 0 and less than 1")
        self.momentum = float(momentum)

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        chains, x = run.chains, run.chains.start
        v = torch.zeros_like(x)
        for step in range(run.n_steps):
            h = spread(value("step_size", self.step_size, step, chains), chains)
            v.mul_(self.momentum)
            add_(v, -h, chains.gradient(self.energy, x + v))
            x.add_(v)
            yield x, NOTHING
