"""Stop where a validation metric no longer gets better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class EarlyStopHook(Hook):
    """End the run after ``patience`` validations in a row without a better value of ``metric``.

    A value that is not finite is never better. The count goes on over a resume; a run that had stopped stops again at once,
    unless it is given more patience.

    Parameters
    ----------
    metric
        Name of a validation metric.
    patience
        Validations without a better value that end the run.
    min_delta
        How much better (in the metric's unit) a value must be to count.
    mode
        ``"min"`` where less is better, ``"max"`` where more is.

    Raises
    ------
    ConfigError
        For settings that cannot work, and at the first validation where ``metric`` is not among its metrics.
    """

    order = Order.OBSERVE
    agreed = True

    def __init__(
        self, metric: str = "loss", patience: int = 10, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:
        if mode not in ("min", "max") or patience < 1 or not min_delta >= 0:
            raise ConfigError(
                "early stopping cannot work like this",
                found=f"patience={patience!r}, min_delta={min_delta!r}, mode={mode!r}",
                needed="patience >= 1, min_delta >= 0, mode 'min' or 'max'",
            )
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, float(min_delta), mode
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        self.best_step = 0
        self.bad = 0

    @on(TrainingStage.BUILT)
    def start(self, ctx: TrainContext) -> None:
        """A new run knows no value yet."""
        self._reset()

    @on(TrainingStage.TRAINING_START)
    def check(self, ctx: TrainContext) -> None:
        """A resumed run may have stopped already."""
        if self.bad >= self.patience:
            self._stop(ctx)

    @on(TrainingStage.VALIDATED)
    def look(self, ctx: TrainContext) -> None:
        """Compare the new value with the best so far."""
        metrics = ctx.validation or {}
        if self.metric not in metrics:
            raise ConfigError(
                f"early stopping looks at '{self.metric}', which the validation does not give",
                found=", ".join(sorted(metrics)) or "no metrics",
                fix="name one of those as EarlyStopHook(metric=...)",
            )
        value = float(metrics[self.metric])
        if self._better(value):
            self.best, self.best_step, self.bad = value, ctx.progress.step, 0
            return
        self.bad += 1
        if self.bad >= self.patience:
            self._stop(ctx)

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def _stop(self, ctx: TrainContext) -> None:
        best = "no finite value yet" if self.best is None else f"the best was {self.best:.6g} at step {self.best_step}"
        ctx.stop(f"{self.metric} did not get better in {self.bad} validations; {best}", agreed=True)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.bad = state["best"], int(state["best_step"]), int(state["bad"])
