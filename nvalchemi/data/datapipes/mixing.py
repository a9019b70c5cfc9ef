"""Samples of several data sets put together in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.pipeline import Samples
from nvalchemi.data.fields import Level, missing_value, row_axis
from nvalchemi.errors import DataError


def mixed(parts: Sequence[Samples], which: Sequence[int], order: NDArray[np.int64] | None, names: tuple[str, ...]) -> Samples:
    """One batch of several.

    Parameters
    ----------
    parts
        What each data set gave: batches, tensors, or dicts of tensors.
    which
        The number of the data set of each part.
    order
        Which of the samples, counted through all parts, comes first, second and so on; None leaves them as they are.
    names
        Names of all data sets.
    """
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        raise DataError(
            "structures and dense arrays do not go into one batch",
            found=", ".join(f"{type(part).__name__} of {names[d]}" for d, part in zip(which, parts, strict=True)),
        )
    if isinstance(parts[0], Batch):
        batch = _joined(list(parts), which, names)  # type: ignore[arg-type]
        return batch if order is None else batch.index_select(torch.from_numpy(order))
    if isinstance(parts[0], dict):
        keys = parts[0].keys()
        for d, part in zip(which, parts, strict=True):
            if part.keys() != keys:  # type: ignore[union-attr]
                raise DataError(
                    "dense arrays of different names do not go into one batch",
                    found=f"{', '.join(keys)} of {names[which[0]]}, {', '.join(part)} of {names[d]}",  # type: ignore[arg-type]
                )
        return {key: _rows(key, [part[key] for part in parts], which, order, names) for key in keys}  # type: ignore[index]
    return _rows("values", list(parts), which, order, names)  # type: ignore[arg-type]


def _rows(
    field: str, parts: list[Tensor], which: Sequence[int], order: NDArray[np.int64] | None, names: tuple[str, ...]
) -> Tensor:
    rows = _cat(field, parts, which, names)
    return rows if order is None else rows.index_select(0, torch.from_numpy(order))


def with_fields(batch: Batch, templates: dict[str, tuple[Level, Tensor]]) -> Batch:
    """The batch with every field of ``templates`` (level, and a tensor of its dtype and row); rows that it lacks are marked as absent."""
    missing = {name: found for name, found in templates.items() if name not in batch}
    if not missing:
        return batch
    out = batch.replace()
    out.levels = {**batch.levels, **{name: level for name, (level, _) in missing.items()}}
    for name, (level, model) in missing.items():
        rows = batch.num_graphs if level is Level.SYSTEM else batch.num_nodes
        out.fields[name] = model.new_full((rows, *model.shape[1:]), missing_value(name, model.dtype))
        out.present = {**out.present, name: torch.zeros(batch.num_graphs, dtype=torch.bool)}
    return out


def _joined(parts: list[Batch], which: Sequence[int], names: tuple[str, ...]) -> Batch:
    levels = _levels(parts, which, names)
    edges = _check_edges(parts, which, names)
    counts = np.array([part.num_graphs for part in parts])
    offsets = _offsets([part.atom_offsets for part in parts])
    fields, present = {}, {}
    for name, level in levels.items():
        if level is Level.EDGE and not edges:
            continue
        owners = [part for part in parts if name in part]
        model = owners[0].fields[name]
        pieces, masks = [], []
        for part in parts:
            if name in part:
                pieces.append(part.fields[name])
            else:
                rows = {Level.SYSTEM: part.num_graphs, Level.ATOM: part.num_nodes}.get(level, part.num_edges)
                pieces.append(model.new_full((rows, *model.shape[1:]), missing_value(name, model.dtype)))
            masks.append(part.has(name))
        if name == "edge_index":
            starts = np.cumsum([0, *(part.num_nodes for part in parts[:-1])]).tolist()
            pieces = [piece + start for piece, start in zip(pieces, starts, strict=True)]
        fields[name] = _cat(name, pieces, which, names)
        if len(owners) < len(parts) or any(name in part.present for part in parts):
            present[name] = torch.cat(masks)
    local = [part.sample_index if part.sample_index is not None else torch.arange(part.num_graphs) for part in parts]
    return Batch(
        fields,
        {name: level for name, level in levels.items() if name in fields},
        offsets,
        _offsets([part.edge_offsets for part in parts]) if edges else None,  # type: ignore[misc]
        present,
        torch.cat(local),
        torch.from_numpy(np.repeat(np.asarray(which, np.int64), counts)),
        names,
        parts[0].neighbor_cutoff,
    )


def _offsets(parts: list[Tensor]) -> Tensor:
    ends = [parts[0]]
    for part in parts[1:]:
        ends.append(part[1:] + ends[-1][-1])
    return torch.cat(ends)


def _levels(parts: list[Batch], which: Sequence[int], names: tuple[str, ...]) -> dict[str, Level]:
    levels: dict[str, Level] = {}
    for d, part in zip(which, parts, strict=True):
        for name in part.fields:
            if levels.setdefault(name, part.levels[name]) != part.levels[name]:
                raise DataError(
                    f"the field {name!r} has different levels in one batch",
                    found=f"{levels[name]}, and {part.levels[name]} in {names[d]}",
                    needed="one level",
                )
    return levels


def _check_edges(parts: list[Batch], which: Sequence[int], names: tuple[str, ...]) -> bool:
    """Whether the parts have edges; DataError where only some have, or to different cutoffs."""
    found = {names[d]: part.neighbor_cutoff if "edge_index" in part else None for d, part in zip(which, parts, strict=True)}
    if len(set(found.values())) > 1:
        raise DataError(
            "neighbour lists of one batch are made to one cutoff",
            found=", ".join(f"{name}: {'none' if cutoff is None else f'{cutoff} Å'}" for name, cutoff in found.items()),
            needed="one cutoff in all data sets, or no neighbour lists",
            fix="give each data set the same NeighborList(cutoff)",
        )
    return None not in found.values()


def _cat(name: str, parts: list[Tensor], which: Sequence[int], names: tuple[str, ...]) -> Tensor:
    axis = row_axis(name)

    def row(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.dtype, tuple(tensor.shape[:axis]), tuple(tensor.shape[axis + 1 :])

    for d, part in zip(which[1:], parts[1:], strict=True):
        if row(part) != row(parts[0]):
            first, other = (f"{t.dtype}, rows of shape {tuple(t.shape[1:])}" for t in (parts[0], part))
            raise DataError(
                f"{name} of two data sets does not go into one batch",
                found=f"{first} in {names[which[0]]}; {other} in {names[d]}",
                needed="one dtype and one shape",
                fix="give all data sets the same dtype=" if part.dtype != parts[0].dtype else None,
            )
    return torch.cat(parts, axis)
