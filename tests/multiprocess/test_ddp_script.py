"""One script under python and under torchrun, with the real manager; and what is left when one rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ddp_script.py")


def launch(folder: Path, *arguments: str, processes: int = 2):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *arguments], capture_output=True, text=True, timeout=100, env=settings
    )
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return done, reports


def test_the_same_script_on_one_and_two_processes(tmp_path):
    """B33, B36: starts and ends clean, and gives what one process gives."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    done, (alone,) = launch(tmp_path / "one", processes=1)
    assert done.returncode == 0, done.stderr
    assert "ddp" not in alone["hooks"]
    done, (first, second) = launch(tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    for got in (first, second):
        assert got["hooks"][0] == "ddp"
        assert got["samples"] == alone["samples"] == 80
        assert got["validation"] == pytest.approx(alone["validation"], rel=1e-12)
        assert got["weights"][0] == pytest.approx(alone["weights"][0], rel=1e-12)


@pytest.mark.parametrize(
    "fault", ["raised", pytest.param("caught", marks=pytest.mark.slow)]
)  # the latter also in test_together.py
def test_an_error_in_one_forward_ends_both(tmp_path, fault):
    """B25, B33: with the cause, whether the failed rank's process ends or lives on."""
    done, reports = launch(tmp_path, fault)
    by_rank = {report["rank"]: report for report in reports}
    assert by_rank[1]["error"] == "ValueError: a forward that fails"
    if fault == "raised":
        assert done.returncode != 0
        assert "ValueError: a forward that fails" in done.stderr
    else:
        assert "ValueError: a forward that fails" in by_rank[0]["error"]
        assert by_rank[0]["seconds"] < by_rank[1]["seconds"] + 6
