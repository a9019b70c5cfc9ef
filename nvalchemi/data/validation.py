"""The full check of a batch whose making was trusted: for readers of foreign files, for tests, for a store's `verify`."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.fields import FIELDS, Level, row_axis
from nvalchemi.errors import DataError


def validate_batch(batch: Batch) -> None:
    """Check offsets, shapes, dtypes, devices, positions, elements and edges of a batch.

    Raises
    ------
    DataError
        The first thing that is wrong, with the structure concerned where there is one.
    """
    n_atoms = batch.fields["positions"].shape[0] if "positions" in batch.fields else None
    if n_atoms is None or "atomic_numbers" not in batch.fields:
        raise DataError("a batch needs positions and atomic_numbers", found=", ".join(batch.fields) or "no fields")
    _check_offsets(batch, "atom_offsets", batch.atom_offsets, n_atoms, least=1)
    rows = {Level.SYSTEM: batch.num_graphs, Level.ATOM: n_atoms}
    if batch.edge_offsets is not None:
        rows[Level.EDGE] = batch.num_edges
        _check_offsets(batch, "edge_offsets", batch.edge_offsets, batch.num_edges, least=0)
    for name, tensor in batch.fields.items():
        _check_tensor(batch, name, tensor, rows)
    for name, mask in batch.present.items():
        if name not in batch.fields or mask.dtype != torch.bool or mask.shape != (batch.num_graphs,):
            raise DataError(
                f"the mask of {name} does not fit",
                found=f"{mask.dtype} {tuple(mask.shape)}",
                needed=f"bool ({batch.num_graphs},)",
            )
    bad = (~torch.isfinite(batch.positions)).any(dim=1)
    if bad.any():
        raise DataError("positions are not finite", found=_first(batch, bad), fix="repair or drop this structure")
    bad = (batch.atomic_numbers < 1) | (batch.atomic_numbers > 118)
    if bad.any():
        raise DataError("atomic_numbers name unknown elements", found=_first(batch, bad), needed="1 (H) to 118 (Og)")
    if batch.edge_offsets is not None and batch.num_edges:
        _check_edges(batch)


def _check_offsets(batch: Batch, name: str, offsets: Tensor, total: int, least: int) -> None:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.shape[0] != batch.num_graphs + 1:
        raise DataError(
            f"{name} has the wrong form", found=f"{offsets.dtype} {tuple(offsets.shape)}", needed="int64, structures + 1"
        )
    counts = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or bool((counts < least).any()):
        low = int(counts.min()) if len(counts) else 0
        raise DataError(
            f"{name} does not divide the rows",
            found=f"from {int(offsets[0])} to {int(offsets[-1])}, least count {low}",
            needed=f"from 0 to {total}, counts of at least {least}",
        )


def _check_tensor(batch: Batch, name: str, tensor: Tensor, rows: dict[Level, int]) -> None:
    level = batch.levels.get(name)
    if level is None or level not in rows:
        raise DataError(f"{name} has no level that the batch has", found=level, needed=", ".join(rows))
    spec, axis = FIELDS.get(name), row_axis(name)
    shape = tuple(tensor.shape)
    wrong = tensor.dim() <= axis or shape[axis] != rows[level]
    if not wrong and spec is not None:
        row = shape[:axis] + shape[axis + 1 :]
        wrong = row != spec.shape or spec.level != level
    if wrong:
        raise DataError(f"{name} has the wrong shape", found=shape, needed=f"{rows[level]} rows, one for each {level}")
    if tensor.device != batch.device:
        raise DataError(f"{name} lies on another device", found=tensor.device, needed=batch.device)
    kind = "float" if spec is None and tensor.is_floating_point() else None if spec is None else spec.kind
    needed = {"float": batch.dtype, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool, None: tensor.dtype}[kind]
    if tensor.dtype != needed:
        raise DataError(f"{name} has the wrong dtype", found=tensor.dtype, needed=needed)


def _check_edges(batch: Batch) -> None:
    owner = torch.repeat_interleave(torch.arange(batch.num_graphs, device=batch.device), batch.num_edges_per_graph)
    edges = batch.edge_index
    if bool((edges < 0).any()) or bool((edges >= batch.num_nodes).any()):
        raise DataError("edge_index names atoms that do not exist", needed=f"0 to {batch.num_nodes - 1}")
    crossing = (batch.batch_idx[edges] != owner).any(dim=0)
    if crossing.any():
        raise DataError("an edge leaves its structure", found=batch.describe(int(owner[crossing][0])))
    if bool((edges[1].diff() < 0).any()):
        raise DataError("edges are not sorted by their centre, row 1 of edge_index")


def _first(batch: Batch, bad_atoms: Tensor) -> str:
    return batch.describe(int(batch.batch_idx[bad_atoms][0]))
