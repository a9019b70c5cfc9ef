"""Overdamped Langevin dynamics, unadjusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.ebm.samplers.base import NOTHING, Run, Sampler
from nvalchemi.ebm.samplers.settings import Setting, Value, add_, changes, checked, root, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class LangevinDynamics(Sampler):
    """Overdamped Langevin dynamics: down the gradient, with noise.

    One step with step size h, noise scale s, temperature T and decay d is::

        x <- x - h (grad E(x) + d x) + s sqrt(2 h T) z,        z standard normal

    With s = 1 and d = 0 the chains draw from exp(-E / T) up to an error of the first order in h: for E = x²/2 and T = 1 their variance
    is 1 / (1 - h/2) (Roberts and Tweedie, Bernoulli 2, 341 (1996)). `MetropolisAdjustedLangevin` has no such error. A decay adds
    d |x|²/2 to the energy; a noise scale s is a temperature of s² T.

    Parameters
    ----------
    model
        The energy.
    step_size, noise_scale, temperature
        h, s and T: each a number, one number a chain (batch,), or a function of the step that gives either.
    decay
        d.
    clamp
        (lower, upper): every coordinate is bounded to this range after each step.

    Examples
    --------
    >>> sampler = LangevinDynamics(model, step_size=0.01)
    >>> samples = sampler.sample(dim=2, n_samples=1000, n_steps=500, generator=torch.Generator().manual_seed(0))
    """

    def __init__(
        self,
        model: EnergyModel,
        step_size: Setting = 1e-3,
        noise_scale: Setting = 1.0,
        decay: float = 0.0,
        clamp: tuple[float, float] | None = None,
        temperature: Setting = 1.0,
    ) -> None:
        super().__init__(model, checked("step_size", step_size))
        self.noise_scale = checked("noise_scale", noise_scale)
        self.temperature = checked("temperature", temperature)
        if not decay >= 0.0:
            raise ConfigError("decay cannot be that", found=decay, needed="a number, at least 0")
        self.decay = float(decay)
        if clamp is not None and not clamp[0] < clamp[1]:
            raise ConfigError("clamp is no range", found=clamp, needed="(lower, upper)")
        self.clamp = clamp

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        model, chains, x = self.model, run.chains, run.chains.start
        moving = changes(self.step_size, self.noise_scale, self.temperature)
        drift, noise = self._factors(chains, 0)
        for step in range(run.n_steps):
            if moving and step:
                drift, noise = self._factors(chains, step)
            gradient = chains.gradient(model, x)
            if self.decay:
                gradient = gradient.add(x, alpha=self.decay)
            add_(x, drift, gradient)
            add_(x, noise, run.normal(x))
            if self.clamp is not None:
                x.clamp_(*self.clamp)
            yield x, NOTHING

    def _factors(self, chains: Chains, step: int) -> tuple[Value, Value]:
        """What the gradient and the noise are multiplied by at this step."""
        h = value("step_size", self.step_size, step, chains)
        temperature = value("temperature", self.temperature, step, chains)
        noise = value("noise_scale", self.noise_scale, step, chains) * root(2.0 * h * temperature)
        return spread(-h, chains), spread(noise, chains)
