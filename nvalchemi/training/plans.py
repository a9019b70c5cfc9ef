"""Which rank writes which part of which tensor: each what it alone has, and rank 0 what all have.

That is planned by ``torch.distributed.checkpoint``. Its files are not used, because they hold pickles. A plan takes the ranks a while, some
seconds for thousands of tensors, so that it is remembered from one save of a run to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Size, Tensor

from nvalchemi.distributed import Manager, any_rank, broadcast
from nvalchemi.distributed.parts import Part, mesh_of, part_here
from nvalchemi.distributed.tensors import is_sharded_tensor, local
from nvalchemi.errors import CheckpointError
from nvalchemi.training.agreement import together


@dataclass(slots=True)
class Plan:
    """Who writes what.

    Attributes
    ----------
    same
        Names of tensors that are another one by name, as tied weights are: they are written once.
    own
        What this rank writes: the tensor's name, and that of its block in the file.
    blocks
        By the tensor's name, its blocks of all ranks: file, name there, starts and sizes.
    meshes
        Over which meshes of ranks tensors are sharded, as plain data.
    """

    same: dict[str, str]
    own: list[tuple[str, str]] = field(default_factory=list)
    blocks: dict[str, list[list[Any]]] = field(default_factory=dict)
    meshes: list[dict[str, Any]] = field(default_factory=list)


class Plans:
    """Makes plans, and gives the last one again as long as the tensors are of the same names, kinds and shares on all ranks."""

    def __init__(self) -> None:
        self._of: Any = None
        self._plan: Plan | None = None

    def of(self, tensors: Mapping[str, Tensor], manager: Manager, file_of: Callable[[int], str]) -> Plan:
        """The plan for ``tensors``; all ranks must call.

        Parameters
        ----------
        tensors
            By name, of the same names on all ranks. Of one that is not sharded, rank 0's counts.
        manager
            Who the ranks are.
        file_of
            The name of a rank's file.

        Raises
        ------
        CheckpointError
            Where the ranks' tensors or parts do not fit together.
        """
        same = same_memory(tensors)
        kinds = (same, {name: _kind(tensor) for name, tensor in tensors.items()})
        if any_rank(self._plan is None or kinds != self._of, manager):
            self._of, self._plan = kinds, _made(tensors, broadcast(same, manager), manager, file_of)
        assert self._plan is not None
        return self._plan


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of tensors that are the same memory under several names: which other name each goes by."""
    first: dict[tuple[int, Size], tuple[str, Tensor]] = {}
    same = {}
    for key, tensor in tensors.items():
        here = local(tensor)
        if here.numel():
            other, there = first.setdefault((here.data_ptr(), here.shape), (key, here))
            if other is key:  # the first of its memory
                continue
            alike = there.dtype == here.dtype and there.stride() == here.stride() and there.device == here.device
            if alike and tensors[other].shape == tensor.shape:
                same[key] = other
    return same


def _kind(tensor: Any) -> Any:
    """What a plan depends on."""
    if is_sharded_tensor(tensor):
        return tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh
    return tensor.dtype, tensor.shape


def _made(tensors: Mapping[str, Tensor], same: dict[str, str], manager: Manager, file_of: Callable[[int], str]) -> Plan:
    plan = Plan(same)
    for rank, key, part in _shares(tensors, same, manager):
        name = key if not any(part.starts) else f"{key}@{','.join(map(str, part.starts))}"
        plan.blocks.setdefault(key, []).append([file_of(rank), name, list(part.starts), list(part.sizes)])
        if rank == manager.rank:
            plan.own.append((key, name))
    for mesh in filter(None, map(mesh_of, tensors.values())):
        if mesh not in plan.meshes:
            plan.meshes.append(mesh)
    return plan


def _shares(tensors: Mapping[str, Tensor], same: Mapping[str, str], manager: Manager) -> Iterator[tuple[int, str, Part]]:
    """Rank, name and block, those left out that are the same as another."""
    if not manager.distributed and not any(map(is_sharded_tensor, tensors.values())):
        yield from ((manager.rank, key, part_here(tensor)) for key, tensor in tensors.items() if key not in same)
        return
    from torch.distributed.checkpoint import DefaultSavePlanner  # slow to import

    # Rank 0's of what all have: running means differ between ranks until the next forward sends rank 0's to all.
    planner: Any = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)

    def own_plan() -> tuple[list[str], Any]:
        for tensor in tensors.values():
            part_here(tensor)  # refuses a sum that was not carried out
        planner.set_up_planner({key: t for key, t in tensors.items() if key not in same}, None, manager.rank == 0)
        return list(tensors), planner.create_local_plan()

    names, own_plans = zip(*together(own_plan, manager), strict=True)
    sets = [set(of_rank) for of_rank in names]
    other = sorted(set.union(*sets) - set.intersection(*sets))
    if other:
        raise CheckpointError(
            "the state that ranks share differs from rank to rank", found=f"only on some: {', '.join(other[:5])}"
        )
    try:
        plans, _ = planner.create_global_plan(list(own_plans))
    except ValueError as error:
        raise CheckpointError("the ranks' parts do not make up the state", found=str(error)[:300]) from None
    for rank, plan in enumerate(plans):
        for item in plan.items:
            part = Part(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            if math.prod(part.sizes):
                yield rank, item.index.fqn, part
    for key, tensor in tensors.items():
        if not tensor.numel() and key not in same:
            yield 0, key, Part((0,) * tensor.dim(), tuple(tensor.shape))
