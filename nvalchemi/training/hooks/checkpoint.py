"""Save the run every so often, and when it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nvalchemi.data.address import where
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training import checkpoint, layout
from nvalchemi.training.agreement import first_rank
from nvalchemi.training.background import HostCopies, PendingSave
from nvalchemi.training.hook import Every, PeriodicHook, around, on
from nvalchemi.training.plans import Plans
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.storage import storage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class CheckpointHook(PeriodicHook):
    """Write a checkpoint every so many steps or epochs, and at the end of the run; keep the last few and the best.

    A checkpoint holds everything that training changed, also what other hooks keep, wherever this hook stands in the list. It
    appears in its folder only when it is whole. The scores of earlier checkpoints are read from the folder, so the best stays
    the best over a resume, and the latest whole checkpoint is never deleted.

    Parameters
    ----------
    dir
        The folder of the checkpoints, or an address such as ``"s3://bucket/runs/demo"``; ``resume_from="latest"`` looks there.
    every
        How often.
    keep_last
        How many of the newest to keep; ``None`` keeps all.
    keep_best
        How many of the best to keep besides, by the last validation before each save; ``None`` keeps none for its score.
    metric, mode
        The validation metric that ranks them, and whether less (``"min"``) or more (``"max"``) is better.
    async_save
        Training waits only until the state is copied to host memory, which a thread then writes. The copy takes as much memory as the
        state, and is kept for the next one. The run waits for a save before it begins the next, and before it ends.
    save_on_signal
        Such as ``signal.SIGUSR2``: a process that gets it saves at the end of the step, or of the next one where the backward has begun, on all ranks where
        one gets it, and goes on. Only in the main thread, which is the only one that Python tells of signals.

    Raises
    ------
    ConfigError
        For settings that cannot work; at the start of a run that does not resume, where the folder already holds checkpoints; and
        at a save, where ``metric`` is not among the validation's.
    CheckpointError
        Where the disk refuses, and where another run has begun to save in the same folder; with ``async_save`` at the next save or at the
        end of the run.
    """

    order = Order.SAVE
    agreed = True

    def __init__(
        self,
        dir: str | os.PathLike[str],
        every: Every | None = None,
        *,
        keep_last: int | None = 3,
        keep_best: int | None = None,
        metric: str = "loss",
        mode: Literal["min", "max"] = "min",
        async_save: bool = False,
        save_on_signal: signal.Signals | None = None,
    ) -> None:
        super().__init__(Every(epochs=1) if every is None else every)
        if (keep_last is not None and keep_last < 1) or (keep_best is not None and keep_best < 1) or mode not in ("min", "max"):
            raise ConfigError(
                "checkpoints cannot be kept like this",
                found=f"keep_last={keep_last!r}, keep_best={keep_best!r}, mode={mode!r}",
                needed="keep_last and keep_best of at least 1, or None; mode 'min' or 'max'",
            )
        place = where(dir)
        self.checkpoint_dir = (
            place.absolute() if isinstance(place, Path) else place
        )  # the program may go to another folder meanwhile
        self.keep_last, self.keep_best, self.metric, self.mode = keep_last, keep_best, metric, mode
        given: Any = save_on_signal
        if not isinstance(given, signal.Signals | None):
            raise ConfigError("save_on_signal is no signal", found=repr(given), needed="such as signal.SIGUSR2, or None")
        self.async_save, self.save_on_signal = async_save, save_on_signal
        self.claims = frozenset() if save_on_signal is None else frozenset({save_on_signal.name})
        self._plans = Plans()
        self._copies: HostCopies | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: PendingSave | None = None
        self._saved: tuple[int, int] | None = None
        self._scored: dict[str, float] | None = None
        self._sittings: set[str | None] = set()  # of which checkpoints may be in the folder

    @on(TrainingStage.TRAINING_START)
    def look(self, ctx: TrainContext) -> None:
        """A run that starts afresh must not mix its checkpoints with another's, nor delete those."""
        assert self.checkpoint_dir is not None
        present = storage(self.checkpoint_dir).appeared()
        if present and ctx.progress.samples == 0:
            raise ConfigError(
                f"{self.checkpoint_dir} holds the checkpoints of another run, and this one starts afresh",
                found=", ".join(present[-3:]),
                fix='go on with resume_from="latest", or give CheckpointHook another folder',
            )
        saved = layout.list_checkpoints(self.checkpoint_dir) if present else []
        self._sittings = {ctx.sitting, *(c.manifest.get("sitting") for c in saved)}
        # A finished run that is resumed has nothing new to save.
        self._saved = place(saved[-1].manifest["progress"]) if saved else None
        self._scored = saved[-1].manifest.get("metrics") if saved else None

    def act(self, ctx: TrainContext) -> None:
        """Save, then delete what need not be kept."""
        assert self.checkpoint_dir is not None
        if self.keep_best is not None and ctx.validation is not None and self.metric not in ctx.validation:
            raise ConfigError(
                f"the best checkpoints are ranked by '{self.metric}', which the validation does not give",
                found=", ".join(sorted(ctx.validation)) or "no metrics",
                fix="name one of those as CheckpointHook(metric=...)",
            )
        if self.async_save:
            self.settle()
            self._copies = self._copies or HostCopies()
            self._thread = self._thread or ThreadPoolExecutor(1, "nvalchemi-save")
            self._pending = checkpoint.save_behind(ctx, self.checkpoint_dir, self._plans, self._copies, self._thread, self._prune)
        else:
            checkpoint.save(ctx, self.checkpoint_dir, self._plans)
            first_rank(self._prune, ctx.manager)
        self._saved, self._scored = place(ctx.progress.state_dict()), ctx.validation

    def _check_alone(self, saved: Sequence[layout.SavedCheckpoint]) -> None:
        """Of two runs in one folder, each would delete the other's checkpoints, and a resume would take up whichever saved last."""
        others = [c.path.name for c in saved if c.manifest.get("sitting") not in self._sittings]
        if others:
            raise CheckpointError(
                f"another run saves its checkpoints in {self.checkpoint_dir}, too",
                found=f"{', '.join(others[-3:])}, which appeared there since this run began",
                fix="give each run a folder of its own; nothing was deleted",
            )

    def _prune(self) -> None:
        assert self.checkpoint_dir is not None
        saved = layout.list_checkpoints(self.checkpoint_dir, quiet=True)  # the save before has named those that cannot be read
        self._check_alone(saved)
        try:
            layout.prune(self.checkpoint_dir, self.keep_last, self.keep_best, self.metric, self.mode, saved)
        except OSError as error:
            raise CheckpointError(
                f"older checkpoints in {self.checkpoint_dir} could not be deleted",
                found=str(error),
                fix="see to the permissions, or keep all of them with keep_last=None; the new one is there",
            ) from error

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is there; all ranks must call.

        Raises
        ------
        CheckpointError
            Where it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    @on(TrainingStage.STEP_END)
    def asked(self, ctx: TrainContext) -> None:
        """Save where somebody asked for it, unless that was done just now."""
        if ctx.save_due and self._saved != place(ctx.progress.state_dict()):
            self.act(ctx)

    @around(TrainingSpan.RUN)
    def listen(self, ctx: TrainContext) -> Iterator[None]:
        """Take over the signal for the time of the run."""
        if self.save_on_signal is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(self.save_on_signal) or signal.SIG_DFL
        signal.signal(self.save_on_signal, lambda number, frame: ctx.save_soon())
        try:
            yield
        finally:
            signal.signal(self.save_on_signal, before)

    @on(TrainingStage.TRAINING_END)
    def last(self, ctx: TrainContext) -> None:
        """Save the end of the run with its last validation, unless that is what was saved last, or no step was ever made."""
        now = place(ctx.progress.state_dict())
        if ctx.progress.samples and (self._saved != now or self._scored != ctx.validation):
            self.act(ctx)
        elif ctx.progress.samples and self._pending is None:
            first_rank(self._prune, ctx.manager)  # a run that was killed between its last save and this
        self.settle()

    @around(TrainingSpan.RUN)
    def finish(self, ctx: TrainContext) -> Iterator[None]:
        """After an error too, what is being written is whole or gone when the run is left; the copies are let go."""
        try:
            yield
        finally:
            pending, thread = self._pending, self._thread
            self._pending = self._copies = self._thread = None
            self._plans = Plans()
            if pending is not None:
                pending.close()
            if thread is not None:
                thread.shutdown()


def place(progress: Mapping[str, int]) -> tuple[int, int]:
    """Where a state is in the run. An epoch's end is no new place: a resume from the step before it ends the epoch first."""
    return progress["step"], progress["samples"]
