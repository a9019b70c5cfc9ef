"""Two real processes under torchrun, talking through gloo on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def torchrun(script: Path, *arguments: str, processes: int = 2, limit: float = 100.0, **environment: str):
    """Run a script on several ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=limit, env=settings)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(Path(__file__).with_name("two_ranks.py"), str(folder))
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_know_their_places(reports):
    for rank, report in enumerate(reports):
        assert (report["rank"], report["world_size"], report["local_rank"]) == (rank, 2, rank)
        assert report["distributed"]
        assert report["device"] == "cpu"
        assert report["method"] == "env"
        assert report["environment"]
        assert report["left"]


def test_collectives_agree(reports):
    for rank, report in enumerate(reports):
        assert (report["sum"], report["max"], report["min"]) == (3.0, 2.0, 1.0)
        assert report["kept"] == 1.0 + rank
        assert report["ragged"] == [[[0, 0]], [[1, 1], [1, 1]]]
        assert report["scalars"] == [0, 1]
        assert report["flags"] == [[False], [True]]
        assert report["objects"] == [{"from": 0}, {"from": 1}]
        assert report["sent"] == 1
        assert report["said"] == "rank 0"
        assert report["any"] == [True, False]


def test_a_failed_start_shows_its_own_error():
    """B33: the first error is the last word, whatever runs at exit."""
    code = "from nvalchemi.distributed import DistributedManager as M\nM.initialize()"
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29599"}
    settings = os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""}
    settings.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    code = code.replace("initialize()", "initialize(timeout=__import__('datetime').timedelta(seconds=3))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=settings)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "no-such-host" in done.stderr or "resolve" in done.stderr or "connect" in done.stderr
