"""Write the numbers of a run to files: JSON lines and CSV, without gaps or doubles over a resume."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi.training.hook import Every, PeriodicHook, Scope, around, on
from nvalchemi.training.records import RecordFiles, plain
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.window import Window

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class MetricsHook(PeriodicHook):
    """Append a record every so many steps, and one after each validation, to ``metrics.jsonl`` and ``metrics.csv``.

    A record has ``kind`` (``"train"`` or ``"validation"``), ``step`` (optimizer steps taken), ``epoch`` (epochs completed) and
    ``time`` (seconds since the run's start, over resumes). A training record goes on with ``loss`` and ``loss/<part>`` (true, unscaled
    and unweighted parts), ``lr`` (``lr/<optimizer>`` where there are several), ``samples_per_s``, ``skipped`` (steps not taken so far)
    and whatever hooks put into ``ctx.metrics``; its values are means over the steps taken since the last record, on all ranks. A
    validation record goes on with the validation's metrics. Numbers that are not finite are the strings ``"nan"``, ``"inf"`` and
    ``"-inf"``, so that each line is valid JSON and ``float()`` reads it.

    After a resume the files go on exactly where the checkpoint was made; what a killed run wrote after that is cut off. A run that
    starts afresh puts an older file aside under another name.

    Parameters
    ----------
    directory
        Where the two files are.
    every
        How often a training record is written; what is left of a window is written when the run ends.
    """

    order = Order.OBSERVE
    agreed = True
    scope = Scope.RANK_LOCAL  # each rank has its own part of the window

    def __init__(self, directory: str | os.PathLike[str], every: Every | None = None) -> None:
        super().__init__(Every(steps=50) if every is None else every)
        self.directory = Path(directory)
        self._window = Window()
        self._records = 0
        self._resumed = self._begun = False
        self._writer: RecordFiles | None = None
        self._start = self._since = 0.0
        self._samples = 0

    @around(TrainingSpan.RUN)
    def files(self, ctx: TrainContext) -> Iterator[None]:
        """Close the files with the run, also on an error."""
        try:
            yield
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    @on(TrainingStage.BUILT)
    def reset(self, ctx: TrainContext) -> None:
        """A new run has no records yet."""
        self._window.clear()
        self._records, self._resumed, self._begun = 0, False, False

    @on(TrainingStage.TRAINING_START)
    def begin(self, ctx: TrainContext) -> None:
        """Open the files where the run stands."""
        if self._begun:
            return
        self._begun, elapsed = True, 0.0
        if ctx.manager.rank == 0:
            self._writer = RecordFiles(self.directory, self._records if self._resumed else None)
            self._records, elapsed = self._writer.records, self._writer.elapsed
        self._since = time.perf_counter()
        self._start = self._since - elapsed
        self._samples = ctx.progress.samples

    @on(TrainingStage.OPTIMIZER_STEPPED)
    def collect(self, ctx: TrainContext) -> None:
        """Take the step's numbers; nothing is fetched from the device."""
        self._window.add(ctx)

    def act(self, ctx: TrainContext) -> None:
        """Write the window's record."""
        now = time.perf_counter()
        means = self._window.means(ctx.manager)
        self._window.clear()
        loss = {k: v for k, v in means.items() if k == "loss" or k.startswith("loss/")}
        rate = (ctx.progress.samples - self._samples) / max(now - self._since, 1e-9)
        others = {k: v for k, v in means.items() if k not in loss}
        self._write("train", ctx, {**loss, **named_rates(ctx), "samples_per_s": rate, "skipped": ctx.progress.skipped, **others})
        self._since, self._samples = now, ctx.progress.samples

    @around(TrainingSpan.VALIDATION)
    def pause(self, ctx: TrainContext) -> Iterator[None]:
        """Time spent on validation is not the training's."""
        self.begin(ctx)  # a validation before the first step comes before this hook's turn
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    @on(TrainingStage.VALIDATED)
    def validated(self, ctx: TrainContext) -> None:
        """Write the validation's record."""
        self._write("validation", ctx, ctx.validation or {})

    @on(TrainingStage.TRAINING_END)
    def finish(self, ctx: TrainContext) -> None:
        """Write what is left of the window."""
        if len(self._window):
            self.act(ctx)

    def _write(self, kind: str, ctx: TrainContext, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        elapsed = round(time.perf_counter() - self._start, 3)
        place = {"kind": kind, "step": ctx.progress.step, "epoch": ctx.progress.epoch, "time": elapsed}
        self._writer.write({**place, **{k: plain(v) for k, v in values.items() if k not in place}})
        self._records = self._writer.records

    def state_dict(self) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.sync()  # a checkpoint must not outlive the records that it counts
        return {"records": self._records, "window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._records, self._resumed = int(state["records"]), True
        self._window.load_state_dict(state["window"])

    def divide_anew(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The window goes on with the means of all ranks that there were; the records are rank 0's."""
        return {"records": states[0]["records"], "window": Window.averaged([state["window"] for state in states])}


def named_rates(ctx: TrainContext) -> dict[str, float]:
    """``lr``, or ``lr/<optimizer>`` where there are several."""
    rates = ctx.learning_rates
    return {"lr": next(iter(rates.values()))} if len(rates) == 1 else {f"lr/{name}": rate for name, rate in rates.items()}
