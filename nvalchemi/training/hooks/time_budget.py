"""End a run, and its learning rate with it, after a given time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.collectives import Agreement
from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext
    from nvalchemi.training.schedules import Shape


class TimeBudgetHook(Hook):
    """Stop after ``seconds`` of running, and bring the learning rate along a shape to its end by then.

    Time counts from the start of the run to its end, validation and checkpoints included, over all sittings: a resumed run goes on
    with what is left. The share of the run that is over is the larger of the time's and, where the run has a number of steps or
    epochs as well, theirs; so the shape ends with whatever ends the run. The share of the time is in ``ctx.metrics["budget_used"]``,
    from 0 to 1. The final validation and checkpoint come after the end.

    Parameters
    ----------
    seconds
        The budget.
    shape
        Factor on every learning rate, see :class:`nvalchemi.training.schedules.Shape`; ``None`` leaves the rates alone.

    Raises
    ------
    ConfigError
        For a budget that is not positive, and at the start where a scheduler moves the rates as well.
    """

    order = Order.TRANSFORM
    claims = frozenset({"end"})
    agreed = True

    def __init__(self, seconds: float, shape: Shape | None = None) -> None:
        if not seconds > 0:
            raise ConfigError("a time budget must be positive", found=f"{seconds} s")
        self.seconds, self.shape = float(seconds), shape
        self._restart()

    def _restart(self) -> None:
        self.earlier = 0.0
        self._since: float | None = None
        self._rates: list[tuple[dict[str, Any], float]] = []
        self._told: Agreement | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of running, earlier sittings included."""
        return self.earlier + (0.0 if self._since is None else time.monotonic() - self._since)

    @on(TrainingStage.SETUP)
    def begin(self, ctx: TrainContext) -> None:
        """Time counts from here."""
        self._restart()
        self._since = time.monotonic()

    @on(TrainingStage.BUILT)
    def remember_rates(self, ctx: TrainContext) -> None:
        """Rates as declared: the factor is always on these, also after a resume."""
        if self.shape is None:
            return
        if ctx.schedulers:
            raise ConfigError(
                "a time budget with a shape and a scheduler both set the learning rate",
                found=f"schedulers of {', '.join(ctx.schedulers)}",
                fix="drop scheduler_cls, or give TimeBudgetHook no shape",
            )
        groups = [group for optimizer in ctx.optimizers.values() for group in optimizer.param_groups]
        self._rates = [(group, float(group["lr"])) for group in groups]

    @on(TrainingStage.TRAINING_START)
    def find_groups(self, ctx: TrainContext) -> None:
        """Loading an optimizer's state puts new parameter groups in the place of the old."""
        if self.shape is not None:
            groups = [group for optimizer in ctx.optimizers.values() for group in optimizer.param_groups]
            self._rates = [(group, rate) for group, (_, rate) in zip(groups, self._rates, strict=True)]
        self._stop_if_over(ctx, self._agreed(ctx))

    @on(TrainingStage.STEP_START)
    def set_rates(self, ctx: TrainContext) -> None:
        """The factor for the coming step."""
        if self.shape is None:
            return
        told, self._told = self._told, None
        elapsed = self._agreed(ctx) if told is None else told.result()[0]
        over = max(elapsed / self.seconds, ctx.fraction_done or 0.0)
        factor = self.shape(min(over, 1.0), ctx.progress.step)
        for group, rate in self._rates:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    @on(TrainingStage.LOSS_READY)
    def tell(self, ctx: TrainContext) -> None:
        """The first rank's clock goes round during the backward, for the next step: a step of the run is no time to wait for it."""
        if self.shape is not None and ctx.manager.distributed and ctx.is_last_microbatch:
            self._told = self._ask(ctx)

    @on(TrainingStage.STEP_END)
    def look_at_the_clock(self, ctx: TrainContext) -> None:
        """Whether that was the last step; the first rank tells the others with the next one's loss, which is the last then."""
        self._stop_if_over(ctx, self.elapsed)

    def _stop_if_over(self, ctx: TrainContext, elapsed: float) -> None:
        ctx.metrics["budget_used"] = min(elapsed / self.seconds, 1.0)
        if elapsed >= self.seconds and ctx.manager.rank == 0:  # the loop tells the others
            ctx.stop(f"the time budget of {self.seconds:g} s is used up")

    def _agreed(self, ctx: TrainContext) -> float:
        """The first rank's clock, on every rank: ranks that stopped at different steps would wait for each other for ever."""
        return self._ask(ctx).result()[0] if ctx.manager.distributed else self.elapsed

    def _ask(self, ctx: TrainContext) -> Agreement:
        return Agreement([self.elapsed if ctx.manager.rank == 0 else 0.0], ctx.manager)

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.earlier = float(state["elapsed"])
