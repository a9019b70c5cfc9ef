"""Structures from and to `ase.Atoms`, and from pymatgen objects. ASE is imported when one of these is first called."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.fields import Level
from nvalchemi.errors import DataError

if TYPE_CHECKING:
    import ase

RESULTS = ("energy", "forces", "stress", "dipole", "charges", "magmoms")
"""What is read from a calculator and written to one."""


def from_atoms(
    atoms: ase.Atoms,
    *,
    dtype: torch.dtype = torch.float64,
    labels: bool = True,
    system: Iterable[str] = (),
    atom: Iterable[str] = (),
) -> AtomicData:
    """Read an `ase.Atoms` with the labels that its calculator holds.

    Nothing is computed: a calculator that has not run for these positions gives no labels. Forces are those of the
    calculator, without what ASE's constraints would make of them.

    Parameters
    ----------
    atoms
        The structure. Its cell is read where it has one; ``info["charge"]``, if a number, is the total charge.
    dtype
        float64 or float32.
    labels
        False leaves the calculator alone.
    system, atom
        Names of further fields, from ``atoms.info`` and ``atoms.arrays``.

    Raises
    ------
    DataError
        A structure that `AtomicData` refuses, a name that is not there, or stored labels that belong to other positions.
    """
    fields: dict[str, Any] = {}
    if atoms.cell.any() or atoms.pbc.any():
        fields["cell"], fields["pbc"] = atoms.cell.array, atoms.pbc
    further: dict[str, dict[str, Any]] = {"system": {}, "atom": {}}
    for level, names, source in (("system", system, atoms.info), ("atom", atom, atoms.arrays)):
        for name in names:
            if name not in source:
                where = "atoms.info" if level == "system" else "atoms.arrays"
                raise DataError(f"{name!r} is not in {where}", found=sorted(source), needed=name)
            further[level][name] = source[name]
    if atoms.has("masses"):
        further["atom"].setdefault("masses", atoms.get_masses())
    charge = atoms.info.get("charge")
    if isinstance(charge, (int, float, np.number)) and not isinstance(charge, bool) and "charge" not in further["system"]:
        fields["charge"] = charge
    for name, value in (_results(atoms) if labels else {}).items():
        if name == "energy" or name == "forces":
            fields[name] = value
        elif name == "stress":
            fields[name] = _full_stress(value)
        else:
            further["system" if name == "dipole" else "atom"].setdefault(name, value)
    return AtomicData(
        np.asarray(atoms.get_positions(), dtype=_numpy(dtype)),
        atoms.get_atomic_numbers(),
        **{name: _cast(value, dtype, name) for name, value in fields.items()},
        system={name: _cast(value, dtype, name) for name, value in further["system"].items()},
        atom={name: _cast(value, dtype, name) for name, value in further["atom"].items()},
    )


def to_atoms(data: AtomicData) -> ase.Atoms:
    """Make an `ase.Atoms`; labels stand in a `SinglePointCalculator`, other fields in ``info`` and ``arrays``.

    A label that is NaN is left out. Edges are left out.
    """
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.stress import full_3x3_to_voigt_6_stress

    array = {name: tensor.detach().cpu().numpy() for name, tensor in data.fields.items()}
    atoms = Atoms(
        numbers=array["atomic_numbers"],
        positions=array["positions"],
        cell=array.get("cell"),
        pbc=array.get("pbc"),
        masses=array.get("masses"),
    )
    results: dict[str, Any] = {}
    for name in RESULTS:
        value = array.pop(name, None)
        if value is not None and not np.isnan(value).any():
            results[name] = full_3x3_to_voigt_6_stress(value) if name == "stress" else float(value) if name == "energy" else value
    for name in ("positions", "atomic_numbers", "cell", "pbc", "masses"):
        array.pop(name, None)
    for name, value in array.items():
        if data.levels[name] == Level.ATOM:
            atoms.set_array(name, value.copy())
        elif data.levels[name] == Level.SYSTEM and not (name == "charge" and math.isnan(value)):
            atoms.info[name] = value.item() if value.ndim == 0 else value.copy()
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def from_structure(structure: Any, *, dtype: torch.dtype = torch.float64) -> AtomicData:
    """Read a pymatgen ``Structure`` (with its lattice) or ``Molecule`` (with its charge).

    Raises
    ------
    DataError
        A disordered structure, or an object that is neither.
    """
    if not hasattr(structure, "cart_coords"):
        raise DataError(
            "no pymatgen Structure or Molecule", found=type(structure).__name__, fix="use AtomicData.from_atoms for ASE's"
        )
    if not getattr(structure, "is_ordered", True):
        raise DataError(
            "a disordered structure has no definite atoms",
            fix="order it first, for example with OrderDisorderedStructureTransformation",
        )
    # A species may carry an oxidation state; both it and an element know Z.
    numbers = [int(site.specie.Z) for site in structure]
    fields: dict[str, Any] = {}
    lattice = getattr(structure, "lattice", None)
    if lattice is not None:
        fields["cell"], fields["pbc"] = np.array(lattice.matrix), np.array(getattr(lattice, "pbc", (True,) * 3), dtype=bool)
    elif getattr(structure, "charge", None) is not None:
        fields["charge"] = float(structure.charge)
    return AtomicData(
        np.asarray(structure.cart_coords, dtype=_numpy(dtype)),
        numbers,
        **{name: _cast(value, dtype, name) for name, value in fields.items()},
    )


def _results(atoms: ase.Atoms) -> dict[str, Any]:
    """The calculator's results for exactly these positions, read without waking it."""
    calc = atoms.calc
    found = {name: value for name in RESULTS if (value := (getattr(calc, "results", None) or {}).get(name)) is not None}
    if not found:
        return {}
    from ase.calculators.singlepoint import SinglePointCalculator

    changes = calc.check_state(atoms)
    if not changes:
        return found
    if isinstance(calc, SinglePointCalculator):
        raise DataError(
            "the stored labels belong to another structure",
            found=f"{', '.join(sorted(found))} from before a change of {', '.join(map(str, changes))}",
            needed="labels of these very positions, cell and pbc",
            fix="set atoms.calc = None after changing a labelled structure, or read with labels=False",
        )
    return {}  # a live calculator that last ran for other positions simply has none for these


def _full_stress(stress: Any) -> Any:
    stress = np.asarray(stress)
    if stress.shape != (6,):
        return stress
    xx, yy, zz, yz, xz, xy = stress
    return np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])


def _numpy(dtype: torch.dtype) -> type:
    if dtype not in (torch.float32, torch.float64):
        raise DataError("structures are kept in float32 or float64", found=dtype)
    return np.float32 if dtype == torch.float32 else np.float64


def _cast(value: Any, dtype: torch.dtype, name: str) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f" and name != "energy":
        return value.astype(_numpy(dtype))
    return value
