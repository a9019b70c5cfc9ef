"""Overdamped Langevin dynamics, unadjusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.ebm.integrators import EulerMaruyamaIntegrator, FixedStepIntegrator, check_stochastic, get_integrator
from nvalchemi.ebm.samplers.base import NOTHING, EnergySampler, Run
from nvalchemi.ebm.settings import Setting, Value, add_, changes, checked, root, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class LangevinDynamics(EnergySampler):
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
    integrator
        ``"euler_maruyama"``, the step above; ``"heun"``, with two gradients a step and an error of the second order;
        ``"backward_euler_maruyama"``, with the gradient at the end of the step, for stiff energies; or a
        `nvalchemi.ebm.integrators.FixedStepIntegrator` that takes noise.

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
        integrator: str | FixedStepIntegrator = "euler_maruyama",
    ) -> None:
        super().__init__(model, step_size)
        self.noise_scale = checked("noise_scale", noise_scale)
        self.temperature = checked("temperature", temperature)
        if not decay >= 0.0:
            raise ConfigError("decay cannot be that", found=decay, needed="a number, at least 0")
        self.decay = float(decay)
        if clamp is not None and not clamp[0] < clamp[1]:
            raise ConfigError("clamp is no range", found=clamp, needed="(lower, upper)")
        self.clamp = clamp
        scheme = get_integrator(integrator)
        check_stochastic(scheme)
        if not isinstance(scheme, FixedStepIntegrator):
            raise ConfigError(
                "Langevin dynamics takes steps of its own", found=type(scheme).__name__, needed="a FixedStepIntegrator"
            )
        self.integrator = scheme
        # The usual scheme is done in place here: two passes over the positions, and no memory a step.
        self._by_hand = type(scheme) is EulerMaruyamaIntegrator

    @property
    def even_calls(self) -> bool:
        """See `Sampler.even_calls`."""
        return self.integrator.even_calls

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        chains, x = run.chains, run.chains.start
        moving = changes(self.step_size, self.noise_scale, self.temperature)
        h, scale, rate = self._factors(chains, 0)
        noise = torch.empty_like(x)
        cooled = not (changes(self.step_size, self.temperature) or isinstance(rate, Tensor))  # only the noise's scale moves
        for step in range(run.n_steps):
            if moving and step:
                if cooled:
                    scale = spread(value("noise_scale", self.noise_scale, step, chains), chains)
                else:
                    h, scale, rate = self._factors(chains, step)
            if self._by_hand:
                add_(x, -h, self._slope(chains, x))
                add_(x, scale, run.refill_(noise), rate)
            else:
                kick = run.refill_(noise).mul_(scale * rate)
                x = self.integrator.step(lambda x, _: self._slope(chains, x).neg_(), x, 0.0, h, kick)
            if self.clamp is not None:
                x.clamp_(*self.clamp)
            yield x, NOTHING

    def _slope(self, chains: Chains, x: Tensor) -> Tensor:
        """The gradient of the energy and of the decay."""
        gradient = chains.gradient(self.energy, x)
        return gradient.add(x, alpha=self.decay) if self.decay else gradient

    def _factors(self, chains: Chains, step: int) -> tuple[Value, Value, float]:
        """The step, and two factors of the noise: numbers of the chains are not multiplied by one of them all, which would be a pass more."""
        h = value("step_size", self.step_size, step, chains)
        temperature = value("temperature", self.temperature, step, chains)
        scale, rate = value("noise_scale", self.noise_scale, step, chains), root(2.0 * h * temperature)
        if isinstance(rate, Tensor):
            scale, rate = scale * rate, 1.0
        return spread(h, chains), spread(scale, chains), rate
