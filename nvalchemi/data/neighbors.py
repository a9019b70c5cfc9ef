"""Neighbour lists: which atoms lie within a cutoff of each other, periodic images included, never across structures.

The search is `vesin`'s, structure by structure. Against `nvalchemi-toolkit-ops`, the other maintained choice, it is one small
compiled library without Warp, compiles nothing at the first call, and takes tens of microseconds for a molecule on one CPU
thread, where data pipes run; the other searches whole batches on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import KNOWN_LEVELS, Level
from nvalchemi.errors import DataError

Search = Callable[[np.ndarray, np.ndarray | None, np.ndarray | None], tuple[np.ndarray, np.ndarray]]


def neighbor_list(batch: Batch, cutoff: float) -> Batch:
    """The batch with the edges of every structure.

    Parameters
    ----------
    batch
        Structures on any device; the search itself runs on the CPU. Edges that it has are replaced.
    cutoff
        Å. Atoms at a smaller distance than this are neighbours, an atom's own periodic images among them.

    Returns
    -------
    Batch
        With ``edge_index`` (2, E): row 0 the neighbour j, row 1 the centre i, sorted by i; ``edge_shift`` (E, 3) in whole
        lattice vectors, left out where nothing is periodic; ``edge_offsets`` and ``neighbor_cutoff``.

    Raises
    ------
    DataError
        A cutoff that is no positive length, or positions that are not finite.
    """
    search = _searcher(cutoff)
    points, cells, pbc = _geometry(batch.fields)
    offsets = batch.atom_offsets.tolist()
    periodic = [False] * len(batch) if pbc is None else [bool(flags.any()) for flags in pbc]
    pairs, shifts, counts = [], [], [0]
    for k, start in enumerate(offsets[:-1]):
        own = points[start : offsets[k + 1]]
        found, shift = (
            search(own, cells[k], pbc[k]) if periodic[k] and cells is not None and pbc is not None else search(own, None, None)
        )
        pairs.append(found + start)
        shifts.append(shift)
        counts.append(counts[-1] + len(found))
    fields = _edge_fields(pairs, shifts if any(periodic) else None, batch.positions)
    present = {}
    if any(periodic) and not all(periodic):
        present["edge_shift"] = torch.tensor(periodic, device=batch.device)
    edge_offsets = torch.tensor(counts, device=batch.device)
    return batch.replace(levels=None, present=present, neighbor_cutoff=float(cutoff), edge_offsets=edge_offsets, **fields)


def neighbor_list_data(data: AtomicData, cutoff: float) -> AtomicData:
    """One structure with its edges; see `neighbor_list`."""
    points, cell, pbc = _geometry(data.fields)
    periodic = pbc is not None and bool(pbc.any())
    pairs, shift = _searcher(cutoff)(points, cell if periodic else None, pbc if periodic else None)
    kept = {name: t for name, t in data.fields.items() if data.levels[name] is not Level.EDGE}
    fields = {**kept, **_edge_fields([pairs], [shift] if periodic else None, data.positions)}
    levels = data.levels if data.levels is KNOWN_LEVELS else {**data.levels, **KNOWN_LEVELS}
    return AtomicData.trusted(fields, levels, float(cutoff))


def _searcher(cutoff: float) -> Search:
    """A function of (points, cell, pbc) that gives pairs (e, 2) as (centre, neighbour), sorted, and shifts (e, 3)."""
    if type(cutoff) is bool or not (math.isfinite(cutoff) and cutoff > 0):
        raise DataError("the cutoff is no length", found=repr(cutoff), needed="a positive number of Å")
    from vesin import NeighborList

    # One thread: structures are small, and the processes of a run share the cores.
    finder = NeighborList(cutoff=float(cutoff), full_list=True, sorted=True, n_threads=1)
    no_box, no_pbc = np.zeros((3, 3)), np.zeros(3, dtype=bool)

    def search(points: np.ndarray, cell: np.ndarray | None, pbc: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        box, flags = (no_box, no_pbc) if cell is None or pbc is None else (cell, pbc)
        pairs, shift = finder.compute(points, box, flags, "PS", copy=True)
        return pairs.astype(np.int64), shift

    return search


def _geometry(fields: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    points = _array(fields["positions"].double())
    if not np.isfinite(points).all():
        raise DataError(
            "positions are not finite", found=f"{int((~np.isfinite(points)).any(axis=1).sum())} atoms", needed="coordinates in Å"
        )
    cell, pbc = fields.get("cell"), fields.get("pbc")
    if cell is None or pbc is None:
        return points, None, None
    return points, _array(cell.double()), _array(pbc)


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())


def _edge_fields(pairs: list[np.ndarray], shifts: list[np.ndarray] | None, like: Tensor) -> dict[str, Tensor]:
    """The two fields in the order of sender and receiver, on the device and in the dtype of the positions."""
    both = torch.from_numpy(np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64))
    fields = {"edge_index": both.T.flip(0).contiguous().to(like.device)}
    if shifts is not None:
        fields["edge_shift"] = torch.from_numpy(np.concatenate(shifts)).to(like.device, like.dtype)
    return fields
