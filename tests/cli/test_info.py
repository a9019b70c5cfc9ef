"""``nvalchemi info`` prints what ``convert`` printed, from the store."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from nvalchemi.cli import app
from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from tests.data.convert.files import copper, ethanol, write


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setenv("COLUMNS", "200")


def typed(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def store(tmp_path):
    paths = [write(tmp_path / "a.xyz", ethanol()), write(tmp_path / "b.traj", copper())]
    return typed("convert", *paths, tmp_path / "a.zarr"), tmp_path / "a.zarr"


def test_info_prints_the_summary_of_convert(store):
    converted, path = store
    result = typed("info", path)
    assert result.exit_code == 0, result.output
    start = converted.stdout.index("structures  ")
    summary = converted.stdout[start : converted.stdout.index("\n\n", start)]
    assert summary.strip() in result.stdout
    assert "from a.xyz (3 frames), b.traj (3 frames)" in result.stdout
    assert "on 3 of 6" in result.stdout  # the stress


def test_json(store):
    _, path = store
    result = typed("info", path, "--json")
    data = json.loads(result.stdout)
    assert data["structures"] == 6
    assert data["elements"] == {"H": 18, "C": 6, "O": 3, "Cu": 12}
    assert data["fields"]["stress"]["structures"] == 3
    assert data["metadata"]["conversions"][0]["files"][1]["name"] == "b.traj"


def test_a_store_that_was_not_converted(tmp_path):
    AtomicDataZarrWriter(tmp_path / "a.zarr").write([AtomicData([[0, 0, 0], [0, 0, 0.75]], [1, 1], energy=-31.7)])
    result = typed("info", tmp_path / "a.zarr")
    assert result.exit_code == 0, result.output
    assert "1 with 2 atoms (2 each)" in result.stdout


def test_no_store(tmp_path):
    result = typed("info", tmp_path / "nothing.zarr")
    assert result.exit_code == 2
    assert "nothing.zarr" in result.stderr
    assert "Traceback" not in result.output


def test_verify_finds_a_flipped_bit(store):
    _, path = store
    assert typed("info", path, "--verify").exit_code == 0
    shard = next(file for file in sorted(path.rglob("*")) if "forces" in str(file) and file.is_file() and file.name == "0")
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    result = typed("info", path, "--verify")
    assert result.exit_code == 2
    assert "forces" in result.stderr


def test_duplicates_are_told(tmp_path):
    path = write(tmp_path / "a.xyz", ethanol(2) + ethanol(2))
    assert (
        "2 repeat the geometry of an earlier one, the first is structure 2" in typed("convert", path, tmp_path / "a.zarr").stdout
    )
