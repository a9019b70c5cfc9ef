"""The loop: :meth:`TrainingStrategy.run` and :meth:`TrainingStrategy.train_step` say where everything happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import nn

from nvalchemi.distributed import Manager
from nvalchemi.errors import TrainingError
from nvalchemi.objective import Count
from nvalchemi.training import agreement, checkpoint
from nvalchemi.training.context import TrainContext
from nvalchemi.training.division import DivisionReport
from nvalchemi.training.finite import FiniteHook
from nvalchemi.training.hook import Hook
from nvalchemi.training.optimizers import OptimizerConfigs
from nvalchemi.training.setup import begin, build_optimizers, check_declaration, check_run, end, first_weights
from nvalchemi.training.skips import LateSkips
from nvalchemi.training.stages import TrainingSpan, TrainingStage
from nvalchemi.training.streams import OwnStreams
from nvalchemi.training.table import HookTable
from nvalchemi.training.totals import tell
from nvalchemi.training.update import Update
from nvalchemi.training.validation import ValidationConfig, validation_hooks
from nvalchemi.training.visited import ZeroWhereVisited


@dataclass(eq=False, kw_only=True)
class TrainingStrategy:
    """A recipe for training: no run changes it.

    Parameters
    ----------
    models
        One model, or a dict of named models. Models without an optimizer config are frozen and in eval mode during the run.
    optimizer_configs
        One :class:`~nvalchemi.training.optimizers.OptimizerConfig` or a list of them, or a dict of these by model name.
    loss_fn
        A loss of this package, composed with ``+`` and weights; or a callable, see :func:`nvalchemi.training.objectives.as_objective`.
    training_fn
        ``training_fn(model, batch)`` gives the predictions; where ``models`` is a dict it is given the dict.
    num_epochs, num_steps
        When the run ends; the first to be reached counts. ``num_steps`` counts optimizer steps taken, over resumes.
    accumulate
        Micro-batches an optimizer step; the last step of an epoch takes what is left.
    hooks
        In any order where their bands differ: see :class:`nvalchemi.training.stages.Order`.
    validation_config
        What to validate on, and how often.
    distributed_manager
        ``None`` means one process.
    seed
        Of the run's generator and of the loader's order where the loader has no seed of its own. Torch's global stream (dropout)
        is the user's, and another one on each rank; checkpoints save and restore it.
    resume_from
        ``"latest"`` (of the checkpoint hook's folder; starts afresh where there is nothing yet), or the path of a checkpoint or
        of a folder of them.
    init_from
        A checkpoint of which the weights alone are taken.
    fresh
        Names of hooks that start anew although the checkpoint resumed from has no state of them.
    max_consecutive_skips
        So many skipped steps in a row end the run with an error.
    """

    models: nn.Module | Mapping[str, nn.Module]
    optimizer_configs: OptimizerConfigs
    loss_fn: Any
    training_fn: Callable[..., Any] | None = None
    num_epochs: int | None = None
    num_steps: int | None = None
    accumulate: int = 1
    hooks: Sequence[Hook | Callable[..., Any]] = ()
    validation_config: ValidationConfig | None = None
    distributed_manager: Manager | None = None
    seed: int = 0
    resume_from: str | PathLike[str] | None = None
    init_from: str | PathLike[str] | None = None
    fresh: Sequence[str] = ()
    max_consecutive_skips: int = 100

    def __post_init__(self) -> None:
        check_declaration(self)

    def run(self, loader: Iterable[Any]) -> TrainContext:
        """Train on ``loader``, anything that can be iterated over once an epoch; returns the run's final state.

        Raises
        ------
        ConfigError
            Before the first step, where the declaration cannot work.
        CheckpointError
            Where there is nothing whole and fitting to resume from.
        TrainingError
            Where the run cannot go on.
        """
        ctx = begin(self, loader)
        try:
            own = [
                OwnStreams(),
                ZeroWhereVisited(),
                LateSkips(),
                FiniteHook(),
                DivisionReport(),
                *validation_hooks(self.validation_config),
            ]
            hooks = ctx.hooks = HookTable([*self.hooks, *own], ctx.manager)
            with hooks.around(TrainingSpan.RUN, ctx):
                hooks.fire(TrainingStage.SETUP, ctx)  # wrap models, shard the loader
                first_weights(ctx, self)
                build_optimizers(ctx, self.optimizer_configs)
                ctx.update = Update(ctx.optimizers)
                hooks.fire(TrainingStage.BUILT, ctx)  # mixed precision replaces the update; EMA clones the weights
                check_run(ctx, self)
                if self.resume_from is not None:
                    checkpoint.load(ctx, self.resume_from, fresh=self.fresh)
                hooks.fire(TrainingStage.TRAINING_START, ctx)
                while not agreement.finished(ctx):
                    ctx.cursor.seek(ctx.progress)
                    if ctx.progress.at_epoch_start:
                        hooks.fire(TrainingStage.EPOCH_START, ctx)
                    for group, counts in agreement.steps(ctx, self.accumulate):
                        self.train_step(group, counts, ctx)
                    if ctx.cursor.at_end:
                        ctx.end_epoch()
                        hooks.fire(TrainingStage.EPOCH_END, ctx)
                hooks.fire(TrainingStage.TRAINING_END, ctx)
        finally:
            end(ctx)
        return ctx

    def train_step(self, group: list[Any], counts: Mapping[str, Count] | None, ctx: TrainContext) -> None:
        """One optimizer step over a group of micro-batches: the unit of counters, hooks and checkpoints."""
        hooks, update = ctx.hooks, ctx.update
        ctx.begin_step(group, counts)
        hooks.fire(TrainingStage.STEP_START, ctx)
        update.zero_grad()
        done = hear = None
        for batch, last in mark_last(group):
            ctx.begin_microbatch(batch, last)
            with hooks.around(TrainingSpan.MICROBATCH, ctx):
                with hooks.around(TrainingSpan.FORWARD, ctx):
                    loss = ctx.objective(ctx.callee, ctx.batch, generator=ctx.generator, step=ctx.progress.step)
                    ctx.loss = ctx.counted(loss)
                hooks.fire(TrainingStage.LOSS_READY, ctx)
                done = ctx.loss_after(done)
                hear = tell(done, ctx) if last else None  # ranks hear of it during the backward
                update.backward(ctx.loss.over(ctx.counts, ctx.manager.world_size), last)
            ctx.loss = done  # no hook can keep the graph alive
        assert hear is not None  # a group holds at least one micro-batch
        ctx.loss = hear()
        if not update.unscale():
            ctx.skip_step("the gradients overflowed at the present loss scale", agreed=True)
        hooks.fire(TrainingStage.GRADIENTS_READY, ctx)
        ctx.step_taken = update.discard() if ctx.skip_reason else update.step()
        position = ctx.cursor.samples_used(ctx.progress.batch + len(ctx.group))
        ctx.progress.advance(len(ctx.group), ctx.loss.samples, ctx.step_taken, position)
        if ctx.step_taken:
            ctx.step_schedulers()
            hooks.fire(TrainingStage.OPTIMIZER_STEPPED, ctx)
        else:
            hooks.fire(TrainingStage.OPTIMIZER_SKIPPED, ctx)
            self._check_skips(ctx)
        hooks.fire(TrainingStage.STEP_END, ctx)

    def _check_skips(self, ctx: TrainContext) -> None:
        if ctx.progress.consecutive_skips > self.max_consecutive_skips:
            raise TrainingError(
                f"{ctx.progress.consecutive_skips} steps in a row were skipped",
                found=ctx.skip_reason,
                needed=f"at most {self.max_consecutive_skips} in a row",
                fix="lower the learning rate or look at the data named above; max_consecutive_skips sets the limit",
            )


def mark_last(group: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Each item with whether it is the last."""
    final = len(group) - 1
    return ((item, i == final) for i, item in enumerate(group))
