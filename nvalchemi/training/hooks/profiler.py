"""Profile some steps of a run with torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function, schedule

from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class ProfilerHook(Hook):
    """Write a trace and a table of the operations of some steps, on each rank.

    ``steps-<first>-<last>.rank<r>.json`` is a trace that chrome://tracing, Perfetto and TensorBoard show, with ranges for each micro-batch, forward
    and validation (``nvalchemi::microbatch``, ``nvalchemi::forward``, ``nvalchemi::validation``); the table of the same name, ``.txt``, has the operations
    by the time that they took themselves. Counted from the start of this process, also after a resume: the profile is of the machine
    and no part of the run, which goes on the same with it and without.

    Parameters
    ----------
    directory
        Where the files are written.
    wait, warmup, active, repeat
        Steps that are left out, then those that are profiled and thrown away, then those that are written; so often. See
        ``torch.profiler.schedule``.
    memory, shapes, stacks
        Whether sizes of allocations, shapes of inputs and source lines are recorded too; each makes steps slower.
    rows
        Of the table.

    Raises
    ------
    ConfigError
        For counts that make no schedule.
    """

    # enters last and leaves first, so that its ranges hold what is trained and no other hook
    order = Order.SAVE
    agreed = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 5,
        repeat: int = 1,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
        rows: int = 30,
    ) -> None:
        if min(wait, warmup - 1, active - 1, repeat - 1, rows - 1) < 0:
            raise ConfigError(
                "the profile has no schedule",
                found=f"wait={wait}, warmup={warmup}, active={active}, repeat={repeat}, rows={rows}",
                needed="wait of at least 0; warmup (the first steps pay for the profiler's start), active, repeat and rows of at least 1",
            )
        self.directory = Path(directory)
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.memory, self.shapes, self.stacks = memory, shapes, stacks
        self.rows = rows
        self._profile: Any = None
        self._steps = 0

    @around(TrainingSpan.RUN)
    def stop(self, ctx: TrainContext) -> Iterator[None]:
        """Whatever ends the run ends the profile: of steps that were to be written those are that there were."""
        try:
            yield
        finally:
            self._finish()

    @on(TrainingStage.TRAINING_START)
    def start(self, ctx: TrainContext) -> None:
        """Begin to count steps."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the profile cannot be written to {self.directory}",
                found=str(error),
                fix="choose a folder that can be written to",
            ) from error
        self._steps = 0
        self._begin_where_due(ctx)

    @on(TrainingStage.STEP_END)
    def count(self, ctx: TrainContext) -> None:
        """One step more."""
        self._steps += 1
        if self._profile is not None:
            self._profile.step()
            if self._steps % (self.wait + self.warmup + self.active) == 0:
                self._finish()
        self._begin_where_due(ctx)

    def _begin_where_due(self, ctx: TrainContext) -> None:
        """Turn the profiler on where the next step is the first of a warm-up."""
        cycle, within = divmod(self._steps, self.wait + self.warmup + self.active)
        if cycle >= self.repeat or within != self.wait:
            return
        before, first = self._steps + self.warmup, ctx.progress.step + ctx.progress.skipped + self.warmup + 1
        rank, cuda = ctx.manager.rank, ctx.manager.cuda

        def ready(profiled: Any) -> None:
            path = self.directory / f"steps-{first}-{first + self._steps - before - 1}.rank{rank}"
            profiled.export_chrome_trace(f"{path}.json")
            table = profiled.key_averages().table(
                sort_by="self_device_time_total" if cuda else "self_cpu_time_total", row_limit=self.rows
            )
            path.with_name(path.name + ".txt").write_text(table, encoding="utf-8")

        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=ready,
            profile_memory=self.memory,
            record_shapes=self.shapes,
            with_stack=self.stacks,
            acc_events=True,  # else torch warns that it forgets those of an earlier cycle, of which there is none
        )
        self._profile.start()

    def _finish(self) -> None:
        if self._profile is not None:
            profiled, self._profile = self._profile, None
            profiled.stop()

    @around(TrainingSpan.MICROBATCH)
    def microbatch(self, ctx: TrainContext) -> Iterator[None]:
        """A range around forward and backward."""
        with record_function("nvalchemi::microbatch"):
            yield

    @around(TrainingSpan.FORWARD)
    def forward(self, ctx: TrainContext) -> Iterator[None]:
        """A range around the forward pass and the loss."""
        with record_function("nvalchemi::forward"):
            yield

    @around(TrainingSpan.VALIDATION)
    def validation(self, ctx: TrainContext) -> Iterator[None]:
        """A range around a validation."""
        with record_function("nvalchemi::validation"):
            yield
