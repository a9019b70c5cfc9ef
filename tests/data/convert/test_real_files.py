"""Published files, each with the count, energies and forces that it is known to have.

They are found through NVALCHEMI_TEST_DATA. The numbers are in the files' own units, read independently with ASE and NumPy.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from nvalchemi.data.convert import convert
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.summary import Summary
from nvalchemi.errors import DataError

DATA = Path(os.environ.get("NVALCHEMI_TEST_DATA", "nowhere"))
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="NVALCHEMI_TEST_DATA is not set")
KCAL, HARTREE = 0.0433641, 27.211386

XTB = {"energy_key": "energy_xtb", "forces_key": "forces_xtb"}
TA = {"units": ["stress=bar"], "stress_sign": "compression"}
MOL = {"units": ["kcal/mol"]}

# file, n, atoms (least, most), elements, energy per atom (lowest, highest), force rms, eV in the file's unit, settings
TABLE = [
    ("rmd17/rmd17_ethanol_train_01.npz", 1000, 9, 9, 3, -10787.3, -10784.6, 27.567, KCAL, MOL),
    ("rmd17/rmd17_ethanol_test_01.npz", 1000, 9, 9, 3, -10787.3, -10784.0, 27.499, KCAL, MOL),
    ("rmd17/rmd17_aspirin_train_01.npz", 1000, 21, 21, 3, -19347.1, -19345.5, 29.076, KCAL, MOL),
    ("rmd17/rmd17_aspirin_test_01.npz", 1000, 21, 21, 3, -19347.2, -19345.1, 29.317, KCAL, MOL),
    ("metatrain/ethanol_reduced_100.xyz", 100, 9, 9, 3, -10787.2, -10784.7, 27.831, KCAL, MOL),
    ("metatrain/carbon_reduced_100.xyz", 100, 4, 4, 1, -158.294, -157.520, 0.93496, 1, {}),
    (
        "metatrain/qm9_reduced_100.xyz",
        100,
        3,
        17,
        4,
        -46.4121,
        -8.0958,
        None,
        HARTREE,
        {"units": ["Hartree"], "energy_key": "U0"},
    ),
    ("3bpa/train_300K.xyz", 500, 27, 27, 4, -654.104, -654.065, 0.94798, 1, {}),
    ("3bpa/train_mixedT.xyz", 500, 27, 27, 4, -654.103, -653.912, 1.4213, 1, {}),
    ("3bpa/iso_atoms.xyz", 4, 1, 1, 4, -2041.9816, -13.5872, None, 1, {}),
    ("mattersim/mptrj-random-1k.xyz", 1000, 2, 192, 85, -12.4334, -0.82828, 1.2726, 1, {}),
    ("mattersim/high_level_water.xyz", 10, 192, 192, 2, -156.332, -156.186, 2.6343, 1, {}),
    ("asedb/10_mptraj_systems.db", 10, 10, 82, 23, -8.01694, -3.67395, 0.26266, 1, {}),
    ("traj/cattsunami_sample_traj.traj", 8, 98, 98, 3, -3.27208, -3.26010, 0.19265, 1, {"unlabelled": "skip"}),
    ("traj/MoS2.traj", 3, 104, 104, 2, -7.16521, -7.16521, 0.0053922, 1, {}),
    ("fitsnap_Ta/Liquid.xyz", 3, 100, 100, 1, -11.21315, -10.99673, 1.6482, 1, TA),
    ("fitsnap_Ta/Volume_BCC.xyz", 21, 2, 2, 1, -11.8484, 28.1314, 0.0, 1, TA),
    ("deepmd_water/data_0", 80, 192, 192, 2, -155.9666, -155.9462, 0.8156, 1, {}),
    ("deepmd_water/data_1", 160, 192, 192, 2, -155.9647, -155.9460, 0.8150, 1, {}),
    ("vasp/OUTCAR.h2o.md.10", 10, 6, 6, 2, -4.74690, -4.73104, 0.64964, 1, {}),
    ("vasp/vasprun.h2o.md.10.xml", 10, 6, 6, 2, -4.74690, -4.73104, 0.64964, 1, {}),
    ("hdf5/aimnet_dataset.h5", 195, 7, 20, 14, -38676.9, -411.081, 1.6019, 1, {}),
    ("gpumd/PbTe_train.xyz", 25, 250, 250, 2, -3.83346, -3.71670, 0.36262, 1, {}),
    ("xtb_solvents/solvent_xtb_train_200.xyz", 203, 1, 85, 3, -102.571, -10.7072, 2.2272, 1, XTB),
    ("xtb_solvents/solvent_xtb_test.xyz", 1000, 8, 87, 3, -66.7944, -41.8865, 2.2901, 1, XTB),
    ("misc_xyz/toy_c3h8_relax.extxyz", 101, 38, 38, 3, 0.219972, 0.415913, 0.21661, 1, {}),
    ("misc_xyz/hfo2.extxyz", 2, 12, 12, 2, -28.9844, -28.9714, 0.11330, 1, {}),
    ("misc_xyz/TiAl_examples.xyz", 5, 2, 54, 2, -852.019, -850.901, 3.3111, 1, {}),
    ("misc_xyz/sic_dft.xyz", 8, 6, 24, 2, -6.11786, -5.46753, 4.6723, 1, {}),
]


@pytest.mark.parametrize(
    ("file", "n", "least", "most", "elements", "low", "high", "rms", "unit", "settings"), TABLE, ids=[row[0] for row in TABLE]
)
def test_the_known_numbers(tmp_path, file, n, least, most, elements, low, high, rms, unit, settings):
    conversion = convert([DATA / file], tmp_path / "a.zarr", **settings)
    summary = Summary.of(AtomicDataZarrReader(tmp_path / "a.zarr"))
    assert summary.as_dict() == conversion.summary.as_dict()  # info says the same as convert
    assert (summary.structures, summary.sizes, len(summary.elements)) == (n, [least, most], elements)
    energy = summary.fields["energy"]
    assert energy.structures == n
    assert energy.min == pytest.approx(low * unit, rel=1e-5)
    assert energy.max == pytest.approx(high * unit, rel=1e-5)
    if rms is None:
        assert "forces" not in summary.fields
    else:
        assert summary.fields["forces"].rms == pytest.approx(rms * unit, rel=1e-4)


def batch_of(tmp_path, files, **settings):
    paths = [DATA / file for file in files] if isinstance(files, list) else [DATA / files]
    conversion = convert(paths, tmp_path / "q.zarr", overwrite=True, **settings)
    reader = AtomicDataZarrReader(tmp_path / "q.zarr")
    return reader.read_many(range(len(reader))), conversion


def test_ethanol_in_ev(tmp_path):
    _, conversion = batch_of(tmp_path, "rmd17/rmd17_ethanol_train_01.npz", **MOL)
    energy, forces = conversion.summary.fields["energy"], conversion.summary.fields["forces"]
    assert (energy.min, energy.max, forces.rms) == pytest.approx((-467.7824, -467.6660, 1.19540), abs=1e-4)
    assert set(conversion.labels.left["energy"]) == {"old_energies"}
    assert set(conversion.labels.left["forces"]) == {"old_forces"}
    _, conversion = batch_of(tmp_path, "rmd17/rmd17_aspirin_train_01.npz", **MOL)
    energy, forces = conversion.summary.fields["energy"], conversion.summary.fields["forces"]
    assert (energy.min, energy.max, forces.rms) == pytest.approx((-838.9703, -838.8990, 1.26085), abs=1e-4)


def test_the_splits_do_not_overlap(tmp_path):
    _, conversion = batch_of(tmp_path, [f"rmd17/rmd17_ethanol_{split}_01.npz" for split in ("train", "test")], **MOL)
    assert conversion.summary.duplicates == 0
    _, conversion = batch_of(tmp_path, ["3bpa/train_300K.xyz"] * 2)
    assert conversion.summary.duplicates == 500


@pytest.mark.parametrize(
    ("file", "settings", "unit"),
    [
        ("rmd17/rmd17_ethanol_train_01.npz", {}, "kcal/mol"),
        ("rmd17/rmd17_aspirin_test_01.npz", {"units": ["kJ/mol"]}, "kcal/mol"),
        ("metatrain/ethanol_reduced_100.xyz", {}, "kcal/mol"),
        ("metatrain/qm9_reduced_100.xyz", {"energy_key": "U0"}, "Hartree"),
        ("3bpa/train_300K.xyz", {"units": ["kcal/mol"]}, "eV"),
    ],
)
def test_a_wrong_unit_of_energy_is_refused(tmp_path, file, settings, unit):
    with pytest.raises(DataError, match=f"pass --units {unit}"):
        batch_of(tmp_path, file, **settings)


def test_ethanol_of_two_files_is_the_same_but_for_the_order_of_atoms(tmp_path):
    npz, _ = batch_of(tmp_path, "rmd17/rmd17_ethanol_train_01.npz", select="0:100", **MOL)
    xyz, _ = batch_of(tmp_path, "metatrain/ethanol_reduced_100.xyz", **MOL)
    np.testing.assert_allclose(xyz.energy, npz.energy, rtol=1e-12)
    order = [3, 4, 5, 6, 7, 8, 0, 1, 2]
    np.testing.assert_allclose(xyz.forces.reshape(100, 9, 3), npz.forces.reshape(100, 9, 3)[:, order], atol=1e-6)
    assert "cell" not in xyz


def test_carbon_has_singular_force_and_a_virial(tmp_path):
    batch, conversion = batch_of(tmp_path, "metatrain/carbon_reduced_100.xyz")
    assert conversion.labels.used["forces"] == {"force": 100}
    assert conversion.labels.used["virial"] == {"virial": 100}
    assert conversion.labels.left["energy"] == {}  # not the cut-offs and tolerances of the run
    assert bool(batch.has("stress").all())


def test_qm9_needs_its_energy_named(tmp_path):
    with pytest.raises(DataError, match="no energy, forces or stress was found"):
        batch_of(tmp_path, "metatrain/qm9_reduced_100.xyz")


def test_3bpa_has_a_lattice_and_no_pbc(tmp_path):
    batch, _ = batch_of(tmp_path, "3bpa/train_300K.xyz", select="0:3")
    assert not batch.pbc.any()
    assert batch.cell[:, 0, 0].tolist() == [50.0] * 3


def test_isolated_atoms(tmp_path):
    batch, _ = batch_of(tmp_path, "3bpa/iso_atoms.xyz")
    energies = dict(zip(batch.atomic_numbers.tolist(), batch.energy.tolist(), strict=True))
    assert energies == pytest.approx({6: -1029.4890, 1: -13.5872, 7: -1484.9815, 8: -2041.9816}, abs=1e-4)


def test_mptrj_stress_and_declared_units(tmp_path):
    batch, conversion = batch_of(tmp_path, "mattersim/mptrj-random-1k.xyz")
    voigt = batch.stress[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    assert float(voigt.square().mean().sqrt()) == pytest.approx(0.026193, rel=1e-4)
    assert (float(voigt.min()), float(voigt.max())) == pytest.approx((-0.54908, 0.23588), abs=1e-5)
    assert float(batch.forces.abs().max()) == pytest.approx(70, rel=0.01)
    assert conversion.labels.declared == {"energy_unit": "eV", "forces_unit": "eV/A", "stress_unit": "eV/A^3"}
    with pytest.raises(DataError, match="declares another unit of energy"):
        batch_of(tmp_path, "mattersim/mptrj-random-1k.xyz", units=["kcal/mol"])


def test_a_neb_path_has_two_frames_without_results(tmp_path):
    file = "traj/cattsunami_sample_traj.traj"
    with pytest.raises(DataError, match=r"2 of 10 frames have neither energy nor forces nor stress.*frames 0, 9"):
        batch_of(tmp_path, file)
    batch, _ = batch_of(tmp_path, file, unlabelled="keep")
    assert batch.has("energy").tolist() == [False] + [True] * 8 + [False]
    batch, _ = batch_of(tmp_path, file, unlabelled="skip")


def test_zeroed_forces_of_fixed_atoms_are_told_or_masked(tmp_path):
    """In this file 68 of 98 atoms are fixed, and their forces were stored as zeros."""
    file = "traj/cattsunami_sample_traj.traj"
    batch, conversion = batch_of(tmp_path, file, unlabelled="skip")
    assert conversion.labels.zeroed == 8 * 68 == int((batch.forces == 0).all(dim=1).sum())
    assert any(f.level == "doubtful" and "set, not computed" in f.text for f in conversion.findings)
    batch, conversion = batch_of(tmp_path, file, unlabelled="skip", mask_fixed=True)
    assert int(batch.forces.isnan().all(dim=1).sum()) == 8 * 68
    assert all(f.level == "fine" for f in conversion.findings)
    assert conversion.summary.fields["forces"].rms == pytest.approx(0.19265 * (98 / 30) ** 0.5, rel=1e-4)


def test_mos2_has_free_energy_and_magmoms(tmp_path):
    batch, conversion = batch_of(tmp_path, "traj/MoS2.traj")
    assert set(conversion.labels.left["energy"]) == {"free_energy"}
    assert "magmoms" in batch
    assert conversion.labels.used["stress"] == {"stress": 3}


def test_fitsnap_stress_is_in_bar_and_positive_under_compression(tmp_path):
    files = [str(path.relative_to(DATA)) for path in sorted((DATA / "fitsnap_Ta").glob("*.xyz"))]
    with pytest.raises(DataError, match="beyond any material"):
        batch_of(tmp_path, files)
    with pytest.raises(DataError, match="pass --stress-sign compression"):
        batch_of(tmp_path, files, units=["stress=bar"])
    batch, conversion = batch_of(tmp_path, files, **TA)
    assert [file.frames for file in conversion.files] == [9, 9, 9, 100, 100, 22, 22, 3, 7, 30, 21, 31]
    assert conversion.summary.fields["energy"].min == pytest.approx(-11.8484, abs=1e-4)
    assert conversion.summary.fields["energy"].max == pytest.approx(28.1314, abs=1e-4)
    assert float(batch.stress[0, 0, 0]) == pytest.approx(-23963.03 * 6.2415e-7, rel=1e-4)


def test_a_volume_scan_is_the_derivative_of_its_energy(tmp_path):
    batch, _ = batch_of(tmp_path, "fitsnap_Ta/Volume_BCC.xyz", **TA)
    volumes = batch.cell.det().numpy()
    order = np.argsort(volumes)
    pressure = -batch.stress.diagonal(dim1=1, dim2=2).mean(1).numpy()[order]
    slope = -np.gradient(batch.energy.numpy()[order], volumes[order])
    middle = np.abs(pressure) < 1.0
    np.testing.assert_allclose(slope[middle][1:-1], pressure[middle][1:-1], atol=0.03)


def test_gpumd_has_singular_force_and_a_skewed_cell(tmp_path):
    batch, conversion = batch_of(tmp_path, "gpumd/PbTe_train.xyz", select="0:2")
    assert conversion.labels.used["forces"] == {"force": 2}
    assert batch.cell[0, 0, 0] == 0
    assert bool(batch.pbc.all())


def test_xtb_solvents_have_no_standard_keys(tmp_path):
    with pytest.raises(DataError, match="--energy-key energy_xtb --forces-key forces_xtb"):
        batch_of(tmp_path, "xtb_solvents/solvent_xtb_train_200.xyz")
    batch, _ = batch_of(tmp_path, "xtb_solvents/solvent_xtb_train_200.xyz", **XTB)
    assert int(batch.has("cell").sum()) == 3  # the isolated atoms
    assert not batch.pbc.any()


def test_fixed_atoms_of_a_relaxation_keep_their_forces(tmp_path):
    batch, conversion = batch_of(tmp_path, "misc_xyz/toy_c3h8_relax.extxyz")
    assert (batch.forces.norm(dim=1) == 0).sum() == 0
    assert "the forces agree" in conversion.findings[-1].text


def test_virial_only(tmp_path):
    batch, conversion = batch_of(tmp_path, "misc_xyz/TiAl_examples.xyz")
    assert conversion.labels.used["virial"] == {"virial": 5}
    volume = float(batch.cell[0].det())
    assert float(batch.stress[0, 0, 0]) == pytest.approx(-5.072173561696366 / volume)


def test_sic_stress(tmp_path):
    batch, conversion = batch_of(tmp_path, "misc_xyz/sic_dft.xyz")
    voigt = batch.stress[:, [0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
    assert float(voigt.square().mean().sqrt()) == pytest.approx(0.19572, rel=1e-4)
    assert conversion.labels.left["energy"]["free_energy"].difference == pytest.approx(0, abs=1e-9)


def test_the_database_has_magnetic_moments_on_some(tmp_path):
    batch, conversion = batch_of(tmp_path, "asedb/10_mptraj_systems.db")
    assert conversion.labels.used["stress"] == {"stress": 10}
    assert int(batch.has("magmoms").sum()) == 2


def test_the_two_files_of_one_vasp_run_agree(tmp_path):
    (tmp_path / "out").mkdir()
    xml, _ = batch_of(tmp_path, "vasp/vasprun.h2o.md.10.xml")
    out, _ = batch_of(tmp_path / "out", "vasp/OUTCAR.h2o.md.10")
    assert float((xml.energy - out.energy).abs().max()) == 0
    assert float((xml.forces - out.forces).abs().max()) < 1e-6
    assert float((xml.stress - out.stress).abs().max()) < 1e-7


def test_a_cut_outcar_says_which_steps_are_whole(tmp_path):
    lines = (DATA / "vasp/OUTCAR.h2o.md.10").read_text().splitlines(keepends=True)
    cut = tmp_path / "OUTCAR"
    cut.write_text("".join(lines[: len(lines) * 2 // 3]))
    with pytest.raises(
        DataError, match=r"OUTCAR ends in the middle of the run; found: (\d) whole ionic steps.*--select 0:\1"
    ) as error:
        convert([cut], tmp_path / "a.zarr")
    whole = int(error.value.fix.split("0:")[1].split()[0])
    conversion = convert([cut], tmp_path / "a.zarr", select=f"0:{whole}")
    assert conversion.summary.structures == whole


def test_gradients_of_spice_are_forces_when_their_sign_is_turned(tmp_path):
    settings = {"units": ["Hartree", "length=bohr"], "energy_key": "dft_total_energy", "forces_key": "minus_dft_total_gradient"}
    _, conversion = batch_of(tmp_path, "hdf5/SPICE-1.1.4_n2.hdf5", **settings)
    assert any("the forces agree with the changes of the energy" in finding.text for finding in conversion.findings)
    assert any("the file itself declares" in finding.text for finding in conversion.findings)


def test_pickled_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="runs code of the file"):
        batch_of(tmp_path, "lmdb/lips_devset.lmdb")
