"""The dynamics of the demonstration, under a calculator whose energy is known to be kept."""

from __future__ import annotations

import numpy as np
from ase.build import molecule
from ase.calculators.emt import EMT

from nvalchemi.demo.dynamics import Dynamics, constant_energy


def test_energy_is_kept_and_frames_are_labelled():
    atoms = molecule("H2O", calculator=EMT())
    before = atoms.positions.copy()
    path = constant_energy(atoms, steps=200, timestep=0.25, temperature=100.0, seed=3, keep=5)
    assert len(path.time) == 201
    assert path.time[-1] == 0.05
    assert len(path.frames) == 5
    assert path.frames[1].get_potential_energy() == path.potential[40]
    assert path.ripple < 0.1 * path.swing
    assert (atoms.positions == before).all()


def test_drift_is_a_slope_for_each_atom():
    time = np.linspace(0.0, 2.0, 11)
    path = Dynamics(time, np.zeros(11), 5.0 + 0.03 * time, [], 3)
    assert abs(path.drift - 10.0) < 1e-9
