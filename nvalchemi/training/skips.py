"""Skip a step on all ranks that one rank alone wants skipped, as late as at GRADIENTS_READY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import any_rank
from nvalchemi.errors import TrainingError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage
from nvalchemi.training.totals import adopt_skip

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class LateSkips(Hook):
    """Part of every run on many processes. What was asked for up to LOSS_READY went with the loss and costs nothing.

    Ranks ask each other once more only where some hook listens at GRADIENTS_READY, or around MICROBATCH, and does not say that it decides
    from numbers that are the same on all of them (:attr:`Hook.agreed`).
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
        self._needed = any_rank(ctx.hooks.skips_late, ctx.manager)

    @on(TrainingStage.GRADIENTS_READY)
    def ask(self, ctx: TrainContext) -> None:
        """Whether a rank has asked for it since the loss was told."""
        if ctx.skip_reason is not None:
            return
        if not self._needed and ctx.skip_request is not None:
            raise TrainingError(
                "one rank asked to skip the step when the ranks had told each other already",
                found=ctx.skip_request,
                needed="ctx.skip_step(...) at LOSS_READY or earlier; or in a hook that listens at GRADIENTS_READY",
            )
        if self._needed and any_rank(ctx.skip_request is not None, ctx.manager):
            adopt_skip(ctx)
