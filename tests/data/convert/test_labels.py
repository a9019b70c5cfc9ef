"""Which key becomes which label: nothing guessed, everything told."""

from __future__ import annotations

import numpy as np
import pytest

from nvalchemi.data.convert import convert
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.errors import DataError
from tests.data.convert.files import copper, ethanol, renamed, write


def test_b11_a_label_under_another_name_is_never_taken_unasked(tmp_path):
    """B11: the energy under REF_energy is an error that lists what there is, not a store without energies."""
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="REF_energy", forces="REF_forces")
    with pytest.raises(DataError) as caught:
        convert([path], tmp_path / "a.zarr")
    text = str(caught.value)
    assert "no energy, forces or stress was found" in text
    assert "REF_energy" in text
    assert "--energy-key REF_energy --forces-key REF_forces" in text
    assert not (tmp_path / "a.zarr").exists()
    convert([path], tmp_path / "a.zarr", energy_key="REF_energy", forces_key="REF_forces")
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(3))
    np.testing.assert_allclose(batch.energy, [atoms.calc.results["energy"] for atoms in ethanol()])


def test_a_missing_second_label_is_told(tmp_path):
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="energy", forces="REF_forces")
    conversion = convert([path], tmp_path / "a.zarr")
    assert not conversion.labels.used["forces"]
    assert conversion.labels.left["forces"]["REF_forces"].frames == 3


@pytest.mark.parametrize(
    ("option", "key", "hint"),
    [
        ("energy_key", "REF_enrgy", "--energy-key REF_energy"),
        ("forces_key", "ref_forces", "--forces-key REF_forces"),
        ("stress_key", "sigma", None),
        ("energy_key", "xyzzy", "--energy-key REF_energy"),
    ],
)
def test_an_asked_key_that_is_nowhere(tmp_path, option, key, hint):
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="REF_energy", forces="REF_forces")
    with pytest.raises(DataError, match=f"no frame has the key '{key}'") as caught:
        convert([path], tmp_path / "a.zarr", **{option: key})
    assert "REF_energy, REF_forces" in str(caught.value)
    assert hint is None or f"did you mean {hint}" in str(caught.value)


def test_an_asked_key_of_the_wrong_level(tmp_path):
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="REF_energy", forces="REF_forces")
    with pytest.raises(DataError, match=r"'REF_forces' that --energy-key asks for is no energy.*--energy-key REF_energy"):
        convert([path], tmp_path / "a.zarr", energy_key="REF_forces")


def test_an_asked_key_that_some_frames_lack(tmp_path):
    frames = ethanol(4)
    path = renamed(tmp_path / "a.xyz", frames[:3], energy="E", forces="F")
    other = renamed(tmp_path / "b.xyz", frames[3:], energy="E")
    with pytest.raises(DataError, match="1 of 4 frames lack the key 'F'"):
        convert([path, other], tmp_path / "a.zarr", energy_key="E", forces_key="F")
    convert([path, other], tmp_path / "a.zarr", energy_key="E", forces_key="F", unlabelled="keep")
    assert AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(4)).has("forces").tolist() == [True] * 3 + [False]


def test_an_isolated_atom_needs_no_forces(tmp_path):
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="E", forces="F")
    atom = ethanol(1)[0][:1]
    atom.info["E"] = -1029.5
    convert([path, write(tmp_path / "b.xyz", [atom])], tmp_path / "a.zarr", energy_key="E", forces_key="F")
    assert len(AtomicDataZarrReader(tmp_path / "a.zarr")) == 4


def test_energy_is_taken_and_free_energy_named(tmp_path):
    frames = ethanol()
    for atoms in frames:
        atoms.calc.results["free_energy"] = atoms.calc.results["energy"] - 0.9
    conversion = convert([write(tmp_path / "a.xyz", frames)], tmp_path / "a.zarr")
    assert conversion.labels.used["energy"] == {"energy": 3}
    assert conversion.labels.left["energy"]["free_energy"].difference == pytest.approx(0.1)
    conversion = convert([tmp_path / "a.xyz"], tmp_path / "b.zarr", energy_key="free_energy")
    assert conversion.labels.left["energy"]["energy"].frames == 3


def test_what_only_sounds_like_an_energy_is_no_candidate(tmp_path):
    frames = ethanol()
    for atoms in frames:
        atoms.info |= {"energy_cutoff": 500.0, "elec_energy_tol": 1e-8, "energy_unit": "eV", "energy_note": "PBE"}
        atoms.calc.results["energies"] = np.zeros(9)  # per atom: not the total
    conversion = convert([write(tmp_path / "a.xyz", frames)], tmp_path / "a.zarr")
    assert conversion.labels.left["energy"] == {}


def test_a_stress_is_preferred_to_a_virial_unless_asked(tmp_path):
    frames = copper()
    for atoms in frames:
        atoms.info["virial"] = np.eye(3)
    path = write(tmp_path / "a.xyz", frames)
    conversion = convert([path], tmp_path / "a.zarr")
    assert conversion.labels.used["stress"] == {"stress": 3}
    assert conversion.labels.left["virial"]["virial"].frames == 3
    conversion = convert([path], tmp_path / "b.zarr", virial_key="virial", trust_units=True)
    assert not conversion.labels.used["stress"]
    stress = AtomicDataZarrReader(tmp_path / "b.zarr").read(0).stress
    np.testing.assert_allclose(stress, -np.eye(3) / frames[0].get_volume())


def unlabelled(path, where=(1, 3)):
    frames = ethanol(5)
    for i in where:
        frames[i].calc = None
    return write(path, frames)


def test_unlabelled_frames_are_refused_with_their_indices(tmp_path):
    with pytest.raises(DataError, match="2 of 5 frames have neither energy nor forces nor stress") as caught:
        convert([unlabelled(tmp_path / "a.traj")], tmp_path / "a.zarr")
    assert "a.traj: frames 1, 3" in str(caught.value)
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.parametrize(("choice", "energies"), [("skip", 3), ("keep", 5)])
def test_unlabelled_frames_are_skipped_or_kept_when_asked(tmp_path, choice, energies):
    conversion = convert([unlabelled(tmp_path / "a.traj")], tmp_path / "a.zarr", unlabelled=choice)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert len(reader) == energies
    assert int(reader.read_many(range(energies)).has("energy").sum()) == 3
    assert conversion.files[0].unlabelled == [1, 3]
    assert conversion.summary.unlabelled == (2 if choice == "keep" else 0)


def test_a_failed_append_leaves_the_store_as_it_was(tmp_path):
    convert([write(tmp_path / "a.xyz", ethanol())], tmp_path / "a.zarr")
    with pytest.raises(DataError, match="2 of 5 frames"):
        convert([unlabelled(tmp_path / "b.traj")], tmp_path / "a.zarr", append=True)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    reader.verify()
    assert len(reader) == 3


def test_a_nan_label_is_no_label(tmp_path):
    frames = ethanol(3)
    frames[1].calc.results["energy"] = np.nan
    conversion = convert([write(tmp_path / "a.traj", frames)], tmp_path / "a.zarr")
    assert conversion.labels.used["energy"] == {"energy": 2}
    assert conversion.summary.fields["energy"].structures == 2
    frames[1].calc.results["forces"][:] = np.nan
    with pytest.raises(DataError, match="1 of 3 frames"):
        convert([write(tmp_path / "b.traj", frames)], tmp_path / "b.zarr")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("E", np.inf, "the energy 'E' is infinite"),
        ("E", "low", "the energy 'E' is no number"),
        ("E", np.zeros(3), "the energy 'E' has the wrong shape"),
        ("S", np.zeros(4), "the stress 'S' has the wrong shape"),
        ("V", np.zeros((3, 3)), "the virial 'V' cannot be made a stress"),
    ],
)
def test_values_that_are_no_labels(tmp_path, key, value, message):
    frames = ethanol(2)
    frames[1].info[key] = value
    frames[0].info[key] = {"E": -4209.0, "S": np.zeros(6), "V": np.zeros((3, 3))}[key]
    option = {"E": "energy_key", "S": "stress_key", "V": "virial_key"}[key]
    with pytest.raises(DataError, match=message) as caught:
        convert([write(tmp_path / "a.xyz", frames)], tmp_path / "a.zarr", **{option: key})
    assert "a.xyz, frame " in str(caught.value)


def test_positions_that_are_not_finite_are_named(tmp_path):
    frames = ethanol(3)
    frames[2].positions[4, 1] = np.nan
    with pytest.raises(DataError, match=r"a\.traj, frame 2: .*finite"):
        convert([write(tmp_path / "a.traj", frames)], tmp_path / "a.zarr")


def test_a_declared_unit_is_held_to(tmp_path):
    frames = ethanol()
    for atoms in frames:
        atoms.info |= {"energy_unit": "eV", "forces_unit": "eV/A"}
    path = write(tmp_path / "a.xyz", frames)
    convert([path], tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"declares another unit of energy.*energy_unit=eV"):
        convert([path], tmp_path / "b.zarr", units=["kcal/mol"], trust_units=True)
    for atoms in frames:
        atoms.info["forces_unit"] = "Hartree/bohr"
    with pytest.raises(DataError, match="--units forces=Hartree/bohr"):
        convert([write(tmp_path / "b.xyz", frames)], tmp_path / "b.zarr")
