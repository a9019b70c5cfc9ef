"""Mixed precision: autocast around the forward, and a scaled loss where fp16 needs it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.collectives import any_rank
from nvalchemi.errors import ConfigError
from nvalchemi.models.energy import EnergyModel
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
    fp32_gradients
        Compute gradients of energies (forces, stress, scores, samplers' gradients) without autocast, together with the energies of the
        same calls: for forces that must be right to more than two digits. It sets ``force_fp32_gradient`` of each
        :class:`~nvalchemi.models.EnergyModel` for the run. PaiNN then uses its derivative by hand.
    init_scale, growth_factor, backoff_factor, growth_interval
        The first loss scale and how it moves, for fp16 only: see :class:`~nvalchemi.training.update.ScaledUpdate`.

    Raises
    ------
    ConfigError
        For another dtype; for fp16 where weights are fp16 themselves, so that the scaled gradients of a step could not be brought back to
        their size; and for ``fp32_gradients`` without an energy.
    """

    order = Order.COMPUTE
    agreed = True

    def __init__(
        self,
        dtype: torch.dtype | str = torch.bfloat16,
        *,
        fp32_gradients: bool = False,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if chosen not in (torch.bfloat16, torch.float16):
            raise ConfigError("no precision for autocast", found=repr(dtype), needed="'bf16', 'fp16' or the torch dtype")
        self.dtype: torch.dtype = chosen
        # bf16 needs no scale, so backward and step may be somebody else's
        self.claims = frozenset({"precision", "update"} if chosen is torch.float16 else {"precision"})
        self.fp32_gradients = fp32_gradients
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
            short = [f"{name}.{key}" for name in ctx.trained for key, p in ctx.models[name].named_parameters()
                     if p.dtype is torch.float16 and p.requires_grad]  # fmt: skip
            if short:
                raise ConfigError(
                    "weights are fp16 themselves, where small changes of them vanish",
                    found=", ".join(short[:5]) + (f" and {len(short) - 5} more" if len(short) > 5 else ""),
                    needed="float32 weights: autocast makes fp16 of them where it is of use",
                    fix="leave out model.half()",
                )
            if bf16_is_native(ctx.device) and ctx.manager.rank == 0:
                logger.warning("this device has bf16, which needs no loss scale and skips no steps: MixedPrecisionHook('bf16')")
            ctx.update = ScaledUpdate(ctx.optimizers, **self._scaling, any_rank=partial(any_rank, manager=ctx.manager))

    @around(TrainingSpan.RUN)
    def keep_gradients(self, ctx: TrainContext) -> Iterator[None]:
        """Let energies differentiate in float32 for the run."""
        energies = [model for model in ctx.models.values() if isinstance(model, EnergyModel)] if self.fp32_gradients else []
        if self.fp32_gradients and not energies:
            raise ConfigError(
                "fp32_gradients and no energy to differentiate",
                found=", ".join(type(model).__name__ for model in ctx.models.values()),
                needed="an EnergyModel",
            )
        before = [model.force_fp32_gradient for model in energies]
        for model in energies:
            model.force_fp32_gradient = True
        try:
            yield
        finally:
            for model, value in zip(energies, before, strict=True):
                model.force_fp32_gradient = value

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


def bf16_is_native(device: torch.device) -> bool:
    """Whether an accelerator computes in bf16 as fast as in fp16."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
