"""What a set of structures holds, in the few numbers that show a wrong key or unit at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import FIELDS, Level

if TYPE_CHECKING:
    from nvalchemi.data.datapipes.reader import Reader

_GEOMETRY = ("positions", "atomic_numbers", "cell", "pbc", "edge_index", "edge_shift")
_MAIN = ("energy", "forces", "stress")
_DUPLICATES_KEPT = 2_000_000  # hashes, some 200 MB; beyond them duplicates are no longer looked for


class Summary:
    """Counts and ranges of structures, added batch by batch; memory does not grow with their number.

    Energies in eV per atom, forces in eV/Å, stresses in eV/Å^3. A label counts where it is present and not NaN.
    """

    def __init__(self) -> None:
        self.structures = 0
        self.atoms = 0
        self.sizes: list[int] = []  # smallest and largest number of atoms
        self.elements: Counter[int] = Counter()
        self.periodic = 0
        self.unlabelled = 0
        self.duplicates = 0
        self.first_duplicate: int | None = None
        self.dtype: str | None = None
        self.fields: dict[str, FieldSummary] = {}
        self._seen: set[int] = set()

    @classmethod
    def of(cls, reader: Reader, *, batch_size: int = 256, progress: Callable[[int], None] | None = None) -> Summary:
        """The summary of all that a reader holds; ``progress`` is called with the number of structures read so far."""
        summary = cls()
        for start in range(0, len(reader), batch_size):
            summary.add(reader.read_many(range(start, min(start + batch_size, len(reader)))))
            if progress is not None:
                progress(summary.structures)
        return summary

    def add(self, batch: Batch) -> None:
        """Take note of a batch."""
        counts = batch.num_nodes_per_graph
        numbers, occurrences = batch.atomic_numbers.unique(return_counts=True)
        self.elements.update(dict(zip(numbers.tolist(), occurrences.tolist(), strict=True)))
        sizes = [*self.sizes, int(counts.min()), int(counts.max())]
        self.sizes = [min(sizes), max(sizes)]
        self.dtype = str(batch.dtype).removeprefix("torch.")
        if "pbc" in batch:
            self.periodic += int(batch.pbc.any(dim=1).sum())
        labelled = np.zeros(batch.num_graphs, dtype=bool)
        for name in batch.field_names:
            if name in _GEOMETRY:
                continue
            field = self.fields.setdefault(name, FieldSummary(batch.levels[name]))
            there = field.add(batch, name)
            if name in _MAIN:
                labelled |= there
        self.unlabelled += int((~labelled).sum())
        self._note_duplicates(batch)
        self.structures += batch.num_graphs
        self.atoms += batch.num_nodes

    def _note_duplicates(self, batch: Batch) -> None:
        if len(self._seen) >= _DUPLICATES_KEPT:
            return
        positions, numbers = batch.positions.numpy(), batch.atomic_numbers.numpy()
        cells = batch.cell.numpy() if "cell" in batch else None
        offsets = batch.atom_offsets.tolist()
        for i, (start, stop) in enumerate(pairwise(offsets)):
            cell = cells[i].tobytes() if cells is not None and cells[i].any() else b""
            key = hash((positions[start:stop].tobytes(), numbers[start:stop].tobytes(), cell))
            if key in self._seen:
                self.duplicates += 1
                if self.first_duplicate is None:
                    self.first_duplicate = self.structures + i
            self._seen.add(key)

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain data, for JSON."""
        from ase.data import chemical_symbols

        return {
            "structures": self.structures,
            "atoms": self.atoms,
            "atoms_per_structure": {
                "min": self.sizes[0] if self.sizes else 0,
                "mean": self.atoms / self.structures if self.structures else 0.0,
                "max": self.sizes[1] if self.sizes else 0,
            },
            "elements": {chemical_symbols[z]: self.elements[z] for z in sorted(self.elements)},
            "periodic": self.periodic,
            "unlabelled": self.unlabelled,
            "duplicates": self.duplicates,
            "dtype": self.dtype,
            "fields": {name: field.as_dict(name) for name, field in self.fields.items()},
        }


class FieldSummary:
    """How many structures have a field, and the range, mean and root mean square of its numbers.

    Of energies these are per atom.
    """

    def __init__(self, level: Level) -> None:
        self.level = level
        self.structures = 0
        self.values = 0
        self.total = 0.0
        self.squares = 0.0
        self.min = np.inf
        self.max = -np.inf

    def add(self, batch: Batch, name: str) -> np.ndarray:
        """Take note of the field in a batch; which structures have it, as (B,) booleans."""
        there = batch.has(name).numpy().copy()
        values = _rows(batch[name], name)
        finite = ~np.isnan(values)
        if self.level is Level.SYSTEM:
            rows_there, counts = there, None
            there &= finite.any(axis=1)
        else:
            counts = (batch.num_nodes_per_graph if self.level is Level.ATOM else batch.num_edges_per_graph).numpy()
            rows_there = np.repeat(there, counts)
            owner = np.repeat(np.arange(batch.num_graphs), counts)
            there &= np.bincount(owner, weights=finite.any(axis=1), minlength=batch.num_graphs) > 0
        if name == "energy":
            values = values / batch.num_nodes_per_graph.numpy()[:, None]
        self.structures += int(there.sum())
        values = values[rows_there[:, None] & finite]
        if values.size:
            self.values += values.size
            self.total += float(values.sum())
            self.squares += float(np.square(values).sum())
            self.min, self.max = min(self.min, float(values.min())), max(self.max, float(values.max()))
        return there

    @property
    def rms(self) -> float:
        """Root mean square over all numbers."""
        return float(np.sqrt(self.squares / self.values)) if self.values else float("nan")

    @property
    def mean(self) -> float:
        """Mean over all numbers."""
        return self.total / self.values if self.values else float("nan")

    def as_dict(self, name: str) -> dict[str, Any]:
        """Plain data; without numbers if there are none."""
        known = FIELDS.get(name)
        unit = (known.unit if known else "") + ("/atom" if name == "energy" else "")
        out: dict[str, Any] = {"level": str(self.level), "structures": self.structures, "unit": unit}
        if self.values:
            out |= {"min": self.min, "max": self.max, "mean": self.mean, "rms": self.rms}
        return out


def _rows(tensor: Tensor, name: str) -> np.ndarray:
    """The field as (rows, numbers of a row) in float64."""
    array = tensor.numpy()
    return np.asarray(array, dtype=np.float64).reshape(len(array), -1)
