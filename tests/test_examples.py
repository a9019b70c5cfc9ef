"""Every example runs as a user would run it: a program of its own, in a folder of its own, within a time limit."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvalchemi.cli.config import load_config

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
ON_RANKS = [path for path in EXAMPLES if path.parent.name in ("intermediate", "ebm")]
ENGINES = {"01_accelerate": "accelerate", "02_fabric": "lightning_fabric"}  # examples of packages that need not be there
CONFIGS = sorted((ROOT / "examples").rglob("*.yaml"))


# A group that lives to the interpreter's end aborts some runs there ("terminate called without an active exception"), too few to see in one.
LEAVES_NO_GROUP = """
import runpy, sys
import torch.distributed as dist
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not dist.is_initialized(), "the example ends with its process group alive"
"""


def need(path: Path) -> None:
    """Skip an example whose package is not installed."""
    package = ENGINES.get(path.stem)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")


@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    need(path)
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", ON_RANKS, ids=lambda path: path.stem)
def test_example_runs_on_two_ranks(path, tmp_path):
    """The same program under torchrun; it says what it did once."""
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(set(lines)) and "2 process(es)" in done.stdout
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


@pytest.mark.timeout(320)
@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.stem in ENGINES], ids=lambda path: path.stem)
def test_another_engine_on_two_ranks_gives_what_one_process_gives(path, tmp_path):
    """Losses of second order, averages and samplers outside; weights, losses and samples are printed, and are the same."""
    need(path)
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    printed = []
    inspector = tmp_path / "inspector.py"
    inspector.write_text(LEAVES_NO_GROUP)
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]):
        command = [sys.executable, *launcher, str(inspector), str(path), "--cpu", "--epochs=2"]
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append([line for line in done.stdout.splitlines() if line.startswith(("epoch", "samples", "weights"))])
        assert f"{2 if launcher else 1} process(es)" in done.stdout
    assert printed[0] == printed[1] and len(printed[0]) == 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_is(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_is_valid(path):
    assert load_config(path).data.train
