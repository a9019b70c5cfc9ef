"""Predictions beside labels, structure by structure, for parity plots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import gather
from nvalchemi.objective import LossOutput

_KEYS = ("energy", "forces", "stress")
_BESIDE = {"num_atoms": "energy", "sample_index": "energy"}


class Parity:
    """A batch callback of ``evaluate`` that keeps the labels and the predictions of what is labelled, of data that know their place.

    :meth:`arrays` gives ``energy``, ``energy_label`` (n,) eV, ``num_atoms`` (n,), ``forces``, ``forces_label`` (m, 3) eV/Å,
    ``stress``, ``stress_label`` (k, 3, 3) eV/Å³, of the rows without an absent component, and ``sample_index`` (n,).
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[NDArray[Any]]] = {}
        self._places: dict[str, list[NDArray[Any]]] = {}  # of each row's structure in the data set

    def __call__(self, batch: Any, predictions: Mapping[str, Tensor], loss: LossOutput | None) -> None:
        """Keep one batch."""
        for key in _KEYS:
            if key not in predictions or key not in batch:
                continue
            label, prediction = batch[key], predictions[key]
            there = ~label.isnan().flatten(1).any(1) if label.dim() > 1 else ~label.isnan()
            self._keep(f"{key}_label", label[there])
            self._keep(key, prediction[there])
            place = batch.sample_index if key != "forces" else batch.sample_index[batch.batch_idx]
            self._places.setdefault(key, []).append(place[there].cpu().numpy())
            if key == "energy":
                self._keep("num_atoms", batch.num_nodes_per_graph[there])
                self._keep("sample_index", batch.sample_index[there])

    def _keep(self, name: str, values: Tensor) -> None:
        self._rows.setdefault(name, []).append(values.detach().cpu().numpy())

    def gather(self, manager: Manager) -> None:
        """Take in what the other ranks have kept."""
        theirs = gather((self._rows, self._places), manager)
        self._rows, self._places = (
            {name: [part for rank in ranks for part in rank.get(name, [])] for name in set().union(*ranks)}
            for ranks in zip(*theirs, strict=True)
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All that was kept, in the data set's order."""
        order = {key: np.argsort(np.concatenate(places), kind="stable") for key, places in self._places.items()}
        joined = {name: np.concatenate(parts) for name, parts in sorted(self._rows.items())}
        return {name: values[order[_BESIDE.get(name, name.removesuffix("_label"))]] for name, values in joined.items()}

    def save(self, path: Path) -> None:
        """Write the arrays as npz."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:  # a torn archive would stand in the way of plot
            np.savez_compressed(file, **self.arrays())  # type: ignore[arg-type]  # the stubs know no names of arrays
        os.replace(temporary, path)
