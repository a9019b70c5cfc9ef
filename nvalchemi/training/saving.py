"""A state on its way to the disk: what of it goes into which file, and all files into one checkpoint that appears when it is whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.data.address import Where
from nvalchemi.data.tensor_file import Entry, write_tensors
from nvalchemi.distributed import Manager
from nvalchemi.errors import CheckpointError
from nvalchemi.training import layout
from nvalchemi.training.agreement import first_rank, together
from nvalchemi.training.alive import alive
from nvalchemi.training.draft import Draft, refusals_of_the_disk
from nvalchemi.training.shards import PLAIN, divide, needs_division, tensors_of
from nvalchemi.training.storage import Writer

if TYPE_CHECKING:
    from nvalchemi.training.background import HostCopies
    from nvalchemi.training.plans import Plans


@dataclass(frozen=True, slots=True)
class NewFiles:
    """What this rank writes.

    Attributes
    ----------
    writers
        By the file's name.
    bytes
        Of the tensors in them.
    facts
        What the manifest says of all ranks' files.
    """

    writers: dict[str, Writer]
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)


def files_of(
    shared: dict[str, Any], own: dict[str, Any], manager: Manager, plans: Plans | None = None, copies: HostCopies | None = None
) -> NewFiles:
    """The files that this rank writes; all ranks must call.

    One process writes a state as it is. Otherwise its tensors go into a file a rank, each tensor or part of one once.

    Parameters
    ----------
    shared, own
        What all ranks share, and what is this rank's own.
    manager
        Who the ranks are.
    plans
        Remembers who wrote what in the save before.
    copies
        Makes copies, so that the files can be written while the state changes.

    Raises
    ------
    CheckpointError
        Where a state holds something that is no plain data.
    """
    together(lambda: check_states(shared, own), manager)
    if copies is not None:
        own = copies.take_all(own, "own")
    files: dict[str, Writer] = {layout.rank_file(manager.rank): partial(torch.save, own)}
    size = sum(tensor.nbytes for _, tensor in tensors_of(own))
    # From a thread a file of tensors is written better than one of torch's: most of the time without Python's lock.
    if copies is None and not needs_division(shared, manager):
        size += sum(tensor.nbytes for _, tensor in tensors_of(shared))
        return NewFiles(files | {layout.SHARED: partial(torch.save, shared)}, size)
    division = divide(shared, manager, layout.shard_file, plans)
    entries = division.entries
    if copies is not None:
        entries = [Entry(*entry[:3], partial(_same, copies.take(entry.name, entry.get()))) for entry in entries]
        copies.finish()
    if entries:
        files[layout.shard_file(manager.rank)] = partial(write_tensors, entries=entries)
    if manager.rank == 0:
        files[layout.SHARED] = partial(torch.save, division.plain)
        files[layout.INDEX] = partial(_write_json, division.index)
    size += sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
    return NewFiles(files, size, {"meshes": division.meshes})


def write(directory: Where, files: NewFiles, manifest: Mapping[str, Any], manager: Manager) -> Where:
    """Write each rank's files into one checkpoint, which appears when all are on the disk; every rank returns after that."""
    disk = refusals_of_the_disk(directory)
    step = int(manifest["progress"]["step"])
    draft = first_rank(disk(lambda: Draft.begin(directory, step)), manager).expect(files.bytes)

    @disk
    def write_own() -> dict[str, Any]:
        draft.check_seen(manager.rank)
        return {name: draft.write(name, writer) for name, writer in files.writers.items()}

    try:
        with alive(f"writing the checkpoint of step {step} to {directory}", draft.amount, here=manager.rank == 0):
            entries = {name: entry for of_rank in together(write_own, manager) for name, entry in of_rank.items()}
            return first_rank(disk(lambda: draft.finish({**manifest, **files.facts}, entries)), manager)
    except BaseException:
        draft.discard()
        raise


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _write_json(value: Callable[[], Any], path: Path) -> None:
    path.write_text(json.dumps(value(), separators=(",", ":")))


def check_states(*states: Mapping[str, Any]) -> None:
    """As `check_plain`, of several states."""
    for state in states:
        check_plain(state, "")


def check_plain(value: Any, where: str) -> None:
    """A state is tensors and plain data, or it could not be loaded without running code."""
    if type(value) in PLAIN or isinstance(value, Tensor):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise CheckpointError(f"the state {where or 'of the run'} has a key that is no string", found=repr(key))
            check_plain(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        if not PLAIN.issuperset(map(type, value)):
            for i, item in enumerate(value):
                check_plain(item, f"{where}[{i}]")
    else:
        raise CheckpointError(
            f"the state {where} is no plain data", found=type(value).__name__, needed="tensors, numbers, strings, lists and dicts"
        )
