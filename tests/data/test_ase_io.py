from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms

from nvalchemi.data import AtomicData
from nvalchemi.errors import DataError
from tests.data.random_structures import OPTIONAL, same, structure


def test_labels_of_a_calculator_that_ran():
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=1)
    atoms.calc = EMT()
    atoms.set_constraint(FixAtoms([0]))
    assert AtomicData.from_atoms(atoms).energy is None  # nothing is computed
    energy, forces = atoms.get_potential_energy(), atoms.get_forces(apply_constraint=False)
    data = AtomicData.from_atoms(atoms)
    assert data.energy == energy and np.array_equal(data.forces, forces) and data.forces[0].abs().sum() > 0
    assert data.cell.shape == (3, 3) and data.pbc.all()
    atoms.rattle(0.1, seed=2)
    assert AtomicData.from_atoms(atoms).energy is None  # nor are old results taken for new
    assert atoms.calc.results  # and the calculator is left as it was


def test_stress_has_ases_sign_and_order():
    """Tension is positive: the stress is the derivative of the energy with strain, over the volume."""
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell.array @ (np.eye(3) * 0.99 + [[0, 0.01, 0], [0, 0, -0.02], [0.015, 0, 0]]), scale_atoms=True)
    atoms.calc = EMT()
    atoms.get_stress()
    stress = AtomicData.from_atoms(atoms).stress.numpy()
    numeric = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            energies = []
            for h in (1e-4, -1e-4):
                strain = np.eye(3)
                strain[i, j] += h / 2
                strain[j, i] += h / 2
                other = atoms.copy()
                other.set_cell(atoms.cell.array @ strain, scale_atoms=True)
                other.calc = EMT()
                energies.append(other.get_potential_energy())
            numeric[i, j] = (energies[0] - energies[1]) / 2e-4 / atoms.get_volume()
    assert np.abs(stress - numeric).max() < 1e-4 and np.trace(stress) < -0.01
    assert np.allclose(AtomicData.from_atoms(AtomicData.from_atoms(atoms).to_atoms()).stress, stress)


def test_stored_labels_of_other_positions_are_refused():
    atoms = molecule("CH4")
    atoms.calc = SinglePointCalculator(atoms, energy=-1.0, forces=np.zeros((5, 3)))
    assert AtomicData.from_atoms(atoms).energy == -1.0
    atoms.positions += 0.1
    with pytest.raises(DataError, match=r"belong to another structure.*energy, forces.*positions.*labels=False"):
        AtomicData.from_atoms(atoms)
    assert AtomicData.from_atoms(atoms, labels=False).energy is None


def test_molecule_has_no_cell_and_arrays_are_copied():
    atoms = molecule("CH4")
    data = AtomicData.from_atoms(atoms, dtype=torch.float32)
    assert data.field_names == ("positions", "atomic_numbers") and data.dtype == torch.float32
    before = data.positions.clone()
    atoms.positions += 1
    assert torch.equal(data.positions, before)


def test_further_fields_by_name():
    atoms = molecule("CH4")
    atoms.info.update(charge=1, gap=2.5)
    atoms.set_array("spin", np.arange(5.0))
    data = AtomicData.from_atoms(atoms, dtype=torch.float32, system=["gap"], atom=["spin"])
    assert data.charge == 1 and data.gap == 2.5 and data.spin.tolist() == [0, 1, 2, 3, 4] and data.gap.dtype == torch.float32
    with pytest.raises(DataError, match=r"'gpa' is not in atoms.info; found: \['charge', 'gap'\]"):
        AtomicData.from_atoms(atoms, system=["gpa"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(dtype):
    data = structure(4, 6, frozenset(OPTIONAL), dtype)
    symmetric = (data.stress + data.stress.T) / 2
    data = data.replace(stress=symmetric)
    back = AtomicData.from_atoms(data.to_atoms(), dtype=dtype, system=["tag"], atom=["spin"])
    assert same(data, back)


def test_absent_labels_stay_absent():
    nan = float("nan")
    data = AtomicData(
        [[0.0, 0, 0]], [1], energy=nan, forces=[[nan] * 3], stress=np.full((3, 3), nan, dtype=np.float32), charge=nan
    )
    atoms = data.to_atoms()
    assert atoms.calc is None and "charge" not in atoms.info


def test_ghost_atoms_are_refused():
    with pytest.raises(DataError, match="unknown elements"):
        AtomicData.from_atoms(Atoms("XH", positions=[[0, 0, 0], [0, 0, 1]]))


class _Site:
    def __init__(self, z: int) -> None:
        self.specie = type("Specie", (), {"Z": z})()


class _Structure(list):
    """The part of pymatgen's Structure that is read."""

    cart_coords = np.array([[0.0, 0.0, 0.0], [2.8, 0.0, 0.0]])
    is_ordered = True
    lattice = type("Lattice", (), {"matrix": np.eye(3) * 5.6, "pbc": (True, True, False)})()


def test_pymatgen_objects():
    data = AtomicData.from_structure(_Structure([_Site(11), _Site(17)]))
    assert data.atomic_numbers.tolist() == [11, 17] and data.pbc.tolist() == [True, True, False] and data.cell[0, 0] == 5.6
    mol = _Structure([_Site(11), _Site(17)])
    mol.lattice, mol.charge = None, 1.0
    assert AtomicData.from_structure(mol).charge == 1.0 and AtomicData.from_structure(mol).cell is None
    mol.is_ordered = False
    with pytest.raises(DataError, match="disordered"):
        AtomicData.from_structure(mol)
    with pytest.raises(DataError, match="found: Atoms"):
        AtomicData.from_structure(molecule("CH4"))
