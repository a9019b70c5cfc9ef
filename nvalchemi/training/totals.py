"""Labels of a whole step: counted from its batches before the first backward, so that sizes never distort the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.distributed.collectives import Agreement, Reduction, gather
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


def tell(loss: LossOutput, ctx: TrainContext) -> Callable[[], LossOutput]:
    """Begin to add up a step's loss (detached) over the ranks; what it gives waits for the sum, which is the same on every rank.

    What one rank asks for goes along: to skip this step's update, to end the run, to save. From then on it holds on all of them. So does the
    question for the next batches, where they were read already: a step has one exchange besides that of its gradients.
    """
    manager, counts, question = ctx.manager, ctx.counts, ctx.question
    save = ctx.take_save_request()
    if not manager.distributed or counts is None:
        ctx.save_due = save
        return lambda: loss
    rows = torch.stack([part.sum.double() for part in loss.parts.values()])
    numbers = [float(loss.samples), float(ctx.skip_request is not None), float(ctx.stop_reason is not None), float(save)]
    if question is not None:
        numbers += question.numbers
    told: Reduction | Agreement
    if manager.cuda:  # these numbers are wanted on the host, and the sums are not waited for
        told, sums = Agreement(numbers, manager), Reduction(rows, manager)
    else:
        told = sums = Reduction(torch.cat([rows, torch.tensor(numbers, dtype=torch.float64)]), manager)

    def hear() -> LossOutput:
        table = sums.result()
        samples, skips, stops, saves, *answer = table[len(rows) :].tolist() if told is sums else told.result()
        if question is not None:
            question.sums = answer
        if skips:
            adopt_skip(ctx)
        ctx.save_due, ctx.stop_agreed = bool(saves), ctx.stop_agreed or bool(stops)
        totals = dict(zip(loss.parts, table, strict=False))
        parts = {name: LossPart(totals[name], counts[name], part.weight) for name, part in loss.parts.items()}
        return LossOutput.from_parts(parts, int(samples), loss.extra)

    return hear


def adopt_skip(ctx: TrainContext) -> None:
    """Skip the step for the first reason that a rank has; all ranks must call."""
    reasons = gather(ctx.skip_request, ctx.manager)
    ctx.skip_step(next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None), agreed=True)
