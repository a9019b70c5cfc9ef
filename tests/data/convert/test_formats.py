"""What each format has of its own: layouts of npz, and files that are damaged."""

from __future__ import annotations

import numpy as np
import pytest

from nvalchemi.data.convert import convert
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.errors import DataError
from tests.data.convert.files import copper, ethanol, rmd17, write


def arrays(frames):
    return (
        frames[0].numbers,
        np.array([atoms.positions for atoms in frames]),
        np.array([atoms.get_potential_energy() for atoms in frames]),
        np.array([atoms.get_forces() for atoms in frames]),
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("column", [False, True])
def test_npz_of_md17(tmp_path, save, column):
    """Keys R, z, E, F, texts beside them, energies perhaps as a column."""
    z, r, e, f = arrays(ethanol(5))
    save(tmp_path / "a.npz", R=r, z=z, E=e[:, None] if column else e, F=f, name=np.array("ethanol"), md5=np.array("0"))
    convert([tmp_path / "a.npz"], tmp_path / "a.zarr", select="1::2")
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(2))
    np.testing.assert_array_equal(batch.energy, e[1::2])
    np.testing.assert_array_equal(batch.forces, f[1::2].reshape(-1, 3))
    np.testing.assert_array_equal(batch.positions, r[1::2].reshape(-1, 3))


def test_npz_of_different_molecules_padded_with_zeros(tmp_path):
    z, r, e, f = arrays(ethanol(3))
    numbers = np.tile(z, (3, 1))
    numbers[1, 6:] = 0
    np.savez(tmp_path / "a.npz", N=(numbers > 0).sum(1), Z=numbers, R=r, E=e, F=f)
    convert([tmp_path / "a.npz"], tmp_path / "a.zarr", trust_units=True)
    reader = AtomicDataZarrReader(tmp_path / "a.zarr")
    assert reader.num_atoms.tolist() == [9, 6, 9]
    np.testing.assert_array_equal(reader.read(1).forces, f[1, :6])


def test_npz_in_fortran_order(tmp_path):
    z, r, e, f = arrays(ethanol(3))
    np.savez(tmp_path / "a.npz", R=np.asfortranarray(r), z=z, E=e, F=np.asfortranarray(f))
    convert([tmp_path / "a.npz"], tmp_path / "a.zarr")
    np.testing.assert_array_equal(AtomicDataZarrReader(tmp_path / "a.zarr").read(2).forces, f[2])


def test_npz_with_cells(tmp_path):
    frames = copper()
    z, r, e, f = arrays(frames)
    np.savez(tmp_path / "a.npz", R=r, z=z, E=e, F=f, cell=np.array([atoms.cell.array for atoms in frames]))
    convert([tmp_path / "a.npz"], tmp_path / "a.zarr")
    data = AtomicDataZarrReader(tmp_path / "a.zarr").read(1)
    np.testing.assert_array_equal(data.cell, frames[1].cell.array)
    assert data.pbc.all()


def test_npz_of_six_atoms_with_a_stress_of_six_numbers(tmp_path):
    n, stress = 6, np.arange(12.0).reshape(2, 6) * 1e-3
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        R=rng.uniform(0, 10, (2, n, 3)),
        z=np.full(n, 29),
        E=np.array([-20.0, -21.0]),
        F=rng.normal(size=(2, n, 3)),
        cell=np.tile(10 * np.eye(3), (2, 1, 1)),
        stress=stress,
    )
    convert([tmp_path / "a.npz"], tmp_path / "a.zarr")
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(2))
    np.testing.assert_allclose(batch.stress[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], stress)


def test_npz_that_would_need_unpickling_is_refused(tmp_path):
    z, r, e, f = arrays(ethanol(2))
    np.savez(tmp_path / "a.npz", R=r, z=np.array([list(z), list(z)], dtype=object), E=e, F=f)
    with pytest.raises(DataError, match=r"a\.npz"):
        convert([tmp_path / "a.npz"], tmp_path / "a.zarr")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"z": np.array([1, 1])}, "has no positions"),
        ({"R": np.zeros((4, 2, 3))}, "has no atomic numbers"),
        ({"R": np.zeros((4, 6)), "z": np.array([1, 1])}, "'R' has no positions"),
        ({"R": np.zeros((4, 2, 3)), "z": np.array([1, 1, 1])}, "'z' does not fit 'R'"),
    ],
)
def test_npz_without_a_known_layout(tmp_path, keys, message):
    np.savez(tmp_path / "a.npz", **keys)
    with pytest.raises(DataError, match=message):
        convert([tmp_path / "a.npz"], tmp_path / "a.zarr")


@pytest.mark.parametrize("suffix", ["xyz", "traj", "db", "npz", "xyz.gz"])
def test_files_that_are_cut_or_no_files_of_this_kind(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    whole = (rmd17(path, ethanol(4)) if suffix == "npz" else write(path, ethanol(4))).read_bytes()
    for content in (whole[: len(whole) * 5 // 8], b"\x00\x01 not this", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.{suffix}"):
            convert([path], tmp_path / "a.zarr")
        assert not (tmp_path / "a.zarr").exists()


def test_a_broken_xyz_names_frame_and_reason(tmp_path):
    path = write(tmp_path / "a.xyz", ethanol(3))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:12], *lines[13:]]))  # one atom of the second frame lost
    with pytest.raises(DataError, match=r"a\.xyz: frame 1 cannot be read"):
        convert([path], tmp_path / "a.zarr")
    path.write_text("".join([*lines[:11], "a title\n", *lines[11:]]))
    with pytest.raises(DataError, match="frame 1 cannot be read: its first line should be the number of atoms, but is 'a title'"):
        convert([path], tmp_path / "a.zarr")
    path.write_text("".join([*lines[:14], "X 0 zero 0 0 0 0\n", *lines[15:]]))
    with pytest.raises(DataError, match=r"a\.xyz: frame 1 cannot be read"):
        convert([path], tmp_path / "a.zarr")


def test_blank_lines_between_and_after_frames_are_allowed(tmp_path):
    path = write(tmp_path / "a.xyz", ethanol(2))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:11], "\n", *lines[11:], "\n\n"]))
    assert convert([path], tmp_path / "a.zarr").summary.structures == 2
