"""Hamiltonian Monte Carlo, and Langevin dynamics with the same test of acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi.ebm.integrators import SymplecticIntegrator, symplectic_integrator
from nvalchemi.ebm.record import Progress
from nvalchemi.ebm.samplers.adaptation import DualAveraging
from nvalchemi.ebm.samplers.base import NOTHING, Run, Sampler, check_start
from nvalchemi.ebm.samplers.mechanics import Mass, Mechanics
from nvalchemi.ebm.samplers.settings import Setting, Value, changes, checked, root, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class HamiltonianMonteCarlo(Sampler):
    """Hamiltonian Monte Carlo: a random momentum, a way through phase space, and a test whether to stay there.

    Draws exactly from exp(-E / T), whatever the step. Each way costs one gradient a leapfrog step. A way whose energy is not finite
    anywhere is refused: its chain stays where it was, and the refusal counts. Duane et al., Physics Letters B 195, 216 (1987).

    Diagnostics have ``"acceptance_rate"``, the share of the chains that moved.

    Parameters
    ----------
    model
        The energy.
    step_size
        The leapfrog step: a number, one number a chain (batch,), or a function of the step that gives either.
    n_leapfrog_steps
        Leapfrog steps a way.
    mass
        A number, one number a coordinate (the shape of one sample), or a matrix of the coordinates of a sample; the inverse covariance
        of the target, where it is known, makes all directions alike.
    temperature
        T: as ``step_size``.
    jitter
        Each way of each chain takes a step up to this share longer or shorter, so that no way fits a period of the target.
    integrator
        ``"leapfrog"``, or a `nvalchemi.ebm.integrators.SymplecticIntegrator`.

    Attributes
    ----------
    good_acceptance
        What `warm_up` aims at where nothing else is said.
    """

    good_acceptance: ClassVar[float] = 0.8

    def __init__(
        self,
        model: EnergyModel,
        step_size: Setting = 1e-3,
        n_leapfrog_steps: int = 10,
        mass: Mass = 1.0,
        temperature: Setting = 1.0,
        jitter: float = 0.0,
        integrator: str | SymplecticIntegrator = "leapfrog",
    ) -> None:
        super().__init__(model, checked("step_size", step_size))
        if n_leapfrog_steps < 1 or not 0.0 <= jitter < 1.0:
            raise ConfigError(
                "no such way",
                found=f"n_leapfrog_steps={n_leapfrog_steps}, jitter={jitter}",
                needed="n_leapfrog_steps at least 1, jitter at least 0 and less than 1",
            )
        self.n_leapfrog_steps, self.mass, self.jitter = n_leapfrog_steps, mass, float(jitter)
        self.temperature = checked("temperature", temperature)
        self.integrator = symplectic_integrator(integrator)

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        for x, _, accepted in self._ways(run, None):
            yield x, {"acceptance_rate": accepted.float().mean()} if run.diagnostics else NOTHING

    def warm_up(
        self,
        x: Any = None,
        dim: int | tuple[int, ...] | None = None,
        n_steps: int = 200,
        n_samples: int = 1,
        target_acceptance: float | None = None,
        *,
        generator: torch.Generator | None = None,
        progress: bool | Progress = False,
    ) -> Any:
        """Move the chains while the step size is adapted, and set `step_size` to the number found.

        Dual averaging of the mean acceptance probability of all chains: Hoffman and Gelman, JMLR 15, 1593 (2014). Draws made here are
        none of the target's.

        Parameters
        ----------
        x, dim, n_samples, generator, progress
            As `sample` takes them.
        n_steps
            Ways.
        target_acceptance
            The mean acceptance probability that is wanted; `good_acceptance` if not given.

        Returns
        -------
        Tensor
            The last states: where `sample` should begin.

        Raises
        ------
        ConfigError
            Where `step_size` is not a number.
        """
        if isinstance(self.step_size, Tensor) or callable(self.step_size):
            raise ConfigError(
                "only a step size that is a number can be adapted", found=self.step_size, fix="give step_size a number"
            )
        warming = _WarmUp(self, DualAveraging(self.step_size, target_acceptance or self.good_acceptance))
        last = warming.sample(x, dim, n_steps, n_samples, generator=generator, progress=progress)
        self.step_size = warming.average.final
        return last

    def _time_step(self, setting: Value) -> Value:
        """The leapfrog step that belongs to a step size."""
        return setting

    def _ways(self, run: Run, average: DualAveraging | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Positions, logarithms of the acceptance ratio (size,) and who was accepted (size,), after each way."""
        chains, x = run.chains, run.chains.start
        mechanics = Mechanics(self.model, chains, self.mass)
        energy, gradient = mechanics.energy_and_gradient(x)
        check_start(energy, type(self).__name__)
        moving = average is not None or self.jitter > 0.0 or changes(self.step_size, self.temperature)
        step_size, temperature = self._values(run, mechanics, 0, average)
        width = spread(root(temperature), chains)
        for step in range(run.n_steps):
            if moving and step:
                step_size, temperature = self._values(run, mechanics, step, average)
                width = spread(root(temperature), chains)
            q = run.normal(x)
            if not (isinstance(width, float) and width == 1.0):
                q.mul_(width)
            before = mechanics.kinetic(q)
            there = x.clone()
            new_energy, new_gradient = self.integrator.way(mechanics, there, q, gradient, step_size, self.n_leapfrog_steps)
            log_ratio = (energy - new_energy + (before - mechanics.kinetic(q))) / temperature
            # NaN compares false, so a way that left the numbers is refused; minus infinity of energy is no place to stay either.
            accepted = (log_ratio > run.uniform().log_()) & (log_ratio < torch.inf)
            x = chains.choose(accepted, there, x)
            gradient = chains.choose(accepted, new_gradient, gradient)
            energy = torch.where(accepted, new_energy, energy)
            yield x, log_ratio, accepted

    def _values(self, run: Run, mechanics: Mechanics, step: int, average: DualAveraging | None) -> tuple[Value, Value]:
        """The leapfrog step as `Mechanics` takes it, and the temperature."""
        size = value("step_size", self.step_size if average is None else average.current, step, run.chains)
        temperature = value("temperature", self.temperature, step, run.chains)
        size = self._time_step(size)
        if self.jitter:
            size = size * (1.0 + self.jitter * (2.0 * run.uniform() - 1.0)).to(run.chains.start.dtype)
        return mechanics.scaled(size), temperature


class _WarmUp(Sampler):
    """The same ways, with the step size under adaptation."""

    def __init__(self, sampler: HamiltonianMonteCarlo, average: DualAveraging) -> None:
        super().__init__(sampler.model, sampler.step_size)
        self._sampler, self.average = sampler, average

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        for x, log_ratio, _ in self._sampler._ways(run, self.average):
            probability = log_ratio.clamp(max=0.0).exp().nan_to_num_(nan=0.0)
            self.average.update(float(probability.mean()))
            yield x, NOTHING


class MetropolisAdjustedLangevin(HamiltonianMonteCarlo):
    """Langevin dynamics with a test of acceptance: exact for any step size.

    The proposal is that of `LangevinDynamics`, x - h grad E(x) + sqrt(2 h T) z, and it is taken with the probability that makes
    exp(-E / T) the chain's own distribution (Roberts and Tweedie, Bernoulli 2, 341 (1996)). That is Hamiltonian Monte Carlo of one
    leapfrog step of length sqrt(2 h), and is done so: one gradient a step. An acceptance of about 0.57 is the most efficient one.

    Parameters
    ----------
    model
        The energy.
    step_size, temperature
        h and T: each a number, one number a chain (batch,), or a function of the step that gives either.
    mass
        As `HamiltonianMonteCarlo` takes it: the drift is h M⁻¹ grad E, and the noise has the covariance 2 h T M⁻¹.
    """

    good_acceptance = 0.57

    def __init__(self, model: EnergyModel, step_size: Setting = 1e-3, temperature: Setting = 1.0, mass: Mass = 1.0) -> None:
        super().__init__(model, step_size, 1, mass, temperature)

    def _time_step(self, setting: Value) -> Value:
        return root(2.0 * setting)
