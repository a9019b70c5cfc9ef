"""The bath that the demonstration's structures are drawn from has the temperature that it is asked for."""

from __future__ import annotations

import numpy as np
from ase import Atoms, units
from ase.calculators.calculator import Calculator

from nvalchemi.demo.dynamics import thermalise
from nvalchemi.demo.xtb import langevin


class Springs(Calculator):
    """Independent springs of 1 eV/Å² to the origin."""

    implemented_properties = ("energy", "forces")

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        super().calculate(atoms, properties, system_changes)
        self.results = {"energy": 0.5 * (atoms.positions**2).sum(), "forces": -atoms.positions}


def test_bath_has_its_temperature():
    rng = np.random.default_rng(0)
    atoms = Atoms("C300", positions=np.zeros((300, 3)), calculator=Springs())
    thermalise(atoms, 400.0, rng)
    langevin(atoms, 300, 400.0, rng)
    motion, stretch = [], []
    for _ in range(30):
        langevin(atoms, 20, 400.0, rng)
        motion.append(atoms.get_temperature())
        stretch.append((atoms.positions**2).mean() / units.kB)
    assert abs(np.mean(motion) - 400.0) < 10.0
    assert abs(np.mean(stretch) - 400.0) < 10.0
