"""The SLURM script of the examples, with stand-ins for srun and scontrol that set what SLURM sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Two tasks on one node; signals go to the tasks, and the highest exit status is srun's own.
SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command = command[1:]
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for rank in range(2):
    place = {"SLURM_PROCID": str(rank), "SLURM_NPROCS": "2", "SLURM_NTASKS": "2", "SLURM_LOCALID": str(rank)}
    tasks.append(subprocess.Popen(command, env=os.environ | place))
open("srun.pid", "w").write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""

SCONTROL = """
import sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nsecond-node")
else:
    open("asked", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def job(tmp_path):
    """Start the batch script in a folder of its own, as SLURM would."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, code in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(f"#!{sys.executable}\n{code}")
        (tools / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    settings = os.environ | {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,second-node",
        "SLURM_CPUS_PER_TASK": "1",
    }
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        script = ROOT / "examples" / "slurm" / "train.sbatch"
        process = subprocess.Popen(
            ["bash", str(script), *arguments],
            cwd=tmp_path,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_stops_at_the_signal_is_queued_again_and_goes_on(job, tmp_path):
    """B70: both ranks stop at one step with a checkpoint, and the next turn ends the run from there."""
    first = job("--epochs", "100000", "--directory", "runs/job")
    end = time.monotonic() + 250
    while not list(tmp_path.glob("runs/job/step-*")):
        assert first.poll() is None and time.monotonic() < end, first.communicate()[0]
        time.sleep(0.1)
    os.kill(int((tmp_path / "srun.pid").read_text()), signal.SIGUSR1)
    output, _ = first.communicate(timeout=200)
    assert first.returncode == 0, output
    assert output.count("process(es)") == 1
    assert "2 process(es)" in output and "asked to by SIGUSR1" in output
    assert (tmp_path / "asked").read_text().splitlines() == [f"requeue {os.getpid()}"]

    saved = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("runs/job/step-*"))
    epochs = saved // 64 + 1
    output, _ = (second := job("--epochs", str(epochs), "--directory", "runs/job")).communicate(timeout=250)
    assert second.returncode == 0, output
    assert f"{64 * epochs} steps" in output and "asked" not in output
    assert len((tmp_path / "asked").read_text().splitlines()) == 1  # a finished job is not queued again
