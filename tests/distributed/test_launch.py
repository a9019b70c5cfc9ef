"""Processes that a program starts itself: they find each other, fail together, and none outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvalchemi.distributed.launch import launch
from nvalchemi.errors import TrainingError

ROOT = Path(__file__).parents[2]

#: writes its process id, its rank and where it meets the others; then does what it is told
CHILD = """
import os, pathlib, signal, sys, time
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if how == "in good order":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
(folder / f"{rank}.part").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}")
os.replace(folder / f"{rank}.part", folder / rank)
if how == "fail" and rank == "1":
    sys.exit(3)
if how != "end":
    time.sleep(600 if how != "fail" else 0.5)
"""


def words(folder, how):
    return [sys.executable, "-c", CHILD, str(folder), how]


def children(folder, count=2, limit=60.0):
    """Process ids of the children, once all are there."""
    end = time.monotonic() + limit
    while len(found := [path for path in folder.iterdir() if path.suffix == ""]) < count:
        assert time.monotonic() < end, "the children do not come up"
        time.sleep(0.02)
    return [int(path.read_text().split()[0]) for path in sorted(found)]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_each_has_its_place(tmp_path):
    launch(words(tmp_path, "end"), 3)
    (_, size, port), *others = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert size == "3" and int(port) > 0
    assert all(other[1:] == [size, port] for other in others)


def test_a_failure_is_named_and_leaves_nobody(tmp_path):
    with pytest.raises(TrainingError, match=r"1 of 2 processes failed.*process 1 by exit status 3"):
        launch(words(tmp_path, "fail"), 2)
    assert all(map(gone, children(tmp_path)))


def test_one_that_was_told_to_end_has_not_failed(tmp_path):
    command = [sys.executable, "-c", "import os, sys; sys.exit(75 * int(os.environ['RANK']))"]
    launch(command, 2, stopped=75)
    with pytest.raises(TrainingError, match="process 1 by exit status 75"):
        launch(command, 2)


MEETING = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
mine = torch.tensor([float(os.environ["RANK"]) + 1.0])
dist.all_reduce(mine)
dist.destroy_process_group()
raise SystemExit(0 if mine.item() == 3.0 else 1)
"""


def test_they_meet_without_a_port_of_ours():
    launch([sys.executable, "-c", MEETING], 2)


def heeding_signals():
    """Tests that run under nohup, or in the background of a script, ignore signals, and their children would too."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


PROGRAM = """
import sys
from nvalchemi.distributed.launch import launch
launch(sys.argv[1:], 2)
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "signals", "status", "said"),
    [
        ("in good order", [signal.SIGINT], 0, "went on\n"),
        ("killed", [signal.SIGTERM], 128 + signal.SIGTERM, ""),
        ("killed", [signal.SIGHUP], 128 + signal.SIGHUP, ""),
    ],
)
def test_signals_end_all(tmp_path, how, signals, status, said):
    """Ctrl-C is passed on, once, and a program whose children end in good order goes on; what kills the program kills them."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, *words(tmp_path, how)]
    program = subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeding_signals
    )
    try:
        pids = children(tmp_path)
        for number in signals:
            os.killpg(program.pid, number)  # as a terminal does: to all of the foreground
        output, _ = program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    assert (program.returncode, output) == (status, said)
    assert all(map(gone, pids))
