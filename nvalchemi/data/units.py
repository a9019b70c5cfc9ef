"""Units of imported labels and their factors to eV and Å, the units of everything inside.

Constants: CODATA 2022 (Hartree, bohr) and the exact SI values of the elementary charge, the Avogadro constant and the
thermochemical calorie.

>>> round(parse_unit("kcal/mol", "energy").factor, 7)
0.0433641
>>> Units.parse(["energy=Hartree", "length=bohr"]).forces.name
'Hartree/bohr'
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nvalchemi.errors import DataError

ELEMENTARY_CHARGE = 1.602176634e-19  # C
AVOGADRO = 6.02214076e23  # 1/mol
HARTREE = 27.211386245981  # eV
BOHR = 0.529177210544  # Å

_KJ_PER_MOL = 1000 / (ELEMENTARY_CHARGE * AVOGADRO)
_PASCAL = 1e-30 / ELEMENTARY_CHARGE  # J/m^3 in eV/Å^3

ENERGY = {
    "eV": 1.0,
    "meV": 1e-3,
    "kcal/mol": 4.184 * _KJ_PER_MOL,
    "kJ/mol": _KJ_PER_MOL,
    "Hartree": HARTREE,
    "mHartree": 1e-3 * HARTREE,
    "Rydberg": HARTREE / 2,
    "J": 1 / ELEMENTARY_CHARGE,
}
LENGTH = {"Å": 1.0, "bohr": BOHR, "nm": 10.0, "pm": 0.01}
PRESSURE = {
    "GPa": 1e9 * _PASCAL,
    "MPa": 1e6 * _PASCAL,
    "Pa": _PASCAL,
    "Mbar": 1e11 * _PASCAL,
    "kbar": 1e8 * _PASCAL,
    "bar": 1e5 * _PASCAL,
    "atm": 101325 * _PASCAL,
}

# other spellings; compared without regard to case, except where case tells meV from MeV
_ALIASES = {
    "ha": "Hartree",
    "eh": "Hartree",
    "hartrees": "Hartree",
    "mha": "mHartree",
    "ry": "Rydberg",
    "kcal": "kcal/mol",
    "kj": "kJ/mol",
    "a": "Å",
    "å": "Å",
    "ang": "Å",
    "angstrom": "Å",
    "angstroms": "Å",
    "ångström": "Å",
    "bohrs": "bohr",
    "a0": "bohr",
    "nanometer": "nm",
}
_BASE = {name.lower(): name for table in (ENERGY, LENGTH, PRESSURE) for name in table} | _ALIASES

#: quantity -> powers of (energy, length) of its unit
QUANTITIES = {"energy": (1, 0), "length": (0, 1), "forces": (1, -1), "stress": (1, -3), "virial": (1, 0)}


@dataclass(frozen=True)
class Unit:
    """A unit by name and its ``factor``: a value in this unit times the factor is in eV and Å."""

    name: str
    factor: float

    def same_as(self, other: Unit) -> bool:
        """Whether both are the same size, whatever they are called."""
        return abs(self.factor / other.factor - 1) < 1e-6

    def __str__(self) -> str:
        return self.name


def parse_unit(text: str, quantity: str) -> Unit:
    """Read the unit of an energy, length, force, stress or virial.

    Parameters
    ----------
    text
        ``eV``, ``kcal/mol``, ``Hartree/bohr``, ``eV/A^3``, ``kbar``, ...; case and the spelling of Å do not matter.
    quantity
        One of ``energy``, ``length``, ``forces``, ``stress``, ``virial``.

    Raises
    ------
    DataError
        If the unit is not known or is one of another quantity.
    """
    powers = QUANTITIES[quantity]
    if quantity == "stress" and (name := _base(text)) in PRESSURE:
        return Unit(name, PRESSURE[name])
    energy, length, power = _split(text)
    if energy is None and length in LENGTH and powers == (0, 1) and power == 1:
        return Unit(length, LENGTH[length])
    if energy in ENERGY and powers[0] == 1 and -power == powers[1]:
        if power == 0:
            return Unit(energy, ENERGY[energy])
        if length in LENGTH:
            return Unit(_compose(energy, length, power), ENERGY[energy] / LENGTH[length] ** power)
    raise _unknown(text, quantity)


def _base(text: str) -> str:
    stripped = text.strip()
    if stripped[:1] == "M" and stripped[1:] == "eV":
        return stripped  # mega, not milli: not in the table, so refused
    return _BASE.get(stripped.lower(), stripped)


def _split(text: str) -> tuple[str | None, str, int]:
    """``(energy, length, power of 1/length)``; for a bare length the energy is None and the power 1."""
    body = re.sub(r"[\s_*]+", "", text).replace("³", "^3")
    if (base := _base(body)) in ENERGY:
        return base, "", 0
    if base in LENGTH:
        return None, base, 1
    match = re.fullmatch(r"(.+)/([^/^]+?)(?:\^?([23]))?", body)
    if match is None:
        return body, "", 0
    return _base(match[1]), _base(match[2]), int(match[3] or 1)


def _compose(energy: str, length: str, power: int) -> str:
    return f"{energy}/{length}" + (f"^{power}" if power > 1 else "")


def _examples(quantity: str) -> str:
    if quantity in ("energy", "virial"):
        return ", ".join(ENERGY)
    if quantity == "length":
        return ", ".join(LENGTH)
    if quantity == "forces":
        return "an energy over a length, as eV/A, kcal/mol/A, Hartree/bohr"
    return ", ".join([*PRESSURE, "or an energy over a volume, as eV/A^3, Hartree/bohr^3"])


def _unknown(text: str, quantity: str) -> DataError:
    close = difflib.get_close_matches(text.lower(), list(_BASE), n=1)
    return DataError(
        f"{text!r} is no unit of {quantity} that is known",
        needed=_examples(quantity),
        fix=f"did you mean {_BASE[close[0]]}?" if close else None,
    )


@dataclass(frozen=True)
class Units:
    """The units that a file is written in.

    ``energy`` and ``length`` set those of forces, stress and virial, unless these are given themselves.
    """

    energy: Unit = Unit("eV", 1.0)
    length: Unit = Unit("Å", 1.0)
    forces: Unit = Unit("eV/Å", 1.0)
    stress: Unit = Unit("eV/Å^3", 1.0)
    virial: Unit = Unit("eV", 1.0)

    @classmethod
    def parse(cls, texts: Iterable[str] = ()) -> Units:
        """Read what was typed: ``["kcal/mol"]`` or ``["energy=kcal/mol,length=bohr", "stress=bar"]``.

        A unit alone is that of the energy. Without any: eV and Å.
        """
        given: dict[str, Unit] = {}
        for item in (part.strip() for text in texts for part in text.split(",")):
            name, separator, unit = item.partition("=")
            quantity = _quantity(name) if separator else "energy"
            value = parse_unit(unit if separator else item, quantity)
            if quantity in given and not given[quantity].same_as(value):
                raise DataError(f"two units are given for {quantity}", found=f"{given[quantity]} and {value}", needed="one")
            given[quantity] = value
        energy = given.get("energy", cls.energy)
        length = given.get("length", cls.length)
        derived = {
            quantity: Unit(_compose(energy.name, length.name, -power), energy.factor * length.factor**power) if power else energy
            for quantity, (_, power) in QUANTITIES.items()
            if quantity not in ("energy", "length")
        }
        return cls(**{"energy": energy, "length": length} | derived | given)

    def __getitem__(self, quantity: str) -> Unit:
        unit = getattr(self, quantity)
        assert isinstance(unit, Unit)
        return unit

    def as_dict(self) -> dict[str, dict[str, str | float]]:
        """Names and factors, for the metadata of a store."""
        return {quantity: {"unit": self[quantity].name, "factor": self[quantity].factor} for quantity in QUANTITIES}


def _quantity(name: str) -> str:
    wanted = name.strip().lower()
    names = {"force": "forces", "positions": "length", "energies": "energy"} | {q: q for q in QUANTITIES}
    if wanted not in names:
        raise DataError(f"units can not be given for {name.strip()!r}", needed=", ".join(QUANTITIES))
    return names[wanted]
