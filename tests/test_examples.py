"""Every example runs as a user would run it: a program of its own, in a folder of its own, within a time limit."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvalchemi.cli.config import load_config

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
CONFIGS = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, tmp_path):
    settings = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_is(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    assert ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_is_valid(path):
    assert load_config(path).data.train
