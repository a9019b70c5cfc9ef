"""Mixed precision: autocast around the forward, and a scaled loss where fp16 needs it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.collectives import any_rank
from nvalchemi.errors import ConfigError
from nvalchemi.training.hook import Hook, around, on
from nvalchemi.training.stages import Order, TrainingSpan, TrainingStage
from nvalchemi.training.update import ScaledUpdate

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

logger = logging.getLogger("nvalchemi")

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


class MixedPrecisionHook(Hook):
    """Run forward and loss under autocast in bf16 or fp16; weights, gradients and energies keep their own precision.

    Autocast touches float32 operations only, so energies stay float64. With fp16 small gradients would vanish: the loss is then
    scaled before backward and the gradients are brought back to their true size before any hook sees them. A step whose
    gradients overflow is not taken (no scheduler, no EMA and no step count moves), the scale is lowered, and the log says so. The
    present scale is in ``ctx.metrics["loss_scale"]``. Validation runs in the models' own precision.

    Parameters
    ----------
    dtype
        ``torch.bfloat16`` or ``"bf16"``; ``torch.float16`` or ``"fp16"``.
    init_scale, growth_factor, backoff_factor, growth_interval
        The first loss scale and how it moves, for fp16 only: see :class:`~nvalchemi.training.update.ScaledUpdate`.

    Raises
    ------
    ConfigError
        For another dtype.
    """

    order = Order.COMPUTE
    claims = frozenset({"update"})

    def __init__(
        self,
        dtype: torch.dtype | str = torch.bfloat16,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in (torch.bfloat16, torch.float16):
            raise ConfigError("no precision for autocast", found=repr(dtype), needed="'bf16', 'fp16' or the torch dtype")
        self.dtype: torch.dtype = chosen
        self._scaling: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }

    @on(TrainingStage.BUILT)
    def install(self, ctx: TrainContext) -> None:
        """Put the scaled update in place where the gradients are fp16's."""
        if self.dtype is torch.float16:
            ctx.update = ScaledUpdate(ctx.optimizers, **self._scaling, any_rank=partial(any_rank, manager=ctx.manager))

    @around(TrainingSpan.FORWARD)
    def cast(self, ctx: TrainContext) -> Iterator[None]:
        """Autocast; what differentiates the energy inside the forward is part of it."""
        with torch.autocast(ctx.device.type, dtype=self.dtype):
            yield

    @on(TrainingStage.OPTIMIZER_STEPPED)
    def note_scale(self, ctx: TrainContext) -> None:
        """The scale may have grown."""
        if isinstance(ctx.update, ScaledUpdate):
            ctx.metrics["loss_scale"] = ctx.update.scale

    @on(TrainingStage.OPTIMIZER_SKIPPED)
    def log_skip(self, ctx: TrainContext) -> None:
        """The scale was lowered if the skip was the overflow's."""
        if isinstance(ctx.update, ScaledUpdate):
            ctx.metrics["loss_scale"] = ctx.update.scale
            logger.warning("step after %d skipped: %s; loss scale now %g", ctx.progress.step, ctx.skip_reason, ctx.update.scale)
