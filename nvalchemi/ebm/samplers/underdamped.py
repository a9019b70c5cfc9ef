"""Underdamped Langevin dynamics, unadjusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nvalchemi.ebm.samplers.base import NOTHING, EnergySampler, Run
from nvalchemi.ebm.samplers.mechanics import Mass, Mechanics
from nvalchemi.ebm.settings import Setting, Value, add_, changes, checked, root, spread, value
from nvalchemi.models import EnergyModel


class UnderdampedLangevin(EnergySampler):
    """Underdamped Langevin dynamics: momenta that friction slows and noise drives, split as BAOAB.

    A step is half a kick by the forces, half a drift, the exact solution of friction and noise, half a drift and half a kick: one
    gradient a step. Positions are drawn from exp(-E / T) with an error of the second order in the step, and none at all where E is
    quadratic (Leimkuhler and Matthews, Applied Mathematics Research eXpress 2013, 34).

    Momenta are drawn anew at the beginning of a call and are not kept after it. Diagnostics have ``"kinetic_temperature"``, twice the
    kinetic energy a coordinate.

    Parameters
    ----------
    model
        The energy.
    step_size, friction, temperature
        The step of time, the rate at which momenta are forgotten, and T: each a number, one number a chain (batch,), or a function of
        the step that gives either.
    mass
        A number, one number a coordinate (the shape of one sample), or a matrix of the coordinates of a sample. Of structures a
        number, one an atom (N,), or ``"atomic"``: the masses of the elements in u. With energies in eV and lengths in Å the unit of time
        is then Å (u/eV)^1/2 = 10.1805 fs.
    """

    def __init__(
        self,
        model: EnergyModel,
        step_size: Setting = 1e-2,
        friction: Setting = 1.0,
        temperature: Setting = 1.0,
        mass: Mass = 1.0,
    ) -> None:
        super().__init__(model, step_size)
        self.friction = checked("friction", friction)
        self.temperature = checked("temperature", temperature)
        self.mass = mass

    def moves(self, run: Run) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """See `Sampler.moves`."""
        chains, x = run.chains, run.chains.start
        mechanics = Mechanics(self.energy, chains, self.mass)
        moving = changes(self.step_size, self.friction, self.temperature)
        half, keep, noise = self._factors(mechanics, 0)
        q = run.normal(x).mul_(spread(root(value("temperature", self.temperature, 0, chains)), chains))
        gradient = mechanics.gradient(x) if run.n_steps else q
        fresh = torch.empty_like(q)
        for step in range(run.n_steps):
            if moving and step:
                half, keep, noise = self._factors(mechanics, step)
            mechanics.kick_(q, -half, gradient)
            mechanics.drift_(x, half, q)
            add_(q.mul_(keep), noise, run.refill_(fresh))
            mechanics.drift_(x, half, q)
            gradient = mechanics.gradient(x)
            mechanics.kick_(q, -half, gradient)
            yield x, {"kinetic_temperature": q.square().mean()} if run.diagnostics else NOTHING

    def _factors(self, mechanics: Mechanics, step: int) -> tuple[Value, Value, Value]:
        """Half a step of time, what is kept of momenta and what noise is multiplied by."""
        chains = mechanics.chains
        h = value("step_size", self.step_size, step, chains)
        rate = h * value("friction", self.friction, step, chains)
        temperature = value("temperature", self.temperature, step, chains)
        if isinstance(rate, float):
            keep: Value = math.exp(-rate)
            new: Value = -math.expm1(-2.0 * rate)
        else:
            keep, new = torch.exp(-rate), -torch.expm1(-2.0 * rate)
        return mechanics.scaled(0.5 * h), spread(keep, chains), spread(root(new * temperature), chains)
