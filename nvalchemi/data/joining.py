"""What it takes for structures to go into one batch: one level, dtype, device and shape of row for each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nvalchemi.data.atoms import AtomicData
from nvalchemi.data.fields import Level, missing_value
from nvalchemi.errors import DataError


def common_levels(data: Sequence[AtomicData]) -> Mapping[str, Level]:
    """The level of every field, which must be the same in all structures."""
    first = data[0].levels
    if all(d.levels is first for d in data):
        return first
    levels: dict[str, Level] = {}
    for i, d in enumerate(data):
        for name in d._fields:
            level = d.levels[name]
            if levels.setdefault(name, level) != level:
                raise DataError(
                    f"the field {name!r} has different levels in one batch",
                    found=f"{levels[name]}, and {level} in structure {i}",
                    needed="one level",
                )
    return levels


def common_edges(data: Sequence[AtomicData]) -> tuple[list[int], float | None]:
    """The number of edges of each structure, and the cutoff that all share."""
    cutoff = data[0].neighbor_cutoff
    counts = []
    for i, d in enumerate(data):
        edges = d._fields.get("edge_index")
        if edges is None:
            raise DataError(
                "only some structures of a batch have edges",
                found=f"none in structure {i}",
                needed="edges on all of them or on none",
                fix="use nvalchemi.data.neighbors.neighbor_list(batch, cutoff) after batching",
            )
        if d.neighbor_cutoff != cutoff:
            raise DataError(
                "edges of different cutoffs in one batch",
                found=f"{cutoff} and {d.neighbor_cutoff} Å (structure {i})",
                needed="one cutoff",
            )
        counts.append(edges.shape[1])
    return counts, cutoff


def filled(name: str, tensors: list[Tensor | None], rows: list[int] | None) -> list[Tensor | None]:
    """The list with tensors of missing values where structures lack the field."""
    model = next(t for t in tensors if t is not None)
    value = missing_value(name, model.dtype)
    if rows is None:
        blank = torch.full_like(model, value, requires_grad=False)
        return [blank if t is None else t for t in tensors]
    row = tuple(model.shape[1:])
    return [model.new_full((k, *row), value) if t is None else t for t, k in zip(tensors, rows, strict=True)]


def misfit(name: str, tensors: Sequence[Tensor | None]) -> DataError:
    """The error that names the first structure whose tensor does not go with those before it."""
    first = tensors[0]
    assert first is not None
    for i, t in enumerate(tensors):
        if t is None:
            continue
        for what, a, b in (
            ("dtypes", first.dtype, t.dtype),
            ("devices", first.device, t.device),
            ("shapes of a row", tuple(first.shape[1:]), tuple(t.shape[1:])),
            ("shapes", tuple(first.shape), tuple(t.shape)),
        ):
            if a != b:
                fix = "bring them to one with data.to(device, dtype)" if what in ("dtypes", "devices") else None
                return DataError(
                    f"{name} has different {what} in one batch", found=f"{a}, and {b} in structure {i}", needed="one", fix=fix
                )
    return DataError(f"{name} cannot be put together")
