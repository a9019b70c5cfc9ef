"""What a run reports: a record of means every so often, and one after each validation. Where it goes is a hook's."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvalchemi.training.hook import Every, PeriodicHook, Scope, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.window import Window

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class ReportingHook(PeriodicHook):
    """A hook that reports; a tracker of one's own is a subclass with `open`, `write` and `close`, which are called on rank 0 alone.

    A record of training has ``loss`` and ``loss/<part>`` (true, unscaled and unweighted parts), ``lr`` (``lr/<optimizer>`` where there are
    several), ``samples_per_s``, ``skipped`` (steps not taken so far) and whatever hooks put into ``ctx.metrics``; its values are means over
    the steps taken since the last record, on all ranks. That of a validation has its metrics.

    Parameters
    ----------
    every
        How often a training record is written, 50 steps unless given; what is left of a window is written when the run ends.
    """

    order = Order.OBSERVE
    agreed = True
    scope = Scope.RANK_LOCAL  # each rank has its own part of the window

    def __init__(self, every: Every | None = None) -> None:
        super().__init__(Every(steps=50) if every is None else every)
        self._window = Window()
        self._resumed = self._begun = self._is_open = False
        self._since = 0.0
        self._samples = 0

    @abstractmethod
    def open(self, ctx: TrainContext, resumed: bool) -> None:
        """Make ready to write from ``ctx.progress.step`` on; of a run that was resumed, what was written after that step is void."""

    @abstractmethod
    def write(self, kind: str, values: Mapping[str, Any], ctx: TrainContext) -> None:
        """Take a record; ``kind`` is ``"train"`` or ``"validation"``."""

    @abstractmethod
    def close(self) -> None:
        """The run is over, or has failed."""

    def sync(self) -> None:
        """Bring what was written to safety: a checkpoint is about to count on it."""

    @around(TrainingSpan.RUN)
    def files(self, ctx: TrainContext) -> Iterator[None]:
        """Close with the run, also on an error."""
        try:
            yield
        finally:
            if self._is_open:
                self._is_open = False
                self.close()

    @on(TrainingStage.BUILT)
    def reset(self, ctx: TrainContext) -> None:
        """A new run has no records yet."""
        self._window.clear()
        self._resumed = self._begun = False

    @on(TrainingStage.TRAINING_START)
    def begin(self, ctx: TrainContext) -> None:
        """Open where the run stands."""
        if self._begun:
            return
        self._begun = True
        if ctx.manager.rank == 0:
            self.open(ctx, self._resumed)
            self._is_open = True
        self._since = time.perf_counter()
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
        values = {**loss, **named_rates(ctx), "samples_per_s": rate, "skipped": ctx.progress.skipped, **others}
        self._report("train", values, ctx)
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
        self._report("validation", ctx.validation or {}, ctx)

    @on(TrainingStage.TRAINING_END)
    def finish(self, ctx: TrainContext) -> None:
        """Write what is left of the window."""
        if len(self._window):
            self.act(ctx)

    def _report(self, kind: str, values: Mapping[str, Any], ctx: TrainContext) -> None:
        if self._is_open:
            self.write(kind, values, ctx)

    def state_dict(self) -> dict[str, Any]:
        if self._is_open:
            self.sync()  # a checkpoint must not outlive the records that it counts
        return {"window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = True
        self._window.load_state_dict(state["window"])

    def divide_anew(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The window goes on with the means of all ranks that there were; all else is rank 0's."""
        return {**states[0], "window": Window.averaged([state["window"] for state in states])}


def named_rates(ctx: TrainContext) -> dict[str, float]:
    """``lr``, or ``lr/<optimizer>`` where there are several."""
    rates = ctx.learning_rates
    return {"lr": next(iter(rates.values()))} if len(rates) == 1 else {f"lr/{name}": rate for name, rate in rates.items()}
