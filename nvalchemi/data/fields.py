"""The names that the package knows: level, shape, kind and unit of each field of a structure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


class Level(StrEnum):
    """What one row of a field belongs to: a whole system, an atom or an edge."""

    SYSTEM = "system"
    ATOM = "atom"
    EDGE = "edge"


@dataclass(frozen=True)
class FieldSpec:
    """One field.

    Parameters
    ----------
    level
        What a row belongs to.
    shape
        Shape of one row, ``()`` for a number.
    kind
        ``"float"`` (the object's dtype), ``"float64"``, ``"int64"`` or ``"bool"``.
    unit
        Unit of the numbers, ``""`` where there is none.
    missing
        What the rows of a structure without this field hold in a batch: NaN unless zero is the meaning of "none".
    """

    level: Level
    shape: tuple[int, ...]
    kind: str
    unit: str = ""
    missing: float = float("nan")


FIELDS: dict[str, FieldSpec] = {
    "positions": FieldSpec(Level.ATOM, (3,), "float", "angstrom"),
    "atomic_numbers": FieldSpec(Level.ATOM, (), "int64"),
    # A structure without a cell is one that repeats nowhere: zeros and False say so, NaN would spread into positions.
    "cell": FieldSpec(Level.SYSTEM, (3, 3), "float", "angstrom", 0.0),
    "pbc": FieldSpec(Level.SYSTEM, (3,), "bool", "", 0.0),
    # Total energies are large and their differences small: float32 keeps seven digits, which is 10 meV of 100 keV.
    "energy": FieldSpec(Level.SYSTEM, (), "float64", "eV"),
    "forces": FieldSpec(Level.ATOM, (3,), "float", "eV/angstrom"),
    "stress": FieldSpec(Level.SYSTEM, (3, 3), "float", "eV/angstrom^3"),
    "charge": FieldSpec(Level.SYSTEM, (), "float", "e"),
    "dipole": FieldSpec(Level.SYSTEM, (3,), "float", "e*angstrom"),
    "magmoms": FieldSpec(Level.ATOM, (), "float", "bohr_magneton"),
    "charges": FieldSpec(Level.ATOM, (), "float", "e"),
    "masses": FieldSpec(Level.ATOM, (), "float", "u"),
    "edge_index": FieldSpec(Level.EDGE, (2,), "int64"),
    "edge_shift": FieldSpec(Level.EDGE, (3,), "float", "", 0.0),
}
"""Every known field. ``edge_index`` is stored as (2, e): its rows run along the second axis."""

KNOWN_LEVELS: dict[str, Level] = {name: spec.level for name, spec in FIELDS.items()}


def row_axis(name: str) -> int:
    """The axis of a field's tensor along which its rows run: 1 for ``edge_index``, 0 for all others."""
    return 1 if name == "edge_index" else 0


def missing_value(name: str, dtype: torch.dtype) -> float:
    """What fills the rows of structures that lack the field: NaN for floats without a meaning of "none", else 0."""
    if not dtype.is_floating_point:
        return 0.0
    spec = FIELDS.get(name)
    return float("nan") if spec is None else spec.missing


def cast_target(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that field ``name`` takes in an object of floating dtype ``dtype``: energies stay float64."""
    spec = FIELDS.get(name)
    return torch.float64 if spec is not None and spec.kind == "float64" else dtype
