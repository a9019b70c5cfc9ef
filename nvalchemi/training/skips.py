"""Skip a step on all ranks that one rank alone wants skipped, as late as at GRADIENTS_READY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import any_rank
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage
from nvalchemi.training.totals import adopt_skip

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class LateSkips(Hook):
    """Part of every run on many processes. What was asked for before GRADIENTS_READY went with the loss and costs nothing.

    Ranks ask each other once more only where some hook listens at GRADIENTS_READY and does not say that it decides from numbers that are
    the same on all of them (:attr:`Hook.agreed`).
    """

    order = Order.SAVE  # after every hook that may skip the step; and the strategy puts it behind the user's own
    agreed = True

    def __init__(self) -> None:
        self._needed = False

    def is_active(self, manager: Manager) -> bool:
        return manager.distributed

    @on(TrainingStage.TRAINING_START)
    def look(self, ctx: TrainContext) -> None:
        """Which hooks there are may differ between ranks."""
        deciding = [hook for hook in ctx.hooks if not hook.agreed]
        stages = [stage for hook in deciding for stage, _ in hook.stage_listeners()]
        self._needed = any_rank(TrainingStage.GRADIENTS_READY in stages, ctx.manager)

    @on(TrainingStage.GRADIENTS_READY)
    def ask(self, ctx: TrainContext) -> None:
        """Whether a rank has asked for it since the loss was told."""
        if self._needed and ctx.skip_reason is None and any_rank(ctx.skip_request is not None, ctx.manager):
            adopt_skip(ctx)
