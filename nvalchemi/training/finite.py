"""No run ends, and no checkpoint is written, with weights that are not finite: with or without a guard in the hook list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvalchemi.distributed.tensors import all_finite
from nvalchemi.errors import TrainingError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage
from nvalchemi.training.structures import name_structures_of_ranks

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

WAITING = 64  # losses that stay on an accelerator before they are looked at together: to ask each would make it wait
FIX = "SpikeHook() skips such steps and names their structures; a lower learning rate or GradientClipHook may prevent them"


class FiniteHook(Hook):
    """Part of every run: a step with a loss that is not finite ends it with an error, unless a guard has skipped the step.

    On the CPU that is known before the step is taken, so the weights are still good. On an accelerator it is known up to 64 steps
    later, and at the end of the epoch and of the run at the latest. Weights are looked at when the run ends and before each checkpoint.

    Raises
    ------
    TrainingError
        During the run.
    """

    order = Order.SAVE  # after every hook that may skip the step
    name = "finite_weights"
    agreed = True

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor]] = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx: TrainContext) -> None:
        """Look at the loss of the step that is about to be taken."""
        if ctx.skip_reason is not None or ctx.loss is None:
            return
        total = ctx.loss.total
        if total.device.type != "cpu":
            self._waiting.append((ctx.progress.step, total))
            if len(self._waiting) >= WAITING:
                self.catch_up(ctx)
        elif not math.isfinite(value := total.item()):
            raise TrainingError(
                f"the loss of the step after {ctx.progress.step} is {value}",
                found=f"structures of the step: {name_structures_of_ranks(ctx.group, ctx.manager, limit=8)}",
                needed="a finite loss",
                fix=FIX,
            )

    @on(TrainingStage.EPOCH_END)
    def catch_up(self, ctx: TrainContext) -> None:
        """Look at the losses that wait on the device: one transfer."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        values = torch.stack([total for _, total in waiting]).tolist()
        for (step, _), value in zip(waiting, values, strict=True):
            if not math.isfinite(value):
                raise TrainingError(f"the loss of the step after {step} was {value}", needed="a finite loss", fix=FIX)

    @on(TrainingStage.TRAINING_END)
    def last(self, ctx: TrainContext) -> None:
        """Look at what waits, and at the weights that the run leaves."""
        self.catch_up(ctx)
        check_weights(ctx.optimizers, ctx.progress.step)


def check_weights(optimizers: Mapping[str, torch.optim.Optimizer], step: int) -> None:
    """TrainingError where a weight that is trained is not finite: a gradient was not, though the loss was."""
    for name, optimizer in optimizers.items():
        if not all_finite(p.detach() for group in optimizer.param_groups for p in group["params"]):
            raise TrainingError(
                f"the weights of optimizer '{name}' are not finite after step {step}", needed="finite gradients", fix=FIX
            )


def check_copies(weights: Iterable[Tensor], step: int) -> None:
    """As `check_weights`, of copies of what this rank has of the weights."""
    if not all_finite(weights):
        raise TrainingError(f"the weights after step {step} are not finite", needed="finite gradients", fix=FIX)
