"""Errors and losses summed over batches and ranks, and divided once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import all_reduce, gather
from nvalchemi.errors import DataError
from nvalchemi.objective import LossOutput

OUTPUTS = ("energy", "forces", "stress")
"""What errors are reported of."""


class Totals:
    """Sums and counts over batches, kept as tensors on the device and read once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.weights: dict[str, float] = {}
        self.samples = 0

    def add_samples(self, count: int) -> None:
        """A batch of ``count`` samples."""
        self.samples += count

    def add_loss(self, loss: LossOutput) -> None:
        """A batch's loss parts, each by its own count."""
        for name, part in loss.parts.items():
            self.weights[name] = part.weight
            self._add(f"loss/{name}", part.sum, part.count)

    def add_errors(self, predictions: Mapping[str, Tensor], batch: Any, targets: Mapping[str, str]) -> None:
        """A batch's absolute and squared errors of whatever is both predicted and labelled."""
        for name in OUTPUTS:
            label = batch[targets[name]] if name in predictions and targets[name] in batch else None
            if label is None:
                continue
            absent = label.isnan()
            error = (predictions[name].double() - label.double()).masked_fill(absent, 0.0)
            count = absent.numel() - absent.sum()
            self._add(name, error.abs().sum(), count, error.square().sum())
            if name == "energy":
                error = error / batch.num_nodes_per_graph
                self._add("energy_per_atom", error.abs().sum(), count, error.square().sum())

    def metrics(self, manager: Manager) -> dict[str, float]:
        """The means, over all ranks.

        Raises
        ------
        DataError
            Where no rank had any batch.
        """
        sums = self._over_ranks(manager)
        samples = int(sums.pop("samples")[0])
        if samples == 0:
            raise DataError("the validation data gave no batch", fix="check the size of the data set, batch_size and drop_last")
        result: dict[str, float] = {}
        parts = {name: sums[f"loss/{name}"] for name in self.weights}
        if parts:
            result["loss"] = sum(self.weights[name] * total / max(count, 1.0) for name, (total, count, _) in parts.items())
        if list(parts) != ["loss"]:
            result |= {f"loss/{name}": total / count for name, (total, count, _) in parts.items() if count}
        for name in ("energy", "energy_per_atom", "forces", "stress"):
            total, count, square = sums.get(name, (0.0, 0.0, 0.0))
            if count:
                result[f"{name}_mae"], result[f"{name}_rmse"] = total / count, (square / count) ** 0.5
                if name in OUTPUTS:
                    result[f"n_{name}"] = int(count)
        result["n"] = samples
        return result

    def _add(self, name: str, total: Tensor, count: Any, square: Any = 0.0) -> None:
        row = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in (total, count, square)])
        self.sums[name] = self.sums[name] + row if name in self.sums else row

    def _over_ranks(self, manager: Manager) -> dict[str, list[float]]:
        """Sum, count and sum of squares by name; the one place where ranks meet, and where the device is waited for."""
        self._add("samples", torch.tensor(float(self.samples)), 0)
        names: dict[str, None] = {}
        for theirs, weights in gather((list(self.sums), self.weights), manager):  # a rank without a batch knows no names
            names |= dict.fromkeys(theirs)
            self.weights |= weights
        nothing = torch.zeros(3, dtype=torch.float64, device=self.device)
        table = torch.stack([self.sums.get(name, nothing) for name in names])
        return dict(zip(names, all_reduce(table, manager).tolist(), strict=True))
