"""torchrun over two hosts: two network namespaces joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def why_not() -> str | None:
    """Why two namespaces cannot be had here, or None."""
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    cable = subprocess.run(
        ["ip", "-n", name, "link", "add", "end1", "type", "veth", "peer", "name", "end2"], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"virtual cables are not allowed here: {cable.stderr.strip()}" if cable.returncode else None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_train_as_one(tmp_path):
    """The recipe of docs/guide/distributed.md; each host has two processes, which talk over the cable."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    script = ROOT / "examples" / "two_nodes" / "try_two_nodes.sh"
    example = ROOT / "examples" / "intermediate" / "06_ddp_mlp_training.py"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", str(script), "2", str(example), "--backend", "gloo", "--epochs", "3"],
        cwd=tmp_path,
        env=settings,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("process(es)") == 1
    assert "4 process(es) on cpu: 192 steps, 12288 samples" in done.stdout
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "first-" not in left and "second-" not in left
