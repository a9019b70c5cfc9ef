"""Labels of a whole step: counted from its batches before the first backward, so that sizes never distort the gradient."""

from __future__ import annotations

from typing import Any

import torch

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import agree, all_reduce
from nvalchemi.objective import Count, LossOutput, LossPart, Objective


def step_counts(objective: Objective, group: list[Any], manager: Manager) -> dict[str, Count] | None:
    """The labels of each loss part over all micro-batches of a step on all ranks; ``None`` where one micro-batch is the step."""
    if len(group) == 1 and not manager.distributed:
        return None
    totals: dict[str, Count] = {}
    for batch in group:
        for name, count in objective.counts(batch).items():
            totals[name] = totals[name] + count if name in totals else count
    if not manager.distributed:
        return totals
    table = torch.stack([torch.as_tensor(count, dtype=torch.float64, device=manager.device) for count in totals.values()])
    return dict(zip(totals, all_reduce(table, manager).unbind(), strict=True))


def step_loss(loss: LossOutput, counts: dict[str, Count] | None, manager: Manager) -> LossOutput:
    """The loss of a step on all ranks from this rank's (detached), the same on every rank."""
    if not manager.distributed or counts is None:
        return loss
    rows = [part.sum.double() for part in loss.parts.values()]
    if manager.cuda:  # the number of samples is wanted on the host, and the sums are not waited for
        samples = agree([loss.samples], manager)[0]
        sums = all_reduce(torch.stack(rows), manager)
    else:
        sums = all_reduce(torch.stack([*rows, torch.tensor(float(loss.samples), dtype=torch.float64)]), manager)
        samples = sums[-1].item()
    parts = {
        name: LossPart(total, counts[name], part.weight) for (name, part), total in zip(loss.parts.items(), sums, strict=False)
    }
    return LossOutput.from_parts(parts, int(samples), loss.extra)
