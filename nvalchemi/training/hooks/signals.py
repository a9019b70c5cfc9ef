"""End a run in good order when the system or the user asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class StopOnSignalHook(Hook):
    """On SIGTERM or Ctrl-C, finish the current step and end the run as usual: with its validation and its checkpoint.

    A second signal acts as it would have without this hook. Handlers are installed while the run lasts, in the main thread only
    (Python has no others), and put back after it. All ranks stop at the same step, whichever of them was signalled.

    Parameters
    ----------
    signals
        Which ones.
    """

    order = Order.GUARD

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.signals = signals
        self.received: signal.Signals | None = None

    @around(TrainingSpan.RUN)
    def listen(self, ctx: TrainContext) -> Iterator[None]:
        """Take over the signals for the time of the run."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in self.signals}

        def note(number: int, frame: FrameType | None) -> None:
            self.received = signal.Signals(number)
            for other, handler in before.items():
                signal.signal(other, handler)

        try:
            for number in self.signals:
                signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @on(TrainingStage.STEP_END)
    def stop(self, ctx: TrainContext) -> None:
        """Stop, if asked to: the loop agrees on it with the other ranks."""
        if self.received is not None:
            ctx.stop(f"asked to by {self.received.name}")
