"""A state whose tensors lie in files of several ranks: each writes what it has, and what all have is written once.

Who writes what is planned in :mod:`nvalchemi.training.plans`. A tensor is found again by an index: its path in the state, and the blocks of it with the files that hold them. It is read by blocks, so that each rank of a run
that goes on reads its own part, whatever the number of ranks and the division were and are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data.tensor_file import CODES, DTYPES, Entry, TensorFile
from nvalchemi.distributed import Manager
from nvalchemi.distributed.parts import Part, part_here, sharded_like
from nvalchemi.distributed.tensors import full, is_sharded_tensor, local
from nvalchemi.errors import CheckpointError
from nvalchemi.training.plans import Plans

Way = tuple[str | int, ...]

PLAIN = {type(None), bool, int, float, str}
HOLDERS = (Tensor, dict, list, tuple, Mapping)
"""What may hold a tensor, or is one."""


@dataclass(frozen=True, slots=True)
class Division:
    """A state, divided into the files of a checkpoint.

    Attributes
    ----------
    plain
        The state with ``None`` in place of each tensor.
    index
        Gives where each tensor is; plain data, the same on all ranks.
    entries
        What this rank writes.
    meshes
        Over which meshes of ranks tensors are sharded, as plain data.
    """

    plain: Any
    index: Callable[[], list[dict[str, Any]]]
    entries: list[Entry]
    meshes: list[dict[str, Any]]


def needs_division(state: Any, manager: Manager) -> bool:
    """Whether a state has to be written by several ranks, or holds tensors that are sharded."""
    return manager.distributed or any(is_sharded_tensor(tensor) for _, tensor in tensors_of(state))


def divide(state: Any, manager: Manager, file_of: Callable[[int], str], plans: Plans | None = None) -> Division:
    """Plan who writes which part of ``state``; all ranks must call.

    Parameters
    ----------
    state
        Nested dicts and lists of tensors and plain data, of the same structure on all ranks. Of a tensor that is not sharded, rank 0's
        counts.
    file_of
        The name of a rank's file.
    plans
        Remembers the plan of the save before.

    Raises
    ------
    CheckpointError
        Where the ranks' parts do not make up a tensor.
    """
    tensors = {name_of(path): tensor for path, tensor in tensors_of(state)}
    plan = (plans or Plans()).of(tensors, manager, file_of)
    entries = []
    for key, name in plan.own:
        here = local(tensors[key]) if tensors[key].numel() else full(tensors[key])
        here = here.detach() if here.requires_grad else here
        entries.append(Entry(name, here.dtype, tuple(here.shape), lambda t=here: t))  # type: ignore[misc]
    kinds = {key: (_code(tensor), tensor.shape) for key, tensor in tensors.items()}

    def index() -> list[dict[str, Any]]:
        return [
            {"path": json.loads(key), "dtype": code, "shape": list(shape), "blocks": plan.blocks[plan.same.get(key, key)]}
            for key, (code, shape) in kinds.items()
        ]

    return Division(without_tensors(state), index, entries, plan.meshes)


class SavedTensor:
    """A tensor in the files of a checkpoint, of which any block can be read.

    Parameters
    ----------
    dtype, shape
        Of the whole tensor.
    blocks
        Its blocks: the file and the name in it, and the place in the whole.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], blocks: list[tuple[TensorFile, str, Part]]) -> None:
        self.dtype, self.shape, self.blocks = dtype, torch.Size(shape), blocks

    def read(self, part: Part | None = None) -> Tensor:
        """A block of it, by default all of it, in new memory.

        Raises
        ------
        CheckpointError
            Where the files do not hold all of it.
        """
        wanted = part or Part((0,) * len(self.shape), tuple(self.shape))
        result = torch.empty(wanted.sizes, dtype=self.dtype)
        filled = 0
        for file, name, there in self.blocks:
            common = wanted.common(there)
            count = math.prod(common.sizes)
            if count:
                result[common.within(wanted)] = file.read(name)[common.within(there)]
                filled += count
        if filled != result.numel():
            raise CheckpointError("a saved tensor has gaps", found=f"{filled} of {result.numel()} numbers")
        return result


def joined(plain: Any, index: Any, open_file: Callable[[str], TensorFile]) -> Any:
    """The state with a :class:`SavedTensor` at the place of each tensor.

    Parameters
    ----------
    plain, index
        As :class:`Division` has them.
    open_file
        Gives the file of a name.

    Raises
    ------
    CheckpointError
        For an index that does not fit the state or the files.
    """
    files: dict[str, TensorFile] = {}
    try:
        for entry in index:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            blocks = []
            for file_name, name, starts, sizes in entry["blocks"]:
                if file_name not in files:
                    files[file_name] = open_file(file_name)
                file = files[file_name]
                if file.kind(name) != (dtype, tuple(sizes)) or not len(starts) == len(sizes) == len(shape):
                    raise ValueError(f"'{name}' in {file.path} is no block of {list(shape)} and {dtype}")
                blocks.append((file, name, Part(tuple(starts), tuple(sizes))))
            if sum(math.prod(part.sizes) for _, _, part in blocks) != math.prod(shape):
                raise ValueError(f"the blocks at {entry['path']} do not make up {list(shape)}")
            *way, last = entry["path"]
            holder = plain
            for key in way:
                holder = holder[key]
            if holder[last] is not None:
                raise ValueError(f"something else is at {entry['path']}")
            holder[last] = SavedTensor(dtype, shape, blocks)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CheckpointError("the index of the tensors does not fit the checkpoint", found=f"{error}"[:300]) from None
    return plain


def placed(saved: Any, like: Any = None) -> Any:
    """A saved state in memory, each tensor sharded as its counterpart in ``like``, or whole where there is none.

    Parameters
    ----------
    saved
        Nested dicts and lists of tensors, :class:`SavedTensor` and plain data.
    like
        A state of the same structure, as far as it has one.
    """
    if isinstance(saved, Mapping):
        other = like if isinstance(like, Mapping) else {}
        return {key: placed(value, other.get(key)) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        others = like if isinstance(like, (list, tuple)) and len(like) == len(saved) else [None] * len(saved)
        return type(saved)(placed(value, other) for value, other in zip(saved, others, strict=True))
    if not isinstance(saved, (Tensor, SavedTensor)):
        return saved
    if is_sharded_tensor(like) and tuple(like.shape) == tuple(saved.shape):
        return sharded_like(like, block(saved, part_here(like)))
    return saved.read() if isinstance(saved, SavedTensor) else saved.clone()  # it may be mapped from a file that will be deleted


def block(saved: Tensor | SavedTensor, part: Part) -> Tensor:
    """A block of a saved tensor, in new memory."""
    if isinstance(saved, SavedTensor):
        return saved.read(part)
    return saved[tuple(slice(start, start + size) for start, size in zip(*part, strict=True))].clone()


def tensors_of(state: Any, path: Way = ()) -> list[tuple[Way, Tensor]]:
    """Each tensor of a state with its path."""
    found: list[tuple[Way, Tensor]] = []
    _collect(state, path, found)
    return found


def _collect(state: Any, path: Way, found: list[tuple[Way, Tensor]]) -> None:
    # Training waits for this: no call for what holds nothing, and no look at the many words of a generator one by one.
    if isinstance(state, Tensor):
        found.append((path, state))
    elif isinstance(state, dict) or isinstance(state, Mapping):  # noqa: SIM101 - the first is quicker to find out
        for key, value in state.items():
            if isinstance(value, HOLDERS):
                _collect(value, (*path, key), found)
    elif isinstance(state, (list, tuple)) and not PLAIN.issuperset(map(type, state)):
        for i, value in enumerate(state):
            if isinstance(value, HOLDERS):
                _collect(value, (*path, i), found)


def on_device(state: Any, device: torch.device) -> Any:
    """A state with its tensors on ``device``."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, Mapping):
        return {key: on_device(value, device) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_device(value, device) for value in state)
    return state


def without_tensors(state: Any) -> Any:
    """The state with ``None`` in place of each tensor; a tuple that holds one becomes a list."""
    if isinstance(state, Tensor):
        return None
    if isinstance(state, Mapping):
        return {key: without_tensors(value) for key, value in state.items()}
    if isinstance(state, list):
        return [without_tensors(value) for value in state]
    if isinstance(state, tuple):
        return [without_tensors(value) for value in state] if any(tensors_of(state)) else state
    return state


@lru_cache(1 << 16)
def name_of(path: Way) -> str:
    """The name of a tensor in the files: its path in the state."""
    return json.dumps(path)


def _code(tensor: Tensor) -> str:
    code = CODES.get(tensor.dtype)
    if code is None:
        raise CheckpointError(
            "a tensor of the state has a dtype that no file can hold", found=tensor.dtype, needed=", ".join(DTYPES)
        )
    return code
