"""Several processes of one command on this machine, for a program that starts them itself; ``torchrun`` does it for a user."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from nvalchemi.distributed.manager import rank_environment
from nvalchemi.errors import TrainingError

PATIENCE = 20.0  # seconds for the others to end by themselves when one has failed, and again before a termination becomes a kill
_LOOK = 0.05


def launch(command: Sequence[str], processes: int, *, stopped: int = 0) -> None:
    """Run ``command`` in so many processes that find each other as under torchrun, and wait for all of them.

    They meet at a store of this process, on a port that the system gives. The first SIGINT or SIGTERM that this process gets is passed on
    to all of them, so that they can end in good order; a second one, or a hang-up, ends them. None is left running when this returns or
    raises.

    Parameters
    ----------
    command
        Program and arguments, the same for all.
    processes
        How many.
    stopped
        The exit status of one that was told to end and did so in good order.

    Raises
    ------
    TrainingError
        Where one of them fails: naming each that did, with its exit status.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    children: list[subprocess.Popen[bytes]] = []
    with _signals(lambda number: _send(children, number)) as received:
        try:
            for rank in range(processes):
                # in a session of its own: what the terminal sends to all would reach a child twice
                environment = rank_environment(rank, processes, store.port)
                children.append(subprocess.Popen(command, env=environment, start_new_session=True))
            if not received:  # none was passed on to a child that was not there yet
                _wait(children, stopped)
        finally:
            _end(children)
    failed = {rank: child.returncode for rank, child in enumerate(children) if child.returncode not in (0, stopped)}
    if failed and received:
        raise _of_signal(received[0])
    if failed:
        said = ", ".join(f"process {rank} by {_in_words(status)}" for rank, status in failed.items())
        raise TrainingError(f"{len(failed)} of {processes} processes failed", found=said, fix="see what they said above")


def _wait(children: Sequence[subprocess.Popen[bytes]], stopped: int) -> None:
    """Until all have ended, or one has failed and the others had time to hear of it."""
    failed_at: float | None = None
    while any(child.poll() is None for child in children):
        if failed_at is None and any(child.returncode not in (None, 0, stopped) for child in children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + PATIENCE:
            return
        time.sleep(_LOOK)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End whatever still runs, with all that it has started, also where somebody loses patience meanwhile."""
    end = time.monotonic() + PATIENCE
    try:
        _send(children, signal.SIGTERM)
        while time.monotonic() < end and any(child.poll() is None for child in children):
            time.sleep(_LOOK)
    finally:
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _send(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for child in children:
        child.send_signal(number)  # nothing where it has ended


@contextmanager
def _signals(pass_on: Callable[[int], None]) -> Iterator[list[int]]:
    """Pass the first signal on and keep it in the list that is given; raise at the second. In the main thread only, as Python has it."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or number == signal.SIGHUP:
            raise _of_signal(number)
        pass_on(number)

    if threading.current_thread() is threading.main_thread():
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in wanted if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, note)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_signal(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _in_words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
