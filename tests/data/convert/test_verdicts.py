"""Units and signs that the numbers contradict."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator

from nvalchemi.data.convert import convert
from nvalchemi.data.units import BOHR, HARTREE, parse_unit
from nvalchemi.errors import DataError
from tests.data.convert.files import copper, ethanol, rmd17, write

FACTORS = {unit: parse_unit(unit, "energy").factor for unit in ("eV", "kcal/mol", "kJ/mol", "Hartree")}


def scaled(frames, *, energy=1.0, forces=1.0, stress=1.0):
    out = []
    for atoms in frames:
        results = {**atoms.calc.results}
        for name, factor in (("energy", energy), ("forces", forces), ("stress", stress)):
            if name in results:
                results[name] = results[name] * factor
        copy = atoms.copy()
        copy.calc = SinglePointCalculator(copy, **results)
        out.append(copy)
    return out


@pytest.mark.parametrize("written", FACTORS)
@pytest.mark.parametrize("read", FACTORS)
def test_all_electron_energies_show_their_unit(tmp_path, written, read):
    path = rmd17(tmp_path / "a.npz", ethanol(4), 1 / FACTORS[written])
    if written == read:
        conversion = convert([path], tmp_path / "a.zarr", units=[read])
        assert [finding.level for finding in conversion.findings] == ["fine"]
        return
    with pytest.raises(DataError, match=f"read as {read}, but are total energies in {written}") as caught:
        convert([path], tmp_path / "a.zarr", units=[read])
    assert f"pass --units {written}" in str(caught.value)
    conversion = convert([path], tmp_path / "a.zarr", units=[read], trust_units=True)
    assert conversion.findings[0].level == "certain"


def test_energies_below_all_electrons_are_impossible(tmp_path):
    """Copper with a pseudopotential, -1300 eV an atom, is believed; the same in kcal/mol and more is not."""
    frames = copper()
    for atoms in frames:
        atoms.calc.results["energy"] = -1300.0 * 4
    convert([write(tmp_path / "a.traj", frames)], tmp_path / "a.zarr")
    path = write(tmp_path / "b.traj", scaled(frames, energy=100))
    with pytest.raises(DataError, match="are impossible") as caught:
        convert([path], tmp_path / "b.zarr")
    assert "kcal/mol or kJ/mol" in str(caught.value)


@pytest.mark.parametrize("energy", [-3.7, 0.3, 28.0, -45000.0])
def test_any_possible_energy_of_copper_is_let_pass(tmp_path, energy):
    frames = copper([1.0, 1.0])
    for atoms in frames:
        atoms.calc.results["energy"] = energy * 4
    assert convert([write(tmp_path / "a.traj", frames)], tmp_path / "a.zarr").summary.structures == 2


def walk(n=8):
    """Copper along a line of displacements, so that neighbouring frames are close."""
    start, end = copper([1.0], 0.0)[0], copper([1.0], 0.15)[0]
    from ase.calculators.emt import EMT

    frames = []
    for t in np.linspace(0, 1, n):
        atoms = start.copy()
        atoms.positions = (1 - t) * start.positions + t * end.positions
        atoms.wrap()
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        frames.append(atoms)
    return frames


def test_forces_that_agree_with_the_energy(tmp_path):
    conversion = convert([write(tmp_path / "a.traj", walk())], tmp_path / "a.zarr")
    assert [f.text for f in conversion.findings] == ["the forces agree with the changes of the energy in 7 pairs of frames"]


def test_gradients_taken_for_forces(tmp_path):
    with pytest.raises(DataError, match="the forces have the wrong sign"):
        convert([write(tmp_path / "a.traj", scaled(walk(), forces=-1))], tmp_path / "a.zarr")


@pytest.mark.parametrize("factor", [1 / FACTORS["kcal/mol"], BOHR / HARTREE])
def test_units_of_energy_and_forces_that_contradict_each_other(tmp_path, factor):
    with pytest.raises(DataError, match="the units of energy and forces contradict each other"):
        convert([write(tmp_path / "a.traj", scaled(walk(), forces=factor))], tmp_path / "a.zarr")


SCAN = np.linspace(0.94, 1.06, 8)


@pytest.mark.parametrize("rattle", [0.0, 0.02])
def test_stress_that_agrees_with_the_energy(tmp_path, rattle):
    conversion = convert([write(tmp_path / "a.traj", copper(SCAN, rattle))], tmp_path / "a.zarr")
    assert "the stress agrees" in conversion.findings[-1].text


@pytest.mark.parametrize(
    ("factor", "fix"),
    [
        (-1, "pass --stress-sign compression"),
        (1 / parse_unit("GPa", "stress").factor, "pass --units stress=GPa"),
        (1 / parse_unit("kbar", "stress").factor, "pass --units stress=kbar"),
        (-1 / parse_unit("bar", "stress").factor, "pass --units stress=bar --stress-sign compression"),
    ],
)
def test_stress_of_another_sign_or_unit(tmp_path, factor, fix):
    """B15: the volume scan itself says what the stress is; as advised it is right."""
    path = write(tmp_path / "a.traj", scaled(copper(SCAN, 0.02), stress=factor))
    with pytest.raises(DataError, match="the stress contradicts the changes of the energy with the cell") as caught:
        convert([path], tmp_path / "a.zarr")
    assert fix in str(caught.value)
    words = fix.split()[1:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    conversion = convert(
        [path],
        tmp_path / "a.zarr",
        units=[options["--units"]] if "--units" in options else (),
        stress_sign=options.get("--stress-sign"),
    )
    assert "the stress agrees" in conversion.findings[-1].text


def test_virial_of_the_wrong_sign(tmp_path):
    frames = []
    for atoms in copper(SCAN, 0.02):
        copy = atoms.copy()
        copy.info["virial"] = ase.stress.voigt_6_to_full_3x3_stress(atoms.calc.results["stress"]) * atoms.get_volume()
        copy.calc = SinglePointCalculator(copy, energy=atoms.calc.results["energy"], forces=atoms.calc.results["forces"])
        frames.append(copy)
    path = write(tmp_path / "a.extxyz", frames)
    with pytest.raises(DataError, match="the virial contradicts") as caught:
        convert([path], tmp_path / "a.zarr")
    assert "pass --stress-sign tension" in str(caught.value)
    convert([path], tmp_path / "a.zarr", stress_sign="tension")


def test_sizes_beyond_reason(tmp_path):
    """Without a scan to tell, only the size speaks: doubtful ones are warnings, impossible ones errors."""
    frames = copper([1.0, 0.97])
    path = write(tmp_path / "a.traj", scaled(frames, stress=1 / parse_unit("bar", "stress").factor))
    with pytest.raises(DataError, match="beyond any material") as caught:
        convert([path], tmp_path / "a.zarr")
    assert "stress=bar" in str(caught.value)
    conversion = convert([write(tmp_path / "b.traj", scaled(frames, forces=100))], tmp_path / "b.zarr")
    assert [(f.level, f.about) for f in conversion.findings] == [("doubtful", "forces")]


def test_a_certain_verdict_does_not_wait_for_the_end(tmp_path):
    progress = []
    path = rmd17(tmp_path / "a.npz", ethanol(200), 1 / FACTORS["kcal/mol"])
    with pytest.raises(DataError, match="in 64 frames"):
        convert([path], tmp_path / "a.zarr", progress=lambda done, total: progress.append((done, total)))
    assert progress == [(32, 200)]
