"""SIGKILL at random instants, on any rank: every run goes on and ends as the unbroken one, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvalchemi.testing import state_differences
from nvalchemi.training import layout
from tests.training.hooks.random_kill_script import KINDS, STEPS
from tests.training.hooks.test_metrics import records, table, timeless

ROOT = Path(__file__).parents[3]


def check(folder, kind, count, limit):
    script = [sys.executable, "-m", "tests.training.hooks.random_kill_script", str(folder), kind, str(count)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout.splitlines()[-1])["status"]
    ranks = KINDS[kind][0]
    assert status["whole"] == status["again"] == [0] * ranks, said(folder / "whole")
    expected = [torch.load(folder / "whole" / f"end-{rank}.pt", weights_only=True) for rank in range(ranks)]
    killed = 0
    for name in (f"killed {number}" for number in range(count)):
        first, second = status[name]
        assert None not in first + second, f"{name} hangs: {said(folder / name)}"
        assert second == [0] * ranks, f"{name}: {said(folder / name)}"
        killed += -9 in first
        for rank in range(ranks):
            found = torch.load(folder / name / f"end-{rank}.pt", weights_only=True)
            assert list(state_differences(expected[rank], found)) == [], name
        assert timeless(records(folder / name)) == timeless(records(folder / "whole")), name
        assert timeless(table(folder / name)) == timeless(table(folder / "whole")), name
        saved = layout.list_checkpoints(folder / name / "checkpoints")
        assert saved[-1].step == STEPS and len(saved) == 2
        assert all(path.name.startswith("step-") for path in (folder / name / "checkpoints").iterdir()), name
    assert killed >= count // 3


def said(folder):
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("errors-*.txt")))


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_ten_random_instants(tmp_path, kind):
    """Ten of each kind; ``python -m tests.training.hooks.random_kill_script FOLDER KIND 30`` takes as many of one kind."""
    check(tmp_path, kind, 10, 600)


def test_killed_at_a_few_random_instants(tmp_path):
    check(tmp_path, "one", 3, 100)
