"""Which rows of concatenated tensors belong to a choice of structures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import DataError


def chosen_rows(index: Any, size: int, device: torch.device) -> Tensor:
    """Integers, a boolean mask or a slice as (k,) int64 numbers of structures, each from 0 to ``size - 1``."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(size), device=device)
    idx = torch.as_tensor(index, device=device)
    if idx.dtype == torch.bool:
        if idx.shape != (size,):
            raise DataError("the mask does not fit the batch", found=tuple(idx.shape), needed=f"({size},)")
        return idx.nonzero().flatten()
    if idx.is_floating_point() and idx.numel():
        raise DataError("structures are chosen by whole numbers", found=idx.dtype, needed="integers, booleans or a slice")
    idx = idx.long().reshape(-1)
    if idx.numel():
        low, high = (int(x) for x in torch.aminmax(idx))
        if low < -size or high >= size:
            raise IndexError(f"structures {low} to {high} asked of a batch of {size}")
        if low < 0:
            idx = torch.where(idx < 0, idx + size, idx)
    return idx


def ragged_rows(offsets: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the structures ``idx``, one after the other, and the new offsets."""
    starts = offsets[idx]
    counts = offsets[idx + 1] - starts
    new = torch.zeros(idx.shape[0] + 1, dtype=torch.int64, device=offsets.device)
    torch.cumsum(counts, 0, out=new[1:])
    total = int(new[-1])
    rows = torch.repeat_interleave(starts - new[:-1], counts, output_size=total)
    return rows.add_(torch.arange(total, device=offsets.device)), new
