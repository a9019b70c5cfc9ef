"""A checkpoint on disk, found and read. Nothing in its files can run code: they are tensors, plain data and JSON."""

from __future__ import annotations

import json
import pickle
import zipfile
from os import PathLike
from typing import Any

import torch

from nvalchemi.data.address import Where, file_size
from nvalchemi.distributed import Manager
from nvalchemi.errors import CheckpointError
from nvalchemi.training import layout, shards
from nvalchemi.training.agreement import first_rank, together
from nvalchemi.training.storage import storage
from nvalchemi.training.upgrades import upgrade


def find(source: str | PathLike[str], directory: Where | None, manager: Manager) -> layout.SavedCheckpoint | None:
    """The checkpoint that ``source`` means, whole; ``None`` only for ``"latest"`` where nothing was saved yet.

    Rank 0 looks, because another rank's view of the folder may be older; the ranks share the work of reading every file once to see
    whether it is as written.

    Parameters
    ----------
    source
        ``"latest"`` for the newest whole one in ``directory``, or the path of a checkpoint or of a folder of them.

    Raises
    ------
    CheckpointError
        Where nothing whole is there.
    """

    def path() -> Where | None:
        saved = (None if directory is None else layout.latest(directory)) if source == "latest" else at_path(source)
        if saved is not None:
            looked_at.append(saved)
        return None if saved is None else saved.path

    looked_at: list[layout.SavedCheckpoint] = []
    found = first_rank(path, manager)
    if found is None:
        return None
    saved = looked_at[0] if looked_at else layout.read(found)
    if source != "latest":  # which was looked at while it was sought
        names = sorted(saved.manifest["files"])[manager.rank :: manager.world_size]
        together(lambda: [saved.verified(name) for name in names], manager)
    saved.checked.update(saved.manifest["files"])
    return saved


def at_path(place: str | PathLike[str]) -> layout.SavedCheckpoint:
    """The checkpoint in a folder, or the newest whole one of a folder of checkpoints."""
    store = storage(place)
    if store.size(layout.MANIFEST) is not None:
        return layout.read(store.place)
    saved = layout.latest(store.place)
    if saved is None:
        if not store.exists():
            raise CheckpointError(
                f"{store.place} does not exist", fix="give the path of a checkpoint, or of the folder that holds them"
            )
        raise CheckpointError(
            f"there is no whole checkpoint in {store.place}",
            found=", ".join(store.names()) or ("a file" if file_size(store.place) is not None else "an empty folder"),
            fix='give the folder of a CheckpointHook, or resume_from="latest" to start afresh where there is nothing yet',
        )
    return saved


def read_shared(saved: layout.SavedCheckpoint) -> dict[str, Any]:
    """What all ranks share, in the present format: plain data, and tensors or :class:`~nvalchemi.training.shards.SavedTensor`.

    :func:`nvalchemi.training.shards.placed` brings it, or a part of it, into memory.
    """
    # mapped: of a file that is larger than what this rank needs, the rest is not read
    shared = read_file(saved, layout.SHARED, mmap=True)
    if layout.INDEX in saved.manifest["files"]:
        path = saved.path / layout.INDEX
        try:
            index = json.loads(saved.local(layout.INDEX).read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read", found=str(error)[:200]) from None
        shared = shards.joined(shared, index, saved.tensors)
    upgrade(int(saved.manifest["version"]), shared=shared)
    return shared


def read_own(saved: layout.SavedCheckpoint, rank: int) -> dict[str, Any]:
    """What was a rank's own, in the present format."""
    own = read_file(saved, layout.rank_file(rank))
    upgrade(int(saved.manifest["version"]), own=own)
    return own


def world_size(saved: layout.SavedCheckpoint) -> int:
    """The number of ranks of the run that was saved."""
    return int(saved.manifest.get("world_size", 1))


def read_file(saved: layout.SavedCheckpoint, name: str, *, mmap: bool = False) -> dict[str, Any]:
    """One file of a checkpoint, read as tensors and plain data; anything else in it is refused."""
    path, here = saved.path / name, saved.local(name)
    if not zipfile.is_zipfile(here):  # torch would take it for a file of its oldest formats
        raise _unsafe(path, "no archive as torch writes it")
    try:
        state = torch.load(here, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise _unsafe(path, str(error)) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state", found=type(state).__name__)
    return state


def _unsafe(path: Where, why: str) -> CheckpointError:
    first = why.partition("\n")[0][:200]
    return CheckpointError(f"{path} is no file of tensors and plain data, and nothing else is loaded", found=first)
