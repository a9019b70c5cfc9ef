"""Means over a window of steps, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import all_reduce
from nvalchemi.errors import TrainingError
from nvalchemi.objective import LossPart

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

FOLD = 64  # rows that are kept as they come before they are summed: adding a row costs a list append and no kernel

Columns = dict[str, tuple[Tensor, Tensor]]


class Window:
    """Sums over the steps since the last record: of the loss, of its parts, of other numbers.

    The loss is averaged over samples, each part over its labels (unweighted), every other number over the steps that gave it. A
    non-finite value makes its mean non-finite. Rows are summed in groups of a fixed size, so that a window that was saved and
    loaded gives the same mean to the last bit.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self._rows: list[tuple[Tensor, int, Mapping[str, LossPart], Mapping[str, Tensor | float]]] = []
        self._earlier: Columns = {}  # rows of a loaded window that wait to be summed
        self._num_earlier = 0
        self._sums: Columns = {}
        self._steps = 0

    def __len__(self) -> int:
        return self._steps + self._num_earlier + len(self._rows)

    def add(self, ctx: TrainContext) -> None:
        """Take the numbers of the step that was just taken."""
        loss = ctx.loss
        assert loss is not None
        self._rows.append((loss.total, loss.samples, loss.parts, ctx.metrics.copy()))
        if len(self._rows) + self._num_earlier >= FOLD:
            self._fold()

    def means(self, manager: Manager) -> dict[str, float]:
        """The means by name over all ranks, one transfer; every rank must ask."""
        sums, counts, names = self._totals()
        if not names:
            return {}
        reduced = all_reduce(torch.stack((sums, counts)), manager).tolist()
        return {name: total / count if count > 0 else float("nan") for name, total, count in zip(names, *reduced, strict=True)}

    def _totals(self) -> tuple[Tensor, Tensor, list[str]]:
        self._fold()
        names = list(self._sums)
        if not names:
            return torch.empty(0), torch.empty(0), []
        return torch.stack([self._sums[n][0] for n in names]), torch.stack([self._sums[n][1] for n in names]), names

    def _fold(self) -> None:
        for name, (values, counts) in self._columns().items():
            total, count = values.sum(), counts.sum()
            if name in self._sums:
                before = self._sums[name]
                total, count = before[0].to(total.device) + total, before[1].to(total.device) + count
            self._sums[name] = (total, count)
        self._steps += self._num_earlier + len(self._rows)
        self._rows, self._earlier, self._num_earlier = [], {}, 0

    def _columns(self) -> Columns:
        """By name, what each waiting row adds to the sum and to the count."""
        if not self._rows:
            return self._earlier
        device = self._rows[0][0].device
        totals = torch.stack([row[0] for row in self._rows]).double()
        samples = _column([row[1] for row in self._rows], device)
        columns: Columns = {"loss": (totals * samples, samples)}
        for name in dict.fromkeys(name for row in self._rows for name in row[2]):
            parts = [row[2][name] for row in self._rows if name in row[2]]
            columns[f"loss/{name}"] = (_column([p.sum for p in parts], device), _column([p.count for p in parts], device))
        for name in dict.fromkeys(name for row in self._rows for name in row[3]):
            numbers = _numbers(name, [row[3][name] for row in self._rows if name in row[3]], device)
            columns[name] = (numbers, torch.ones_like(numbers))
        for name, (values, counts) in self._earlier.items():
            if name in columns:
                after = columns[name]
                columns[name] = (torch.cat([values.to(device), after[0]]), torch.cat([counts.to(device), after[1]]))
            else:
                columns[name] = (values.to(device), counts.to(device))
        return columns

    def state_dict(self) -> dict[str, Any]:
        """Sums so far and the rows that wait, as tensors."""
        waiting = {name: list(pair) for name, pair in self._columns().items()}
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"sums": sums, "steps": self._steps, "waiting": waiting, "waiting_steps": self._num_earlier + len(self._rows)}

    @staticmethod
    def averaged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state for each rank of a run that goes on with another number of ranks: every step then weighs as those to come."""
        sums: dict[str, list[Tensor]] = {}
        for state in states:
            for columns in (state["sums"], state["waiting"]):
                for name, (values, counts) in columns.items():
                    before = sums.get(name, [torch.zeros((), dtype=torch.float64)] * 2)
                    sums[name] = [before[0] + values.sum() / len(states), before[1] + counts.sum() / len(states)]
        steps = int(states[0]["steps"]) + int(states[0]["waiting_steps"])
        return {"sums": sums, "steps": steps, "waiting": {}, "waiting_steps": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.clear()
        self._sums = {name: (pair[0], pair[1]) for name, pair in state["sums"].items()}
        self._steps = int(state["steps"])
        self._earlier = {name: (pair[0], pair[1]) for name, pair in state["waiting"].items()}
        self._num_earlier = int(state["waiting_steps"])


def _numbers(name: str, values: list[Any], device: torch.device) -> Tensor:
    try:
        numbers = _column(values, device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(
            f"ctx.metrics['{name}'] is no number", found=repr(values[-1]), needed="a number or a 0-d tensor"
        ) from error
    if numbers.dim() != 1:
        raise TrainingError(
            f"ctx.metrics['{name}'] is no number", found=f"shape {tuple(numbers.shape[1:])}", needed="a 0-d tensor"
        )
    return numbers


def _column(numbers: list[Any], device: torch.device) -> Tensor:
    if all(isinstance(n, Tensor) for n in numbers):
        return torch.stack(numbers).detach().double()
    if not any(isinstance(n, Tensor) for n in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])
