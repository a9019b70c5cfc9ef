"""Files to a store: the labels that come out, what is remembered, and what is left behind by a failure."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
import torch
from ase.constraints import FixAtoms

from nvalchemi import __version__
from nvalchemi.data.convert import convert
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.units import parse_unit
from nvalchemi.errors import ConfigError, DataError
from tests.data.convert.files import copper, ethanol, renamed, rmd17, write

KCAL = parse_unit("kcal/mol", "energy").factor


def assert_same(reader, frames):
    """The store holds the frames, with energy, forces and (where they have one) stress, to 1e-6."""
    assert len(reader) == len(frames)
    for i, atoms in enumerate(frames):
        data, labels = reader.read(i), atoms.calc.results
        assert data.atomic_numbers.tolist() == atoms.numbers.tolist()
        np.testing.assert_allclose(data.positions, atoms.positions, atol=1e-6)
        np.testing.assert_allclose(data.energy, labels["energy"], atol=1e-6)
        np.testing.assert_allclose(data.forces, labels["forces"], atol=1e-6)
        if "stress" in labels:
            np.testing.assert_allclose(data.stress, ase.stress.voigt_6_to_full_3x3_stress(labels["stress"]), atol=1e-6)
        if atoms.pbc.any():
            np.testing.assert_allclose(data.cell, atoms.cell.array, atol=1e-6)
            assert data.pbc.tolist() == atoms.pbc.tolist()


@pytest.mark.parametrize("suffix", ["extxyz", "xyz", "xyz.gz", "traj", "db"])
@pytest.mark.parametrize("make", [ethanol, copper])
def test_every_format_of_ase(tmp_path, suffix, make):
    frames = make()
    conversion = convert([write(tmp_path / f"a.{suffix}", frames)], tmp_path / "a.zarr")
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert_same(reader, frames)
    assert reader.levels["energy"] == "system"
    assert conversion.summary.structures == 3
    assert conversion.labels.used["energy"] == {"energy": 3}


def test_npz_of_rmd17(tmp_path):
    frames = ethanol(5)
    conversion = convert([rmd17(tmp_path / "a.npz", frames, 1 / KCAL)], tmp_path / "a.zarr", units=["kcal/mol"])
    assert_same(AtomicDataZarrReader(tmp_path / "a.zarr"), frames)
    assert conversion.labels.used["energy"] == {"energies": 5}
    assert conversion.labels.left["energy"]["old_energies"].frames == 5  # the decoys are named, with how far they are off
    assert conversion.labels.left["energy"]["old_energies"].difference == pytest.approx(5.2 / 9, abs=1e-6)
    assert conversion.labels.left["forces"]["old_forces"].difference > 0.01
    assert conversion.other_keys() == ["old_indices"]


def test_a_decoy_is_taken_when_asked_for(tmp_path):
    frames = ethanol(5)
    path = rmd17(tmp_path / "a.npz", frames)
    convert([path], tmp_path / "a.zarr", energy_key="old_energies", forces_key="old_forces")
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(5))
    np.testing.assert_allclose(batch.energy, [atoms.calc.results["energy"] - 5.2 for atoms in frames], rtol=1e-12)


def test_units_of_every_quantity(tmp_path):
    frames = copper()
    hartree, bohr, bar = (
        parse_unit("Ha", "energy").factor,
        parse_unit("bohr", "length").factor,
        parse_unit("bar", "stress").factor,
    )
    other = []
    for atoms in frames:
        copy, labels = atoms.copy(), atoms.calc.results
        copy.set_cell(atoms.cell / bohr, scale_atoms=True)
        copy.info["E"] = labels["energy"] / hartree
        copy.arrays["F"] = labels["forces"] / (hartree / bohr)
        copy.info["S"] = -labels["stress"] / bar
        other.append(copy)
    convert(
        [write(tmp_path / "a.extxyz", other)],
        tmp_path / "a.zarr",
        energy_key="E",
        forces_key="F",
        stress_key="S",
        units=["energy=Hartree,length=bohr", "stress=bar"],
        stress_sign="compression",
    )
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert_same(reader, frames)
    assert reader.units["stress"] == "eV/angstrom^3"


@pytest.mark.parametrize("sign", [None, "compression", "tension"])
def test_virial_becomes_a_stress(tmp_path, sign):
    frames = copper()
    for atoms in frames:
        stress = ase.stress.voigt_6_to_full_3x3_stress(atoms.calc.results["stress"])
        atoms.calc.results["virial"] = (-stress if sign != "tension" else stress) * atoms.get_volume()
    path = renamed(tmp_path / "a.xyz", frames, energy="energy", forces="force", virial="virial")
    conversion = convert([path], tmp_path / "a.zarr", stress_sign=sign)
    assert_same(AtomicDataZarrReader(tmp_path / "a.zarr"), frames)
    assert conversion.labels.used["virial"] == {"virial": 3}
    assert conversion.labels.used["forces"] == {"force": 3}


def test_b15_imported_stress_is_the_derivative_of_the_energy(tmp_path):
    """B15: a crystal squeezed by one percent; the label that comes in is dE/d(strain)/V, to 1e-4 eV/Å^3."""
    h = 1e-4
    frames = copper([0.99, 0.99 * (1 - h), 0.99 * (1 + h)], rattle=0.0)
    convert([write(tmp_path / "a.extxyz", frames)], tmp_path / "a.zarr")
    middle, low, high = (AtomicDataZarrReader(tmp_path / "a.zarr").read(i) for i in range(3))
    volume = abs(torch.linalg.det(middle.cell))
    numerical = (high.energy - low.energy) / (2 * h) / volume  # the trace: all three directions are strained
    assert float(torch.trace(middle.stress)) == pytest.approx(float(numerical), abs=1e-4)
    assert float(numerical) < -0.01  # compressed: negative, tension is positive


def test_constraints_do_not_zero_the_forces(tmp_path):
    frames = copper()
    for atoms in frames:
        atoms.set_constraint(FixAtoms([0, 1]))
    assert not frames[0].get_forces()[:2].any()
    for suffix in ("traj", "db", "extxyz"):
        path = tmp_path / f"a.{suffix}"
        if suffix == "extxyz":
            ase.io.write(path, frames, columns=["symbols", "positions", "move_mask", "forces"])
        else:
            write(path, frames)
        if suffix != "extxyz":  # ASE's xyz writer applies the constraint itself
            convert([path], tmp_path / f"{suffix}.zarr")
            assert_same(AtomicDataZarrReader(tmp_path / f"{suffix}.zarr"), frames)


def test_a_lattice_without_pbc_stays_without(tmp_path):
    frames = ethanol()
    for atoms in frames:
        atoms.set_cell(50 * np.eye(3))
    convert([write(tmp_path / "a.xyz", frames)], tmp_path / "a.zarr")
    data = AtomicDataZarrReader(tmp_path / "a.zarr").read(0)
    assert data.pbc.tolist() == [False] * 3
    assert data.cell[0, 0] == 50


def test_blanks_round_the_equals_sign_of_the_lattice(tmp_path):
    path = write(tmp_path / "a.xyz", copper())
    path.write_text(path.read_text().replace("Lattice=", "Lattice = "))
    convert([path], tmp_path / "a.zarr")
    assert_same(AtomicDataZarrReader(tmp_path / "a.zarr"), copper())


def test_several_files_of_different_formats_and_systems(tmp_path):
    paths = [write(tmp_path / "a.xyz", ethanol()), write(tmp_path / "b.traj", copper()), rmd17(tmp_path / "c.npz", ethanol(4, 1))]
    conversion = convert(paths, tmp_path / "a.zarr")
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert_same(reader, [*ethanol(), *copper(), *ethanol(4, 1)])
    batch = reader.read_many(range(10))
    assert batch.has("stress").tolist() == [False] * 3 + [True] * 3 + [False] * 4
    assert [file.frames for file in conversion.files] == [3, 3, 4]


@pytest.mark.parametrize("suffix", ["xyz", "traj", "db", "npz"])
@pytest.mark.parametrize(
    ("select", "kept"), [("2:5", [2, 3, 4]), ("::3", [0, 3, 6]), ("5:", [5, 6]), ("1:99:4", [1, 5]), ("3", [3])]
)
def test_select(tmp_path, suffix, select, kept):
    frames = ethanol(7)
    path = rmd17(tmp_path / "a.npz", frames) if suffix == "npz" else write(tmp_path / f"a.{suffix}", frames)
    convert([path], tmp_path / "a.zarr", select=select)
    assert_same(AtomicDataZarrReader(tmp_path / "a.zarr"), [frames[i] for i in kept])


@pytest.mark.parametrize("select", ["-5:", "5:2", "a:b", "::0", "1:2:3:4", "", "3:3"])
def test_a_selection_of_nothing_is_refused(tmp_path, select):
    with pytest.raises(DataError, match="selects nothing"):
        convert([write(tmp_path / "a.xyz", ethanol())], tmp_path / "a.zarr", select=select)


def test_a_selection_beyond_the_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no frame of a\.xyz is selected"):
        convert([write(tmp_path / "a.xyz", ethanol())], tmp_path / "a.zarr", select="10:20")
    assert not (tmp_path / "a.zarr").exists()


def test_append_and_overwrite(tmp_path):
    store = tmp_path / "a.zarr"
    first, second = write(tmp_path / "a.xyz", ethanol()), write(tmp_path / "b.xyz", copper())
    convert([first], store)
    with pytest.raises(DataError, match="--append adds"):
        convert([second], store)
    convert([second], store, append=True)
    reader = AtomicDataZarrReader(store)
    assert_same(reader, [*ethanol(), *copper()])
    names = [[file["name"] for file in conversion["files"]] for conversion in reader.metadata["conversions"]]
    assert names == [["a.xyz"], ["b.xyz"]]
    convert([second], store, overwrite=True)
    reader = AtomicDataZarrReader(store)
    assert_same(reader, copper())
    assert len(reader.metadata["conversions"]) == 1


@pytest.mark.parametrize("append", [False, True])
def test_what_a_failed_conversion_left_does_not_stand_in_the_way(tmp_path, append, monkeypatch):
    store, source = tmp_path / "a.zarr", write(tmp_path / "a.xyz", ethanol())

    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", broken)
        patch.setattr("os.rename", broken)
        with pytest.raises((DataError, OSError)):
            convert([source], store, append=append)
    store.mkdir(exist_ok=True)
    convert([source], store, append=append)
    assert_same(AtomicDataZarrReader(store), ethanol())


def test_metadata_remembers_files_keys_units_and_version(tmp_path):
    convert([rmd17(tmp_path / "a.npz", ethanol(4), 1 / KCAL)], tmp_path / "a.zarr", units=["kcal/mol"], select="1:3")
    (conversion,) = AtomicDataZarrReader(tmp_path / "a.zarr").metadata["conversions"]
    assert conversion["created_by"] == f"nvalchemi {__version__}"
    assert conversion["files"] == [{"name": "a.npz", "format": "npz", "frames": 2, "select": "1:3"}]
    assert conversion["keys"] == {"energy": {"energies": 2}, "forces": {"forces": 2}}
    assert conversion["units_as_read"]["forces"] == {"unit": "kcal/mol/Å", "factor": pytest.approx(KCAL)}
    assert str(tmp_path) not in str(conversion)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype(tmp_path, dtype):
    convert([write(tmp_path / "a.xyz", copper())], tmp_path / "a.zarr", dtype=dtype)
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many([0])
    assert {str(batch[name].dtype) for name in ("positions", "forces", "stress", "cell")} == {f"torch.{dtype}"}
    assert batch.energy.dtype == torch.float64


def test_known_further_results_are_kept(tmp_path):
    frames = copper()
    for i, atoms in enumerate(frames):
        atoms.calc.results["magmoms"] = np.full(len(atoms), 0.5)
        atoms.calc.results["free_energy"] = atoms.calc.results["energy"] - 0.4
        atoms.info["charge"] = i
    conversion = convert([write(tmp_path / "a.traj", frames)], tmp_path / "a.zarr")
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(3))
    assert batch.magmoms.unique().tolist() == [0.5]
    assert conversion.labels.used["energy"] == {"energy": 3}
    assert conversion.labels.left["energy"]["free_energy"].difference == pytest.approx(0.1)


def test_a_stream_is_never_held_whole(tmp_path, monkeypatch):
    """Frames are read as the writer takes them."""
    from nvalchemi.data.convert.extxyz import ExtxyzSource
    from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter

    seen, taken = [0], []
    original = ExtxyzSource.frames

    def counted(self, select):
        for item in original(self, select):
            seen[0] += 1
            yield item

    def write_batches(self, batches):
        taken.extend((seen[0], len(batch)) for batch in batches)

    monkeypatch.setattr(ExtxyzSource, "frames", counted)
    monkeypatch.setattr(AtomicDataZarrWriter, "write", write_batches)
    convert([write(tmp_path / "a.xyz", ethanol(600))], tmp_path / "a.zarr")
    assert taken == [(256, 256), (512, 256), (600, 88)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"append": True, "overwrite": True}, "exclude"),
        ({"stress_key": "a", "virial_key": "b"}, "same label"),
        ({"dtype": "float16"}, "float16"),
        ({"stress_sign": "up"}, "tension or compression"),
    ],
)
def test_settings_that_cannot_be_meant(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        convert([write(tmp_path / "a.xyz", ethanol())], tmp_path / "a.zarr", **settings)


def test_paths_that_cannot_be_meant(tmp_path):
    path = write(tmp_path / "a.xyz", ethanol())
    with pytest.raises(ConfigError, match="the store to write"):
        convert([path], tmp_path / "b.xyz")
    with pytest.raises(ConfigError, match="no input file"):
        convert([], tmp_path / "b.zarr")
    with pytest.raises(DataError, match="there is no file"):
        convert([tmp_path / "c.xyz"], tmp_path / "b.zarr")
    path.rename(tmp_path / "a.cif")
    with pytest.raises(DataError, match=r"the format of .* is not known"):
        convert([tmp_path / "a.cif"], tmp_path / "b.zarr")
    assert not (tmp_path / "b.zarr").exists()
