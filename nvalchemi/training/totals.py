"""Labels of a whole step: counted from its batches before the first backward, so that sizes never distort the gradient."""

from __future__ import annotations

from typing import Any

from nvalchemi.distributed import Manager
from nvalchemi.objective import Count, Objective


def step_counts(objective: Objective, group: list[Any], manager: Manager) -> dict[str, Count] | None:
    """The labels of each loss part over all micro-batches of a step; ``None`` where one micro-batch is the step."""
    if len(group) == 1 and not manager.distributed:
        return None
    totals: dict[str, Count] = {}
    for batch in group:
        for name, count in objective.counts(batch).items():
            totals[name] = totals[name] + count if name in totals else count
    return totals
