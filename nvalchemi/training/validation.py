"""Validation during a run: what on, how often, and the hook that does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nvalchemi.errors import ConfigError
from nvalchemi.training.context import TrainContext
from nvalchemi.training.evaluation import BatchCallback, checked_outputs, evaluate
from nvalchemi.training.hook import Every, Hook, PeriodicHook, on
from nvalchemi.training.in_step import in_step
from nvalchemi.training.interruption import Interruption
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage


@dataclass(kw_only=True)
class ValidationConfig:
    """What to validate on, and how often.

    Parameters
    ----------
    validation_data
        A loader, or a list of batches: anything that can be iterated over again and again.
    every_n_epochs, every_n_steps
        One of the two at most; every epoch where neither is given. The last state of a run is validated in any case.
    at_start
        Validate before the first step as well.
    outputs
        Predictions to report errors of, beside those that the loss requires.
    batch_callback
        ``batch_callback(batch, predictions, loss)`` is called for each batch; predictions and loss have no graph.
    """

    validation_data: Iterable[Any]
    every_n_epochs: int | None = None
    every_n_steps: int | None = None
    at_start: bool = False
    outputs: tuple[str, ...] = ()
    batch_callback: BatchCallback | None = None

    def __post_init__(self) -> None:
        check_repeatable(self.validation_data)
        self.outputs = checked_outputs(self.outputs)
        if self.every_n_epochs is not None and self.every_n_steps is not None:
            raise ConfigError(
                "ValidationConfig takes one frequency",
                found=f"every_n_epochs={self.every_n_epochs}, every_n_steps={self.every_n_steps}",
                needed="one of the two",
            )
        self.every  # noqa: B018 - a frequency that is none is told here and not when the run begins

    @property
    def every(self) -> Every:
        """How often."""
        if self.every_n_steps is not None:
            return Every(steps=self.every_n_steps)
        return Every(epochs=1 if self.every_n_epochs is None else self.every_n_epochs)


class Validator(PeriodicHook):
    """Validate every so many steps or epochs, and at the end of training where the last state was not yet.

    The metrics go to ``ctx.validation``, then the schedulers that read one move, then VALIDATED fires.

    Where the run is interrupted (``ctx.interrupt``, as a signal does), there is no time for it: a validation that has begun is cut short
    on all ranks, its numbers are dropped, and the run that resumes begins with it. The one at the end is left out.
    """

    order = Order.TRANSFORM  # before whatever reports, stops or saves by the result
    name = "validation"
    agreed = True

    def __init__(self, config: ValidationConfig) -> None:
        super().__init__(config.every)
        self.config = config
        self.step: int | None = None  # of the last state validated
        self.owed = False  # whether one was cut short

    @on(TrainingStage.TRAINING_START)
    def _first(self, ctx: TrainContext) -> None:
        if self.owed or (self.config.at_start and ctx.progress.step == 0):
            self.act(ctx)

    def act(self, ctx: TrainContext) -> None:
        """Validate now."""
        self.validate(ctx)

    def validate(self, ctx: TrainContext, *, last: bool = False) -> None:
        """Validate; the ``last`` time moves no scheduler, or a run that is resumed for longer would leave its curve."""
        metrics = self._measured(ctx)
        if metrics is None:
            self.owed = self.owed or not last
            return
        self.step, self.owed = ctx.progress.step, False
        ctx.validation = metrics
        if not last:
            ctx.step_metric_schedulers(metrics)
        ctx.hooks.fire(TrainingStage.VALIDATED, ctx)

    def _measured(self, ctx: TrainContext) -> dict[str, float] | None:
        """The metrics; ``None`` where the run is interrupted."""
        interruption = Interruption(ctx)
        if interruption.at_start:
            return None
        batches = until(interruption, ctx.validation_data)
        with ctx.hooks.around(TrainingSpan.VALIDATION, ctx):
            metrics = evaluate(
                ctx.callee,
                in_step(batches, ctx.manager) if ctx.calls_communicate else batches,
                ctx.objective,
                outputs=self.config.outputs,
                manager=ctx.manager,
                step=ctx.progress.step,
                batch_callback=self.config.batch_callback,
            )
        return None if interruption.agreed() else metrics

    @on(TrainingStage.TRAINING_END)
    def _last(self, ctx: TrainContext) -> None:
        if self.step != ctx.progress.step:
            self.validate(ctx, last=True)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self.step is None else {"step": self.step}
        return state | {"owed": True} if self.owed else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.owed = state.get("step"), state.get("owed", False)


def until(interruption: Interruption, batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, up to an interruption: the first in any case, so that no rank that has data comes without."""
    for number, batch in enumerate(batches):
        if number and interruption.asked():
            return
        yield batch


def validation_hooks(config: ValidationConfig | None) -> list[Hook]:
    """The hook of a config, or none."""
    return [] if config is None else [Validator(config)]


def check_repeatable(data: Any) -> None:
    """Refuse what can be iterated over once only, or not at all."""
    if not isinstance(data, Iterable) or isinstance(data, str):
        raise ConfigError(
            "validation_data cannot be iterated over", found=repr(data), fix="give a DataLoader or a list of batches"
        )
    if isinstance(data, Iterator):
        raise ConfigError(
            "validation_data can be iterated over only once", found=type(data).__name__, fix="give the loader itself, or a list"
        )
