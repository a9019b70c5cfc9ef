"""Labels of a whole step: counted from its batches before the first backward, so that sizes never distort the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.collectives import agree, all_reduce, gather
from nvalchemi.objective import Count, LossOutput, LossPart, Objective

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


def group_counts(objective: Objective, group: list[Any]) -> dict[str, Count]:
    """The labels of each loss part over the micro-batches of this rank."""
    totals: dict[str, Count] = {}
    for batch in group:
        for name, count in objective.counts(batch).items():
            totals[name] = totals[name] + count if name in totals else count
    return totals


def step_loss(loss: LossOutput, ctx: TrainContext) -> LossOutput:
    """The loss of a step on all ranks from this rank's (detached), the same on every rank; a skip that one asked for holds after it."""
    manager, counts = ctx.manager, ctx.counts
    if not manager.distributed or counts is None:
        return loss
    rows = torch.stack([part.sum.double() for part in loss.parts.values()])
    numbers = [float(loss.samples), float(ctx.skip_request is not None)]
    if manager.cuda:  # these numbers are wanted on the host, and the sums are not waited for
        samples, skips = agree(numbers, manager)
        sums = all_reduce(rows, manager)
    else:
        sums = all_reduce(torch.cat([rows, torch.tensor(numbers, dtype=torch.float64)]), manager)
        samples, skips = sums[-2:].tolist()
    if skips:
        adopt_skip(ctx)
    parts = {
        name: LossPart(total, counts[name], part.weight) for (name, part), total in zip(loss.parts.items(), sums, strict=False)
    }
    return LossOutput.from_parts(parts, int(samples), loss.extra)


def adopt_skip(ctx: TrainContext) -> None:
    """Skip the step for the first reason that a rank has; all ranks must call."""
    reasons = gather(ctx.skip_request, ctx.manager)
    ctx.skip_step(next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), agreed=True)
