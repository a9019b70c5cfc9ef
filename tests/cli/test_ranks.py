"""train, resume and evaluate under torchrun: two ranks do one thing and speak with one voice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from nvalchemi.cli import app
from nvalchemi.cli.run_dir import RunDir
from tests.cli.stores import CONFIG, make_stores

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ranks_script.py")

pytestmark = pytest.mark.timeout(400)


def torchrun(folder, *words):
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=350, env=settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stores, and a configuration with a rate that is scaled."""
    folder = tmp_path_factory.mktemp("ranks")
    make_stores(folder)
    config = CONFIG | {"data": CONFIG["data"] | {"dtype": "float64"}, "optimizer": {"lr_scaling": "sqrt"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """A run of two ranks, and what was said meanwhile."""
    return torchrun(folder, "-m", "nvalchemi", "train", "config.yaml", "--run-dir", "run", "training.steps=4")


def test_two_ranks_train_one_run(folder, trained):
    assert trained.returncode == 0, trained.stderr
    assert not [line for line in trained.stdout.splitlines() if not line.startswith("[Gloo]")]  # older versions of that say hello
    run = RunDir.existing(folder / "run")
    records = run.records()
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4]
    assert [r["lr"] for r in records if r["kind"] == "train"] == pytest.approx([2**0.5 * 1e-3] * 4)
    assert sorted({r["step"] for r in records if r["kind"] == "validation"}) == [2, 4]
    saved = json.loads(next(run.checkpoints.glob("step-*4/manifest.json")).read_text())
    assert saved["world_size"] == 2 and saved["progress"]["samples"] == 2 * 12
    assert saved["metrics"]["n"] == 4


def test_one_of_them_speaks(trained):
    assert trained.stderr.count("AdamW: lr 0.001 × 1.41421 (square root of the world size, 2)") == 1
    assert trained.stderr.count("4 steps, 2 epochs, 24 structures") == 1
    assert trained.stderr.count("the run is in run") == 1
    assert "Traceback" not in trained.stderr and "Warning" not in trained.stderr


@pytest.fixture(scope="module")
def further(folder, trained):
    """What two ranks say in an evaluation, a resume, another evaluation, an error and a command that is for one process."""
    assert trained.returncode == 0, trained.stderr
    commands = [
        ["evaluate", "run", "test.zarr", "--json", "--batch-size", "3"],
        ["resume", "run", "training.steps=5"],
        ["evaluate", "run", "valid.zarr", "--json", "--checkpoint", "last", "--batch-size", "1"],
        ["train", "config.yaml", "--run-dir", "lost", "data.train=absent.zarr"],
        ["info", "test.zarr"],
    ]
    return torchrun(folder, SCRIPT, json.dumps(commands))


def test_evaluate_is_that_of_one_process(folder, further, monkeypatch):
    """K07, B106: every structure once, in the data set's order, the errors of one process; printed once."""
    lines = [line for line in further.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 2, further.stdout + further.stderr
    monkeypatch.chdir(folder)
    for line, words in zip(lines, (["test.zarr", "--checkpoint"], ["valid.zarr", "--checkpoint"]), strict=True):
        report = json.loads(line)
        name = words[0].removesuffix(".zarr")
        with np.load(folder / "run" / "evaluation" / f"{name}.npz") as data:
            theirs = {key: data[key] for key in data.files}
        alone = CliRunner().invoke(app, ["evaluate", "run", *words, report["checkpoint"], "--json"])
        assert alone.exit_code == 0, alone.output
        wanted = json.loads(alone.stdout)
        assert report == {key: pytest.approx(v, rel=1e-12) if isinstance(v, float) else v for key, v in wanted.items()}
        with np.load(folder / "run" / "evaluation" / f"{name}.npz") as data:
            assert sorted(theirs) == sorted(data.files)
            assert all(np.allclose(theirs[key], data[key], rtol=1e-12) for key in data.files)
            assert data["sample_index"].tolist() == [0, 1, 2, 3]


def test_two_ranks_resume(folder, further):
    assert further.stderr.count("5 steps, 2 epochs, 32 structures") == 1, further.stderr
    records = [r["step"] for r in RunDir(folder / "run").records() if r["kind"] == "train"]
    assert records == [1, 2, 3, 4, 5]


def test_an_error_of_all_is_told_once(further):
    assert further.stderr.count("absent.zarr") == 1, further.stderr


def test_one_process_is_asked_for_where_one_is_enough(further):
    assert further.stderr.count("nvalchemi info works in one process") == 1, further.stderr
    assert further.stdout.count("exit 2") == 4
    assert further.returncode == 0


@pytest.mark.parametrize("words", [["convert", "in.xyz", "out.zarr"], ["info", "test.zarr"], ["plot", "run"], ["demo"]])
def test_refused_in_plain_words(folder, trained, words, monkeypatch):
    monkeypatch.chdir(folder)
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = CliRunner().invoke(app, words, env=place)
    assert result.exit_code == 2
    assert f"nvalchemi {words[0]} works in one process" in result.stderr and "found: 2 of them" in result.stderr
    assert not (folder / "out.zarr").exists() and not (folder / "runs").exists()
