"""Two real processes under torchrun, or with the variables of SLURM or Open MPI, talking through gloo on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # processes that import PhysicsNeMo: seconds each, minutes where others use the machine


def torchrun(script: Path, *arguments: str, processes: int = 2, limit: float = 250.0, **environment: str):
    """Run a script on several ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=limit, env=settings)


SCRIPT = Path(__file__).with_name("two_ranks.py")

# What a launcher tells each process; SLURM and Open MPI find the meeting point by MASTER_ADDR and MASTER_PORT, or by defaults.
LAUNCHERS = {
    "slurm": lambda rank: {
        "SLURM_PROCID": rank,
        "SLURM_NPROCS": 2,
        "SLURM_LOCALID": rank,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    },
    "openmpi": lambda rank: {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(launcher: str, folder: Path) -> None:
    """Start two ranks as a launcher does, and wait for them."""
    if launcher == "env":
        done = torchrun(SCRIPT, str(folder))
        assert done.returncode == 0, done.stderr
        return
    common = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env=common | {name: str(value) for name, value in LAUNCHERS[launcher](rank).items()},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=250)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# the variables of the third are read in test_manager.py too
@pytest.fixture(scope="module", params=["env", "slurm", pytest.param("openmpi", marks=pytest.mark.slow)])
def launched(request, tmp_path_factory):
    """A launcher, and what each of two ranks saw that it started."""
    folder = tmp_path_factory.mktemp("ranks")
    start(request.param, folder)
    return request.param, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def reports(launched):
    return launched[1]


def test_ranks_know_their_places(launched):
    launcher, reports = launched
    for rank, report in enumerate(reports):
        assert (report["rank"], report["world_size"], report["local_rank"]) == (rank, 2, rank)
        assert report["distributed"]
        assert report["device"] == "cpu"
        assert report["method"] == launcher
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
