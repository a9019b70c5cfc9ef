"""A short molecular dynamics with the trained model: whether it keeps its energy, and whether it is right where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

FS_PER_PS = 1000.0


@dataclass(frozen=True)
class Dynamics:
    """What a dynamics at constant energy did.

    Attributes
    ----------
    time
        (frames,) ps.
    potential, total
        (frames,) eV.
    frames
        ``ase.Atoms`` along the path, with the model's energy and forces.
    atoms
        How many atoms move.
    """

    time: np.ndarray
    potential: np.ndarray
    total: np.ndarray
    frames: list[Any]
    atoms: int

    @property
    def drift(self) -> float:
        """Slope of the total energy by a straight line, meV per atom and ps."""
        if len(self.time) < 2:
            return 0.0
        return float(np.polyfit(self.time, self.total, 1)[0]) * 1e3 / self.atoms

    @property
    def ripple(self) -> float:
        """Root mean square of the total energy about its mean, meV per atom; the integrator's own part included."""
        return float(self.total.std()) * 1e3 / self.atoms

    @property
    def swing(self) -> float:
        """Root mean square of the potential energy about its mean, meV per atom: what is exchanged with the motion."""
        return float(self.potential.std()) * 1e3 / self.atoms


def thermalise(atoms: Any, temperature: float, rng: np.random.Generator) -> None:
    """Give ``ase.Atoms`` momenta drawn from the Maxwell-Boltzmann distribution at a temperature in K."""
    from ase import units

    width = np.sqrt(units.kB * temperature * atoms.get_masses())
    atoms.set_momenta(width[:, None] * rng.normal(size=(len(atoms), 3)))


def constant_energy(
    atoms: Any,
    *,
    steps: int,
    timestep: float = 0.5,
    temperature: float = 300.0,
    seed: int = 0,
    keep: int = 20,
    seconds: float = float("inf"),
) -> Dynamics:
    """Let a molecule move freely under its calculator, by velocity Verlet.

    Parameters
    ----------
    atoms
        ``ase.Atoms`` with a calculator; not changed.
    steps
        How many.
    timestep
        fs.
    temperature
        Of the starting velocities, K; no net motion and no net turning.
    seed
        Of the starting velocities.
    keep
        How many frames to keep, over the number of steps asked for.
    seconds
        Stop after so much time, however many steps were made.
    """
    from ase import units
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.md.velocitydistribution import Stationary, ZeroRotation
    from ase.md.verlet import VelocityVerlet

    calculator, atoms = atoms.calc, atoms.copy()
    atoms.calc = calculator
    thermalise(atoms, temperature, np.random.default_rng(seed))
    Stationary(atoms)
    ZeroRotation(atoms)
    time: list[float] = []
    potential: list[float] = []
    total: list[float] = []
    frames: list[Any] = []
    every = max(1, steps // keep)

    def record(step: int) -> None:
        time.append(step * timestep / FS_PER_PS)
        potential.append(float(atoms.get_potential_energy()))
        total.append(potential[-1] + float(atoms.get_kinetic_energy()))
        if step % every == 0 and len(frames) < keep:
            frame = atoms.copy()
            frame.calc = SinglePointCalculator(frame, energy=potential[-1], forces=atoms.get_forces().copy())
            frames.append(frame)

    dynamics = VelocityVerlet(atoms, timestep=timestep * units.fs)
    start = perf_counter()
    record(0)
    for step in range(1, steps + 1):
        dynamics.run(1)
        record(step)
        if perf_counter() - start > seconds:
            break
    return Dynamics(np.array(time), np.array(potential), np.array(total), frames, len(atoms))
