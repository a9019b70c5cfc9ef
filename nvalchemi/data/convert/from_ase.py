"""One ``ase.Atoms`` as a frame: results, info and arrays under their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nvalchemi.data.convert.frames import Frame

_GEOMETRY = {"numbers", "positions"}
_SYSTEM_RESULTS = {"energy", "free_energy", "stress", "dipole", "magmom", "dielectric_tensor", "polarizability"}


def frame_from_atoms(atoms: Any, extra: Mapping[str, Any] | None = None) -> Frame:
    """The frame of an ``ase.Atoms``.

    Results are taken from the calculator as they are stored, so that constraints do not zero the forces of fixed atoms.
    ``extra`` holds further values (the key-value pairs of a database row). Where a key is a result and an info key at once,
    the result has the name and the other is called ``info:KEY``.
    """
    cell = np.asarray(atoms.cell.array, dtype=np.float64)
    frame = Frame(
        numbers=np.asarray(atoms.numbers, dtype=np.int64),
        positions=np.asarray(atoms.positions, dtype=np.float64),
        cell=cell if cell.any() else None,
        pbc=np.asarray(atoms.pbc, dtype=bool),
    )
    frame.fixed = _fixed(atoms)
    results = dict(atoms.calc.results) if atoms.calc is not None else {}
    stress = results.get("stress")
    if stress is not None and np.shape(stress) == (6,):
        results["stress"] = full_stress(stress)
    arrays = {key: value for key, value in atoms.arrays.items() if key not in _GEOMETRY}
    for prefix, values in (("", results), ("info:", {**atoms.info, **(extra or {})}), ("array:", arrays)):
        for key, value in values.items():
            if value is None:
                continue
            name = f"{prefix}{key}" if key in frame.system or key in frame.atom else str(key)
            by_atom = prefix == "array:" or (prefix == "" and _is_per_atom(key, value, len(atoms)))
            (frame.atom if by_atom else frame.system)[name] = value
    return frame


def _fixed(atoms: Any) -> np.ndarray | None:
    """Atoms that ``FixAtoms`` holds; other constraints leave an atom some freedom."""
    from ase.constraints import FixAtoms

    fixed = np.zeros(len(atoms), dtype=bool)
    for constraint in atoms.constraints:
        if isinstance(constraint, FixAtoms):
            fixed[constraint.index] = True
    return fixed if fixed.any() else None


def _is_per_atom(key: str, value: Any, atoms: int) -> bool:
    """Whether a calculator result belongs to atoms; by name first, for in three atoms a dipole has the shape of charges."""
    if key in _SYSTEM_RESULTS:
        return False
    return np.ndim(value) >= 1 and len(value) == atoms


def full_stress(voigt: Any) -> np.ndarray:
    """The 3x3 stress of ASE's six components xx, yy, zz, yz, xz, xy."""
    xx, yy, zz, yz, xz, xy = np.asarray(voigt, dtype=np.float64)
    return np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
