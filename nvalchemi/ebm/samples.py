"""What samples are: rows of a tensor, or the structures of a batch, of which the positions are what varies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.errors import DataError


def positions(x: Any) -> Tensor:
    """What varies: the tensor (batch, ...) itself, or the positions (N, 3) of a batch of structures."""
    return x.positions if isinstance(x, Batch) else x


def moved(x: Any, to: Tensor) -> Any:
    """The samples with their positions at ``to``. A neighbour list that there is follows; it is of the same cutoff."""
    if not isinstance(x, Batch):
        return to
    batch = x.replace(positions=to)
    if "edge_index" in x and x.neighbor_cutoff is not None:
        return neighbor_list(batch, x.neighbor_cutoff)
    return batch


def total(values: Tensor, x: Any) -> Tensor:
    """The sum over each sample, (batch,), of ``values`` of the positions' shape."""
    if isinstance(x, Batch):
        atoms = values.flatten(1).sum(1)
        return atoms.new_zeros(len(x)).index_add(0, x.batch_idx, atoms)
    return values if values.ndim == 1 else values.flatten(1).sum(1)


def spread(values: Tensor, x: Any) -> Tensor:
    """One value a sample, (batch,), shaped so that it multiplies the positions."""
    if isinstance(x, Batch):
        return values.index_select(0, x.batch_idx).unsqueeze(1)
    return values.reshape(-1, *[1] * (x.ndim - 1))


def centred(values: Tensor, x: Batch) -> Tensor:
    """Values of the positions' shape without their mean over the atoms of each structure."""
    sums = values.new_zeros(len(x), *values.shape[1:]).index_add(0, x.batch_idx, values)
    return values - (sums / x.num_nodes_per_graph.to(values.dtype)[:, None]).index_select(0, x.batch_idx)


def normal_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise of the shape, dtype and device of ``x``.

    Raises
    ------
    DataError
        For samples of whole numbers.
    """
    if not x.is_floating_point():
        raise DataError("noise is drawn for samples of a floating dtype", found=x.dtype, needed="x.float(), for instance")
    return torch.empty_like(x).normal_(generator=generator)


def signs_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Signs, +1 and -1 with equal chance, of the shape, dtype and device of ``x``."""
    return torch.empty_like(x).random_(0, 2, generator=generator).mul_(2).sub_(1)  # bernoulli_ takes four times as long
