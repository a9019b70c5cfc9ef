"""``nvalchemi convert`` as it is typed."""

from __future__ import annotations

import os

import numpy as np
import pytest
from typer.testing import CliRunner

from nvalchemi.cli import app
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.units import parse_unit
from tests.data.convert.files import copper, ethanol, renamed, rmd17, write

KCAL = parse_unit("kcal/mol", "energy").factor


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("COLUMNS", "200")


def typed(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def test_the_sequence_of_the_readme(tmp_path):
    path = rmd17(tmp_path / "rmd17_ethanol.npz", ethanol(20), 1 / KCAL)
    for name, select, count in (("train", "0:15", 15), ("valid", "15:20", 5)):
        result = typed(path, tmp_path / f"{name}.zarr", "--units", "kcal/mol", "--select", select)
        assert result.exit_code == 0, result.output
        assert f"{count} structures written" in result.stdout
        assert len(AtomicDataZarrReader(tmp_path / f"{name}.zarr")) == count


def test_the_summary_shows_everything_at_once(tmp_path):
    path = rmd17(tmp_path / "a.npz", ethanol(20), 1 / KCAL)
    text = typed(path, tmp_path / "a.zarr", "--units", "kcal/mol").stdout
    for words in (
        "20 with 180 atoms (9 each)",
        "H 120, C 40, O 20",
        "-467.",
        "eV per atom",
        "eV/Å, largest component",
        "from key 'energies' on 20 frames, in kcal/mol (times 0.0433641)",
        "from key 'forces' on 20 frames, in kcal/mol/Å (times 0.0433641)",
        "left out: key 'old_energies' on 20 frames, other by up to 0.578 eV per atom",
        "left out: key 'old_forces' on 20 frames",
        "not kept",
        "old_indices",
        "agrees",
    ):
        assert words in text, words


def test_a_wrong_unit_stops_it(tmp_path):
    path = rmd17(tmp_path / "a.npz", ethanol(5), 1 / KCAL)
    result = typed(path, tmp_path / "a.zarr")
    assert result.exit_code == 2
    assert "total energies in kcal/mol" in result.stderr
    assert "pass --units kcal/mol" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "a.zarr").exists()
    result = typed(path, tmp_path / "a.zarr", "--trust-units")
    assert result.exit_code == 0
    assert "warning" in result.stdout


def test_keys(tmp_path):
    path = renamed(tmp_path / "a.xyz", copper(), energy="E", forces="F", stress="S")
    result = typed(path, tmp_path / "a.zarr")
    assert result.exit_code == 2
    assert "no energy, forces or stress was found" in result.stderr
    result = typed(path, tmp_path / "a.zarr", "--energy-key", "E", "--forces-key", "F", "--stress-key", "S")
    assert result.exit_code == 0, result.output
    batch = AtomicDataZarrReader(tmp_path / "a.zarr").read_many(range(3))
    np.testing.assert_allclose(batch.energy, [atoms.calc.results["energy"] for atoms in copper()], atol=1e-6)
    assert bool(batch.has("stress").all())


def test_a_label_that_is_left_out_is_said_with_the_option_that_takes_it(tmp_path):
    path = renamed(tmp_path / "a.xyz", ethanol(), energy="energy", forces="REF_forces")
    text = typed(path, tmp_path / "a.zarr").stdout
    assert "which looks like the forces; --forces-key REF_forces takes it" in text


def test_units_by_quantity_and_sign(tmp_path):
    frames = copper()
    for atoms in frames:
        atoms.calc.results["stress"] = atoms.calc.results["stress"] * -1 / parse_unit("kbar", "stress").factor
    result = typed(
        write(tmp_path / "a.traj", frames), tmp_path / "a.zarr", "--units", "stress=kbar", "--stress-sign", "compression"
    )
    assert result.exit_code == 0, result.output
    assert "in kbar (times 0.0006241509), positive under compression" in result.stdout
    stress = AtomicDataZarrReader(tmp_path / "a.zarr").read(0).stress
    assert float(stress[0, 0]) == pytest.approx(copper()[0].calc.results["stress"][0])


def test_unlabelled_frames(tmp_path):
    frames = ethanol(4)
    frames[2].calc = None
    path = write(tmp_path / "a.traj", frames)
    result = typed(path, tmp_path / "a.zarr")
    assert result.exit_code == 2
    assert "a.traj: frames 2" in result.stderr
    result = typed(path, tmp_path / "a.zarr", "--skip-unlabelled")
    assert "1 of them have no label and were left out: frames 2" in result.stdout
    result = typed(path, tmp_path / "b.zarr", "--allow-unlabelled")
    assert "kept without labels" in result.stdout
    assert "1 of 4 have no label at all" in result.stdout
    assert typed(path, tmp_path / "c.zarr", "--allow-unlabelled", "--skip-unlabelled").exit_code == 2


def test_append_overwrite_dtype(tmp_path):
    path, store = write(tmp_path / "a.xyz", ethanol()), tmp_path / "a.zarr"
    assert typed(path, store, "--dtype", "float32").exit_code == 0
    result = typed(path, store)
    assert result.exit_code == 2
    assert "--append adds to it, --overwrite replaces it" in result.stderr
    assert "3 structures added" in typed(path, store, "--append", "--dtype", "float32").stdout
    assert len(AtomicDataZarrReader(store)) == 6
    result = typed(path, store, "--append")
    assert result.exit_code == 2
    assert "float32" in result.stderr
    assert typed(path, store, "--overwrite").exit_code == 0
    assert len(AtomicDataZarrReader(store)) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.xyz", "b.xyz"], "the last path is the store to write"),
        (["b.zarr"], "there is no input file"),
        (["missing.xyz", "b.zarr"], "there is no file"),
        (["a.xyz", "b.zarr", "--units", "kilos"], "no unit of energy"),
        (["a.xyz", "b.zarr", "--select", "-5:"], "selects nothing"),
        (["a.xyz", "b.zarr", "--stress-sign", "up"], "tension or compression"),
        (["a.xyz", "b.zarr", "--energy-key", "Energy"], "did you mean --energy-key energy?"),
    ],
)
def test_mistakes_are_told_plainly(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.xyz", ethanol())
    result = typed(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "b.zarr").exists()
