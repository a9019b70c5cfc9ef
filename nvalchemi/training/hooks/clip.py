"""Gradient clipping by norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from nvalchemi.distributed.tensors import local, total_norm
from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.stages import Order, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


class GradientClipHook(Hook):
    """Scale a step's gradients down where their norm is above a limit (Pascanu et al. 2013, arXiv:1211.5063).

    It acts once a step, on the unscaled gradients of all micro-batches together, and puts their true norm, as it was before
    clipping, into ``ctx.metrics["grad_norm"]``, the same number on every rank, sharded or not. Nothing is fetched from the device. A norm that is not finite leaves gradients
    that are not finite: to skip such steps is a guard's work (:class:`~nvalchemi.training.hooks.SpikeHook`).

    Parameters
    ----------
    max_norm
        The limit, over all parameters of all optimizers together, in the loss's unit over the parameters'.
    norm_type
        The order of the norm; ``float("inf")`` is the largest entry.

    Raises
    ------
    ConfigError
        For a limit or an order that is not positive.
    """

    order = Order.TRANSFORM
    needs_gradients = True
    agreed = True

    def __init__(self, max_norm: float, norm_type: float = 2.0) -> None:
        if not max_norm > 0 or not norm_type > 0 or math.isinf(max_norm):
            raise ConfigError(
                "gradients cannot be clipped like this",
                found=f"max_norm={max_norm!r}, norm_type={norm_type!r}",
                needed="a finite max_norm > 0 and norm_type > 0",
            )
        self.max_norm, self.norm_type = float(max_norm), float(norm_type)

    @on(TrainingStage.GRADIENTS_READY)
    def clip(self, ctx: TrainContext) -> None:
        """Clip the step's gradients, unless the step is to be skipped anyway."""
        if ctx.skip_reason is not None:
            return
        gradients = ctx.update.gradients()
        if not gradients:
            return
        norm = total_norm(gradients, self.norm_type)
        # No small constant in the denominator: a norm of zero gives infinity here, which the clamp turns into "unchanged".
        torch._foreach_mul_([local(g) for g in gradients], (self.max_norm / norm).clamp(max=1.0))
        ctx.metrics["grad_norm"] = norm
