"""Systems of DeePMD-kit, output of VASP, HDF5: layouts, signs, and files that are cut or do not fit."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from nvalchemi.data.convert import convert
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.errors import ConfigError, DataError
from tests.data.convert.files import copper, deepmd, ethanol, vasprun

h5py = pytest.importorskip("h5py")
VOIGT = (slice(None), [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1])


def read(path):
    reader = AtomicDataZarrReader(path)
    return reader.read_many(range(len(reader)))


def assert_labels(batch, frames, tolerance=1e-12):
    for name in ("energy", "forces", "stress"):
        if name in frames[0].calc.results:
            right = np.concatenate([np.atleast_1d(atoms.calc.results[name]) for atoms in frames]).reshape(-1)
            got = getattr(batch, name)
            got = got[VOIGT] if name == "stress" else got
            np.testing.assert_allclose(got.numpy().reshape(-1), right, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(batch.atomic_numbers, np.concatenate([atoms.numbers for atoms in frames]))


# -- DeePMD --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [1, 3])
def test_a_deepmd_system(tmp_path, sets):
    frames = copper(np.linspace(0.97, 1.03, 7))
    convert([deepmd(tmp_path / "cu", frames, sets)], tmp_path / "a.zarr")
    batch = read(tmp_path / "a.zarr")
    assert_labels(batch, frames)  # the virial's sign and volume too
    np.testing.assert_array_equal(batch.positions, np.concatenate([atoms.positions for atoms in frames]))
    np.testing.assert_array_equal(batch.cell, [atoms.cell.array for atoms in frames])
    assert batch.pbc.all()


def test_a_selection_of_a_deepmd_system_without_a_box(tmp_path):
    frames = ethanol(6)
    system = deepmd(tmp_path / "ethanol", frames, sets=2, periodic=False)
    convert([system], tmp_path / "a.zarr", select="1::2")
    batch = read(tmp_path / "a.zarr")
    assert_labels(batch, frames[1::2])
    assert "pbc" not in batch and "cell" not in batch


def test_a_deepmd_system_of_mixed_type_with_padding(tmp_path):
    frames = ethanol(2)
    system = deepmd(tmp_path / "mixed", frames, periodic=False)
    types = np.tile(np.loadtxt(system / "type.raw", dtype=int), (2, 1))
    types[1, 6:] = -1
    np.save(system / "set.000" / "real_atom_types.npy", types)
    np.save(system / "set.000" / "charges.npy", np.arange(18.0).reshape(2, 9))
    (system / "type.raw").write_text("0 " * 9)
    convert([system], tmp_path / "a.zarr", trust_units=True)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert reader.num_atoms.tolist() == [9, 6]
    np.testing.assert_array_equal(reader.read(1).forces, frames[1].calc.results["forces"][:6])
    np.testing.assert_array_equal(reader.read(1).atomic_numbers, frames[1].numbers[:6])
    np.testing.assert_array_equal(reader.read(1).charges, np.arange(9.0, 15.0))


def _without_map(system):
    (system / "type_map.raw").unlink()


def _other_map(system):
    (system / "type_map.raw").write_text("C H Water")


def _short_map(system):
    (system / "type_map.raw").write_text("C")


def _without_box(system):
    (system / "nopbc").unlink()


def _fewer_forces(system):
    np.save(system / "set.000" / "force.npy", np.zeros((2, 27)))


def _other_atoms(system):
    np.save(system / "set.000" / "coord.npy", np.zeros((3, 24)))


def _pickled(system):
    np.save(system / "set.000" / "force.npy", np.array([{}, {}, {}], dtype=object))


def _cut(system):
    path = system / "set.000" / "force.npy"
    path.write_bytes(path.read_bytes()[:-100])


def _no_set(system):
    (system / "set.000").rename(system / "other")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_without_map, "does not say which elements"),
        (_other_map, "names no elements; found: Water"),
        (_short_map, "type.raw has a type that type_map.raw does not name"),
        (_without_box, "repeats in space and set.000 has no box.npy"),
        (_fewer_forces, "force.npy of set.000 does not fit coord.npy; found: 2 rows; needed: 3 rows"),
        (_other_atoms, "coord.npy does not fit type.raw; found: 24 numbers a frame; needed: 3 x 9 atoms"),
        (_pickled, "force.npy cannot be read"),
        (_cut, "force.npy cannot be read"),
        (_no_set, "has no frames"),
    ],
)
def test_a_deepmd_system_that_is_not_whole(tmp_path, harm, message):
    system = deepmd(tmp_path / "a", ethanol(3), periodic=False)
    harm(system)
    with pytest.raises(DataError, match=message):
        convert([system], tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()


def test_folders_that_are_no_system(tmp_path):
    (tmp_path / "all").mkdir()
    with pytest.raises(DataError, match="a folder of no known format; found: an empty folder"):
        convert([tmp_path / "all"], tmp_path / "a.zarr")
    deepmd(tmp_path / "all" / "b", ethanol(3), periodic=False)
    with pytest.raises(DataError, match=r"found: 1 DeePMD systems in it.*give each system by itself: .*all.b"):
        convert([tmp_path / "all"], tmp_path / "a.zarr")


# -- VASP ----------------------------------------------------------------------------------------------------------------------------------


def test_a_vasprun(tmp_path):
    """The energy without smearing; the free energy is named as one that was left."""
    frames = copper(np.linspace(0.98, 1.02, 5))
    conversion = convert([vasprun(tmp_path / "vasprun.xml", frames)], tmp_path / "a.zarr")
    assert_labels(read(tmp_path / "a.zarr"), frames, tolerance=1e-7)
    assert conversion.labels.left["energy"]["free_energy"].difference == pytest.approx(0.01 / 4, abs=1e-6)


def test_a_compressed_vasprun_and_a_selection(tmp_path):
    frames = copper(np.linspace(0.98, 1.02, 5))
    text = vasprun(tmp_path / "run.xml", frames).read_bytes()
    (tmp_path / "vasprun.xml.gz").write_bytes(gzip.compress(text))
    convert([tmp_path / "vasprun.xml.gz"], tmp_path / "a.zarr", select="1:4:2")
    assert_labels(read(tmp_path / "a.zarr"), frames[1:4:2], tolerance=1e-7)


def test_a_vasp_run_that_was_killed(tmp_path):
    """An error says how many steps are whole, and what it proposes takes them."""
    frames = copper(np.linspace(0.98, 1.02, 5))
    path = vasprun(tmp_path / "vasprun.xml", frames, complete=False)
    path.write_text(path.read_text()[:-700])
    with pytest.raises(DataError, match=r"vasprun.xml ends in the middle of the run; found: 4 whole ionic steps.*--select 0:4"):
        convert([path], tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()
    convert([path], tmp_path / "a.zarr", select="0:4")
    assert_labels(read(tmp_path / "a.zarr"), frames[:4], tolerance=1e-7)
    text = path.read_text()
    path.write_text(text[: text.index("<calculation>") + 60])  # before the first step was over
    with pytest.raises(DataError, match=r"vasprun.xml ends in the middle of the run; found: 0 whole ionic steps"):
        convert([path], tmp_path / "b.zarr")


# -- HDF5 ----------------------------------------------------------------------------------------------------------------------------------


def molecules(path, units=None, gradient=False):
    """Two groups: ethanol, and nine frames of its nine atoms in another order a frame."""
    first, second = ethanol(4), ethanol(9, seed=1)
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, frames in (("b/ethanol", first), ("c", second)):
            group = file.create_group(name)
            orders = [rng.permutation(9) if name == "c" else np.arange(9) for _ in frames]
            for atoms, order in zip(frames, orders, strict=True):
                atoms.calc.results["forces"] = atoms.calc.results["forces"][order]
                atoms.numbers, atoms.positions = atoms.numbers[order], atoms.positions[order]
            group["atomic_numbers"] = [atoms.numbers for atoms in frames] if name == "c" else frames[0].numbers
            group["coordinates"] = [atoms.positions for atoms in frames]
            group["energy"] = [atoms.calc.results["energy"] for atoms in frames]
            forces = np.array([atoms.calc.results["forces"] for atoms in frames])
            group["energy_gradient" if gradient else "forces"] = -forces if gradient else forces
            group["charges"] = np.zeros((len(frames), 9, 1))
            group["names"] = np.array([b"x"] * len(frames))
            for key, unit in (units or {}).items():
                group[key].attrs["units"] = unit
    return [*first, *second]


def test_an_hdf5_file_of_groups(tmp_path):
    frames = molecules(tmp_path / "a.h5")
    conversion = convert([tmp_path / "a.h5"], tmp_path / "a.zarr")
    batch = read(tmp_path / "a.zarr")
    assert_labels(batch, frames)
    assert conversion.files[0].total == 13 and conversion.extra == {"charges"}
    convert([tmp_path / "a.h5"], tmp_path / "b.zarr", select="3:6")
    assert_labels(read(tmp_path / "b.zarr"), frames[3:6])


def test_a_gradient_is_no_force_until_its_sign_is_turned(tmp_path):
    frames = molecules(tmp_path / "a.hdf5", gradient=True)
    conversion = convert([tmp_path / "a.hdf5"], tmp_path / "a.zarr")
    assert list(conversion.labels.left["forces"]) == ["minus_energy_gradient"] and not conversion.labels.used["forces"]
    convert([tmp_path / "a.hdf5"], tmp_path / "b.zarr", forces_key="minus_energy_gradient")
    assert_labels(read(tmp_path / "b.zarr"), frames)


def test_the_units_that_an_hdf5_file_declares(tmp_path):
    molecules(tmp_path / "a.h5", {"energy": "hartree", "coordinates": "bohr", "forces": "hartree/bohr"})
    with pytest.raises(DataError, match="declares another unit of"):
        convert([tmp_path / "a.h5"], tmp_path / "a.zarr")
    conversion = convert([tmp_path / "a.h5"], tmp_path / "a.zarr", units=["Hartree", "length=bohr"], trust_units=True)
    assert any("the file itself declares" in finding.text for finding in conversion.findings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"energy": np.zeros(3)}, "has no group with positions; found: energy"),
        ({"coord": np.zeros((3, 27))}, "'coord' of / has no positions"),
        ({"coord": np.zeros((3, 9, 3))}, "/ has no atomic numbers"),
        ({"coord": np.zeros((3, 9, 3)), "numbers": np.ones(8, dtype=int)}, "'numbers' of / does not fit 'coord'"),
        ({"coord": np.zeros((3, 9, 3)), "numbers": np.ones(9)}, "does not fit 'coord'.*needed: whole numbers"),
    ],
)
def test_hdf5_without_a_known_layout(tmp_path, content, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in content.items():
            file[name] = value
    with pytest.raises(DataError, match=message):
        convert([tmp_path / "a.h5"], tmp_path / "a.zarr")


def test_hdf5_links_that_lead_out_of_the_file_are_not_followed(tmp_path):
    molecules(tmp_path / "a.h5")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["a"] = h5py.ExternalLink("a.h5", "/c")
    with pytest.raises(DataError, match="has no group with positions"):
        convert([tmp_path / "b.h5"], tmp_path / "a.zarr")


@pytest.mark.parametrize("content", [b"", b"\x89HDF\r\n\x1a\n", b"nothing of the kind"])
def test_damaged_hdf5(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.h5 cannot be read as HDF5"):
        convert([tmp_path / "a.h5"], tmp_path / "a.zarr")


def test_hdf5_without_its_library(tmp_path, monkeypatch):
    molecules(tmp_path / "a.h5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"h5py is not installed.*nvalchemi\[hdf5\]"):
        convert([tmp_path / "a.h5"], tmp_path / "a.zarr")


def test_lmdb_is_refused_with_the_reason(tmp_path):
    (tmp_path / "a.lmdb").write_bytes(b"x")
    with pytest.raises(DataError, match="reading those runs code of the file"):
        convert([tmp_path / "a.lmdb"], tmp_path / "a.zarr")
