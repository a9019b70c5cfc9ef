"""Blocks of tensors that are sharded between ranks: which one is here, and a tensor that is sharded like another."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor

from nvalchemi.distributed.tensors import is_sharded_tensor
from nvalchemi.errors import ConfigError

_MODULE = "torch.distributed.tensor"


class Part(NamedTuple):
    """A block of a tensor: where it begins and how large it is, one number a dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def common(self, other: Part) -> Part:
        """What lies in both of two blocks of one tensor; sizes are 0 where nothing does."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True))
        return Part(starts, tuple(max(end - start, 0) for start, end in zip(starts, ends, strict=True)))

    def within(self, other: Part) -> tuple[slice, ...]:
        """Where this block lies in ``other``, which contains it."""
        offsets = (start - origin for start, origin in zip(self.starts, other.starts, strict=True))
        return tuple(slice(offset, offset + size) for offset, size in zip(offsets, self.sizes, strict=True))


def part_here(tensor: Any) -> Part:
    """Which block of ``tensor`` lies on this rank.

    Raises
    ------
    ConfigError
        For a tensor of which each rank has a summand: its values are known nowhere.
    """
    shape = tuple(tensor.shape)
    if not is_sharded_tensor(tensor):
        return Part((0,) * len(shape), shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(
            "a tensor of a state is a sum that was not carried out",
            found=f"placements {tensor.placements}",
            needed="Shard or Replicate",
            fix="call redistribute or full_tensor on it",
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(tuple(starts), tuple(sizes))


def sharded_like(tensor: Any, part: Tensor) -> Tensor:
    """A ``DTensor`` of the shape and placements of ``tensor`` whose block here is ``part``, on the device of the mesh."""
    module: Any = sys.modules[_MODULE]
    here = tensor.to_local()
    # what has no entries has shapes of torch's own on the ranks
    part = part.to(here.device) if tensor.numel() else here.detach().clone()
    return module.DTensor.from_local(  # type: ignore[no-any-return]
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def on_every_rank_like(tensor: Any, whole: Tensor) -> Tensor:
    """A ``DTensor`` on the mesh of ``tensor`` that is ``whole`` on each of its ranks."""
    module: Any = sys.modules[_MODULE]
    placements = [module.Replicate()] * tensor.device_mesh.ndim
    return module.DTensor.from_local(whole.to(tensor.to_local().device), tensor.device_mesh, placements, run_check=False)  # type: ignore[no-any-return]


def mesh_of(tensor: Any) -> dict[str, Any] | None:
    """Shape and dimension names of the mesh over which ``tensor`` is sharded, as plain data; ``None`` where it is not."""
    if not is_sharded_tensor(tensor):
        return None
    mesh = tensor.device_mesh
    return {"shape": list(mesh.shape), "names": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)}
