"""Units: factors against independent tables, spellings, refusals."""

from __future__ import annotations

import ase.units
import pytest

from nvalchemi.data.units import ENERGY, LENGTH, PRESSURE, Unit, Units, parse_unit
from nvalchemi.errors import DataError


@pytest.mark.parametrize(
    ("text", "quantity", "factor"),
    [
        ("eV", "energy", 1.0),
        ("meV", "energy", 1e-3),
        ("kcal/mol", "energy", ase.units.kcal / ase.units.mol),
        ("kJ/mol", "energy", ase.units.kJ / ase.units.mol),
        ("Hartree", "energy", ase.units.Hartree),
        ("Ha", "energy", ase.units.Hartree),
        ("hartree", "energy", ase.units.Hartree),
        ("Ry", "energy", ase.units.Rydberg),
        ("eV", "virial", 1.0),
        ("A", "length", 1.0),
        ("Å", "length", 1.0),
        ("angstrom", "length", 1.0),
        ("bohr", "length", ase.units.Bohr),
        ("nm", "length", 10.0),
        ("eV/A", "forces", 1.0),
        ("ev/ang", "forces", 1.0),
        ("eV / Å", "forces", 1.0),
        ("kcal/mol/A", "forces", ase.units.kcal / ase.units.mol),
        ("kJ/mol/nm", "forces", ase.units.kJ / ase.units.mol / 10),
        ("Ha/bohr", "forces", ase.units.Hartree / ase.units.Bohr),
        ("Eh/a0", "forces", ase.units.Hartree / ase.units.Bohr),
        ("eV/A^3", "stress", 1.0),
        ("eV/A3", "stress", 1.0),
        ("eV/Å³", "stress", 1.0),
        ("GPa", "stress", ase.units.GPa),
        ("gpa", "stress", ase.units.GPa),
        ("kbar", "stress", 1e3 * ase.units.bar),
        ("KBAR", "stress", 1e3 * ase.units.bar),
        ("bar", "stress", ase.units.bar),
        ("Hartree/bohr^3", "stress", ase.units.Hartree / ase.units.Bohr**3),
    ],
)
def test_factors_agree_with_ase(text, quantity, factor):
    assert parse_unit(text, quantity).factor == pytest.approx(factor, rel=3e-8)


def test_known_numbers():
    assert parse_unit("kcal/mol", "energy").factor == pytest.approx(0.0433641, abs=5e-8)
    assert parse_unit("bar", "stress").factor == pytest.approx(6.2415e-7, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("eV", "forces"),
        ("eV/A", "energy"),
        ("eV/A", "stress"),
        ("eV/A^3", "forces"),
        ("eV/A^2", "forces"),
        ("GPa", "energy"),
        ("bohr", "energy"),
        ("eV", "length"),
        ("MeV", "energy"),
        ("parsec", "length"),
        ("", "energy"),
        ("eV/furlong", "forces"),
    ],
)
def test_what_is_no_unit_of_the_quantity_is_refused(text, quantity):
    with pytest.raises(DataError, match="no unit of"):
        parse_unit(text, quantity)


def test_a_misspelt_unit_gets_a_hint():
    with pytest.raises(DataError, match="did you mean Hartree"):
        parse_unit("hartre", "energy")


def test_every_name_reads_back():
    for quantity, table in (("energy", ENERGY), ("length", LENGTH), ("stress", PRESSURE)):
        for name, factor in table.items():
            assert parse_unit(name, quantity) == Unit(name, factor)


def test_a_unit_alone_is_that_of_the_energy_and_sets_the_forces():
    units = Units.parse(["kcal/mol"])
    assert (units.energy.name, units.forces.name, units.length.name) == ("kcal/mol", "kcal/mol/Å", "Å")
    assert units.forces.factor == units.energy.factor == units.virial.factor


def test_energy_and_length_set_the_derived_units():
    units = Units.parse(["energy=Ha,length=bohr"])
    assert units.forces.factor == pytest.approx(ase.units.Hartree / ase.units.Bohr, rel=1e-7)
    assert units.stress.factor == pytest.approx(ase.units.Hartree / ase.units.Bohr**3, rel=1e-7)
    assert units.forces.name == "Hartree/bohr"
    assert units.stress.name == "Hartree/bohr^3"


def test_a_quantity_given_itself_wins():
    units = Units.parse(["energy=kcal/mol", "stress=bar", "forces=eV/A"])
    assert (units.energy.name, units.stress.name, units.forces.name) == ("kcal/mol", "bar", "eV/Å")


def test_no_units_are_ev_and_angstrom():
    assert Units.parse() == Units()
    assert all(entry["factor"] == 1.0 for entry in Units().as_dict().values())


def test_contradictions_and_unknown_quantities_are_refused():
    with pytest.raises(DataError, match="two units are given for energy"):
        Units.parse(["eV", "energy=kcal/mol"])
    with pytest.raises(DataError, match="can not be given for 'temperature'"):
        Units.parse(["temperature=K"])
    with pytest.raises(DataError, match="no unit of energy"):
        Units.parse([""])
