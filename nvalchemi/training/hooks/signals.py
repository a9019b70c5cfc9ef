"""End a run in good order when the system or the user asks for it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from nvalchemi.training.hook import Hook, around
from nvalchemi.training.stages import Order, TrainingSpan

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

USUAL = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1") if name in signal.Signals.__members__)
AGAIN = 2.0  # seconds after which a Ctrl-C is the user's second and not the launcher's copy of the first


class StopOnSignalHook(Hook):
    """On SIGTERM, Ctrl-C or SIGUSR1, finish the current step, save and end the run, on all ranks, whichever of them was signalled.

    SIGTERM is what torchrun, ``scancel`` and container managers send, SIGUSR1 what SLURM sends before a job's time is over
    (``--signal=USR1@120``). Time is short then, so that a validation is cut short and the one at the end left out; a run that resumes makes
    up for the former. A :class:`~nvalchemi.training.hooks.CheckpointHook` saves at the end as ever. After the run ``ctx.interrupted``
    says, on all ranks, that it has to be resumed.

    Any further signal changes nothing, since launchers send more than one, but for a second Ctrl-C, two seconds or more after the first,
    which acts as it would have without this hook. Handlers are installed while the run lasts, in the main thread only (Python has
    no others), and put back after it. A signal before the run ends the process as ever; nothing is lost by then.

    Parameters
    ----------
    signals
        Which ones.
    """

    order = Order.GUARD
    agreed = True

    def __init__(self, signals: tuple[signal.Signals, ...] = USUAL) -> None:
        self.signals = signals
        self.claims = frozenset(signal.Signals(number).name for number in signals)

    @around(TrainingSpan.RUN)
    def listen(self, ctx: TrainContext) -> Iterator[None]:
        """Take over the signals for the time of the run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # getsignal knows of no handler that was not installed from Python
        before = {number: signal.getsignal(number) or signal.SIG_DFL for number in self.signals}
        first: float | None = None

        def note(number: int, frame: FrameType | None) -> None:
            nonlocal first
            now = time.monotonic()
            if number == signal.SIGINT:
                if first is not None and now - first >= AGAIN:
                    signal.signal(number, before[signal.SIGINT])
                    signal.raise_signal(number)
                    return
                first = now if first is None else first
            ctx.interrupt(f"asked to by {signal.Signals(number).name}")

        try:
            for number in self.signals:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
