"""The ASE calculator: numbers, units and signs, kept neighbour lists, and energy that is conserved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet

from nvalchemi.data import AtomicData, Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models import InteratomicPotential, MLPEnergy
from nvalchemi.models.calculator import NvalchemiCalculator
from tests.models.samples import LennardJones, crystal, energy, molecule, painn


@pytest.mark.parametrize("data", [molecule(), crystal()], ids=["molecule", "crystal"])
def test_the_models_own_numbers(data):
    model = painn()
    expected = model.eval().predict(Batch.from_data_list([data]), ("energy", "forces", "stress"))
    atoms = data.to_atoms()
    atoms.calc = NvalchemiCalculator(model)
    assert atoms.get_potential_energy() == pytest.approx(float(expected["energy"]), abs=1e-9)
    np.testing.assert_allclose(atoms.get_forces(), expected["forces"].numpy(), atol=1e-10)
    if data.cell is not None:
        np.testing.assert_allclose(atoms.get_stress(voigt=False), expected["stress"][0].numpy(), atol=1e-10)


def test_stress_has_the_sign_of_ase():
    atoms = bulk("Ar", "fcc", a=5.0, cubic=True)
    atoms.calc = NvalchemiCalculator(InteratomicPotential(LennardJones(3.4, 8.0)).double())
    numeric = atoms.calc.calculate_numerical_stress(atoms, d=1e-5)
    np.testing.assert_allclose(atoms.get_stress(), numeric, atol=1e-6)
    assert atoms.get_stress()[0] < -1e-3  # squeezed below its 5.2 Å


def test_labels_that_the_atoms_carry_are_no_input():
    atoms = molecule().to_atoms()
    atoms.calc = SinglePointCalculator(atoms, energy=123.0)
    calc = NvalchemiCalculator(painn())
    before = calc.get_potential_energy(atoms)
    assert before == pytest.approx(float(energy(painn(), molecule())), abs=1e-9)


def test_energy_is_conserved_and_the_list_is_kept():
    rng = np.random.RandomState(0)
    atoms = bulk("Ar", "fcc", a=5.26, cubic=True) * (2, 2, 2)
    atoms.rattle(0.05, rng=rng)
    model = InteratomicPotential(LennardJones(3.4, 7.0), energy_scale=0.026).double()
    atoms.calc = NvalchemiCalculator(model, skin=1.0)
    MaxwellBoltzmannDistribution(atoms, temperature_K=60, rng=rng)
    made = []
    listed = atoms.calc._batch
    atoms.calc._batch = lambda: made.append(1) or listed()
    lists = set()
    dynamics = VelocityVerlet(atoms, 4.0 * units.fs)
    totals = []
    for _ in range(60):
        dynamics.run(1)
        totals.append(atoms.get_total_energy() / len(atoms))
        lists.add(id(atoms.calc._listed))
    kinetic = atoms.get_kinetic_energy() / len(atoms)
    assert np.ptp(totals) < 0.02 * kinetic
    assert len(made) >= 60 and len(lists) < 15


def test_a_kept_list_never_misses_a_neighbour():
    model = painn()
    calc, fresh = NvalchemiCalculator(model, skin=0.6), NvalchemiCalculator(model, skin=0.0)
    rng = np.random.RandomState(1)
    atoms = crystal().to_atoms()
    for step in range(12):
        atoms.positions += 0.12 * rng.standard_normal(atoms.positions.shape)
        if step == 6:
            atoms.set_cell(atoms.cell * 1.05)
        if step == 9:
            del atoms[0]
        np.testing.assert_allclose(calc.get_forces(atoms), fresh.get_forces(atoms), atol=1e-9)


def test_relabelled_and_refused():
    with pytest.raises(ConfigError, match="no potential"):
        NvalchemiCalculator(MLPEnergy(3))
    with pytest.raises(ConfigError, match="skin"):
        NvalchemiCalculator(painn(), skin=-1.0)
    calc = NvalchemiCalculator(painn(torch.float32))
    one = Atoms("O", positions=[[0, 0, 0]])
    assert calc.get_potential_energy(one) == pytest.approx(-2042.0, abs=1e-4)
    assert isinstance(calc.get_potential_energy(one), float)
    assert AtomicData.from_atoms(one).num_atoms == 1
