"""Runs that are signalled, killed and started again, by torchrun or by nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.training import layout
from tests.multiprocess.restart_script import FATAL, STEPS, train

pytestmark = pytest.mark.timeout(700)

SCRIPT = Path(__file__).with_name("restart_script.py")
LIMIT = 300  # seconds; a busy machine takes long to import torch
SETTINGS = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[2])}


@pytest.fixture
def start():
    """Start a process; whatever is still there at the end is ended."""
    started = []

    def begin(command, **environment):
        process = subprocess.Popen(
            [sys.executable, *command],
            env=SETTINGS | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def torchrun(*options: str) -> list[str]:
    return ["-m", "torch.distributed.run", *options, str(SCRIPT)]


def reports(folder: Path, count: int = 2) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def wait_for(path: Path, process, limit=LIMIT) -> str:
    end = time.monotonic() + limit
    while not (path.exists() and path.read_text()):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(start, ranks, tmp_path):
    """B64, B70: it goes on from the last whole checkpoint by itself, with each rank's random streams, to the same weights."""
    whole = tmp_path / "whole"
    whole.mkdir()
    unbroken = ranks.call("tests.multiprocess.restart_script:train", whole)
    broken = start([*torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1"), str(tmp_path), "SIGKILL"])
    output, _ = broken.communicate(timeout=LIMIT)
    assert broken.returncode == 0, output
    for got, wanted in zip(reports(tmp_path), unbroken, strict=True):
        assert (got["first"], got["last"]) == (FATAL - 1, STEPS)
        assert got["weights"] == wanted["weights"]


def test_torchrun_is_asked_to_stop(start, tmp_path):
    """B70: SIGTERM to torchrun is SIGTERM to all ranks; they save once, and the next start goes on."""
    command = [*torchrun("--standalone", "--nproc-per-node=2"), str(tmp_path)]
    first = start([*command, "slow", "1", "10000"])
    wait_for(tmp_path / "at-1", first)
    os.kill(first.pid, signal.SIGTERM)
    output, _ = first.communicate(timeout=LIMIT)
    one, two = reports(tmp_path)
    assert one["interrupted"] and two["interrupted"] and one["last"] == two["last"]
    assert "SIGTERM" in one["stop"], output
    saved = layout.list_checkpoints(tmp_path / "runs")
    assert [c.step for c in saved].count(one["last"]) == 1 and saved[-1].step == one["last"]
    assert first.returncode == 1  # as documented: torchrun's own, whatever its workers exit with
    assert one["weights"] == two["weights"]


@pytest.mark.slow
def test_torchrun_goes_on_with_fewer_nodes(start, tmp_path):
    """B29: a node is lost for good, and the run goes on without it, to the weights of a run on one process from its start."""
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic")
    # the node that stays is where all meet, and waits for the other however long that takes to import torch
    meeting = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    nodes = [
        start([*torchrun(*options, *meeting, f"--rdzv-conf=last_call_timeout=30,is_host={host}"), str(tmp_path), "elastic"])
        for host in (1, 0)
    ]
    end = time.monotonic() + LIMIT
    while not layout.list_checkpoints(tmp_path / "runs"):
        assert all(node.poll() is None for node in nodes) and time.monotonic() < end, nodes[0].communicate()[0]
        time.sleep(0.1)
    saved = layout.list_checkpoints(tmp_path / "runs")[-1]
    assert saved.manifest["world_size"] == 2
    lost = next(pid for pid in children(nodes[1].pid))
    for pid in (nodes[1].pid, lost):
        os.kill(pid, signal.SIGKILL)
    output, _ = nodes[0].communicate(timeout=LIMIT)
    assert nodes[0].returncode == 0, output
    (report,) = reports(tmp_path, 1)
    assert (report["world_size"], report["last"], report["samples"]) == (1, STEPS, 12 * STEPS)
    assert 0 < report["first"] < STEPS
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = train(single_process("cpu"), whole, "elastic")
    for got, value in zip(report["weights"], wanted["weights"], strict=True):
        assert torch.allclose(torch.tensor(got), torch.tensor(value), rtol=1e-12, atol=1e-14)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("what", "rank", "timeout"),
    [
        ("SIGKILL", 0, 200),
        pytest.param("SIGSTOP", 1, 20, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", 0, 20, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_the_others(start, tmp_path, what, rank, timeout):
    """Nobody looks after them: they end with an error by themselves, at once or, where it only hangs, after the manager's time-out."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    arguments = [str(SCRIPT), str(tmp_path), what, str(rank), str(STEPS), str(timeout)]
    processes = [start(arguments, **place, RANK=str(r), LOCAL_RANK=str(r)) for r in range(2)]
    output, _ = processes[1 - rank].communicate(timeout=LIMIT)
    assert processes[1 - rank].returncode == 1, output
    assert "TrainingError: another rank is lost" in output
    assert f"no word from rank {rank}" in output
    assert 'resume_from="latest"' in output
    assert float(re.search(r"was done after ([\d.]+) s", output)[1]) < timeout + 30  # some of it to get there
