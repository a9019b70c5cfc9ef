"""A run that is killed with SIGKILL, at steps, in saves, in validations and in the middle of a line, ends as if it never was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvalchemi.testing import state_differences
from tests.training.hooks.kill_script import INSTANTS
from tests.training.hooks.test_metrics import records, table, timeless

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.hooks.kill_script", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("instant", INSTANTS, ids=lambda pair: f"{pair[0]} {pair[1]}".replace(" ", "_"))
def test_b62_killed_and_resumed_is_as_unbroken(killed, instant):
    folder, status, errors = killed
    name = f"{instant[0]} {instant[1]}"
    assert status["whole"] == [0], errors
    assert status[name] == [-9, 0], errors  # it died where it was told to, and went on
    whole, found = (torch.load(folder / n / "end.pt", weights_only=True) for n in ("whole", name))
    assert list(state_differences(whole, found)) == []
    assert timeless(records(folder / name)) == timeless(records(folder / "whole"))
    assert timeless(table(folder / name)) == timeless(table(folder / "whole"))
    saved = [sorted(p.name for p in (folder / n / "checkpoints").iterdir()) for n in ("whole", name)]
    assert saved[0] == saved[1]  # no debris either
