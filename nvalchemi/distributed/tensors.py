"""Tensors that may be sharded: this rank's part, the whole, and norms over all ranks. A plain tensor passes through all of it as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded_tensor(tensor: Any) -> bool:
    """Whether this is a ``DTensor``."""
    # Where nobody imported the module there are none; the import itself is slow.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Give this rank's part, without a graph: it shares its memory with the tensor, so a change in place is one of the tensor's."""
    if not is_sharded_tensor(tensor):
        return tensor
    with torch.no_grad():  # to detach what is sharded takes longer
        return tensor.to_local().detach()  # type: ignore[attr-defined,no-any-return]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, without a graph. All ranks must call."""
    if not is_sharded_tensor(tensor):
        return tensor
    if not tensor.numel():  # torch cannot gather what has no entries
        return local(tensor).new_empty(tensor.shape)
    return tensor.detach().full_tensor()  # type: ignore[attr-defined,no-any-return]


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Norms whose own norm is that of all tensors together, the same on every rank that holds a part of them.

    Plain tensors give one norm each. Those that are sharded over the same ranks give one together, by one collective, so all ranks must
    call with the same tensors.

    Parameters
    ----------
    tensors
        Gradients, for example; not none.
    order
        Of the norm, positive; ``float("inf")`` is the largest entry.

    Returns
    -------
    Tensor
        (n,). An entry is not finite where one of its tensors is not.
    """
    plain, groups = _by_groups(tensors)
    found = list(torch._foreach_norm(plain, order)) if plain else []
    for (over, _), parts in groups.items():
        own = [part for part in parts if part.numel()]
        value = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own, order)), order) if own else parts[0].new_zeros(())
        if order == float("inf"):
            # a maximum over ranks may drop a NaN
            value = _reduced(torch.where(value.isnan(), order, value), over, dist.ReduceOp.MAX)
        else:
            value = _reduced(value.double() ** order, over, dist.ReduceOp.SUM) ** (1.0 / order)
        found.append(value.to(parts[0].dtype))
    found = found or [local(tensors[0]).new_zeros(())]
    return torch.stack([f.to(found[0].dtype) for f in found])


def total_norm(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all tensors together, a scalar: see `norms`."""
    return torch.linalg.vector_norm(norms(tensors, order), order)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry is finite, also those that other ranks hold. All ranks must call with the same tensors."""
    plain, groups = _by_groups(list(tensors))
    bad = [~part.isfinite().all() for part in plain]
    for (over, _), parts in groups.items():
        own = torch.stack([~part.isfinite().all() for part in parts]).any()
        bad.append(_reduced(own.float(), over, dist.ReduceOp.MAX) > 0)
    return not bad or not bool(torch.stack([flag.to(bad[0].device) for flag in bad]).any())


def _by_groups(tensors: Sequence[Tensor]) -> tuple[list[Tensor], dict[tuple[tuple[Any, ...], torch.device], list[Tensor]]]:
    """Plain tensors, and this rank's parts of the others by the process groups that share them, and by device."""
    plain: list[Tensor] = []
    groups: dict[tuple[tuple[Any, ...], torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if is_sharded_tensor(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
            over = tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())
            part = local(tensor)
            groups.setdefault((over, part.device), []).append(part)
        elif tensor.numel():  # no largest entry where there is none
            plain.append(tensor)
    return plain, groups


def _reduced(value: Tensor, over: Iterable[Any], operation: Any) -> Tensor:
    for group in over:
        dist.all_reduce(value, op=operation, group=group)
    return value
