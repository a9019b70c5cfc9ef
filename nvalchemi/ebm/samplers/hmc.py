"""Hamiltonian Monte Carlo, and Langevin dynamics with the same test of acceptance."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nvalchemi.ebm.integrators import SymplecticIntegrator, symplectic_integrator
from nvalchemi.ebm.samplers.adaptation import AdaptiveSampler, DualAveraging, Way
from nvalchemi.ebm.samplers.base import NOTHING, Run, check_start
from nvalchemi.ebm.samplers.mechanics import Mass, Mechanics
from nvalchemi.ebm.settings import Setting, Value, changes, checked, root, spread, value
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel


class HamiltonianMonteCarlo(AdaptiveSampler):
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
        of the target, where it is known, makes all directions alike. Of structures a number, one an atom (N,), or ``"atomic"``.
    temperature
        T: as ``step_size``.
    jitter
        Each way of each chain takes a step up to this share longer or shorter, so that no way fits a period of the target.
    integrator
        ``"leapfrog"``, or a `nvalchemi.ebm.integrators.SymplecticIntegrator`.
    """

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
        super().__init__(model, step_size)
        if n_leapfrog_steps < 1 or not 0.0 <= jitter < 1.0:
            raise ConfigError(
                "no such way",
                found=f"n_leapfrog_steps={n_leapfrog_steps}, jitter={jitter}",
                needed="n_leapfrog_steps at least 1, jitter at least 0 and less than 1",
            )
        self.n_leapfrog_steps, self.mass, self.jitter = n_leapfrog_steps, mass, float(jitter)
        self.temperature = checked("temperature", temperature, positive=True)
        self.integrator = symplectic_integrator(integrator)

    def _time_step(self, setting: Value) -> Value:
        """The leapfrog step that belongs to a step size."""
        return setting

    def ways(self, run: Run, average: DualAveraging | None) -> Iterator[Way]:
        """See `AdaptiveSampler.ways`."""
        chains, x = run.chains, run.chains.start
        mechanics = Mechanics(self.energy, chains, self.mass)
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
            yield x, log_ratio, {"acceptance_rate": accepted.float().mean()} if run.diagnostics else NOTHING

    def _values(self, run: Run, mechanics: Mechanics, step: int, average: DualAveraging | None) -> tuple[Value, Value]:
        """The leapfrog step as `Mechanics` takes it, and the temperature."""
        size = value("step_size", self.step_size if average is None else average.current, step, run.chains)
        temperature = value("temperature", self.temperature, step, run.chains, positive=True)
        size = self._time_step(size)
        if self.jitter:
            size = size * (1.0 + self.jitter * (2.0 * run.uniform() - 1.0)).to(run.chains.start.dtype)
        return mechanics.scaled(size), temperature


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
