"""The folder of checkpoints: names, the manifest, the latest, the best, retention.

``DIR/step-00001000/`` holds ``shared.pt`` (what all ranks agree on), ``rank-00000.pt`` (what is one rank's own) and
``manifest.json``, written last: format version, progress, metrics, and size and SHA-256 of every file. With several ranks the tensors
of the shared state are in ``shared-00000.safetensors``, one file a rank, and ``index.json`` says where each of them is. A checkpoint that
is seen is whole (:mod:`nvalchemi.training.storage`), unless it was damaged later.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from nvalchemi.data.address import Unreachable, Where
from nvalchemi.data.tensor_file import TensorFile
from nvalchemi.errors import CheckpointError
from nvalchemi.training.storage import MANIFEST, Storage, storage

FORMAT = "nvalchemi-checkpoint"
VERSION = 3
SHARED = "shared.pt"
INDEX = "index.json"

logger = logging.getLogger("nvalchemi")

Directory = str | PathLike[str]


def rank_file(rank: int) -> str:
    """Name of the file of one rank's own state."""
    return f"rank-{rank:05d}.pt"


def shard_file(rank: int) -> str:
    """Name of the file of the shared state's tensors that one rank writes."""
    return f"shared-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A whole checkpoint: what reads in its folder, its manifest, and which of its files were already found to be as written."""

    store: Storage
    manifest: Mapping[str, Any]
    checked: set[str] = field(default_factory=set, compare=False)

    @property
    def path(self) -> Where:
        """Its folder."""
        return self.store.place

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(entry["bytes"] for entry in self.manifest["files"].values())

    @property
    def serial(self) -> int:
        """Its place in the order of saving within its folder."""
        return int(self.manifest["serial"])

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.manifest["progress"]["step"])

    def metric(self, name: str) -> float | None:
        """A metric of the last validation before the save, or ``None``."""
        value = (self.manifest.get("metrics") or {}).get(name)
        return None if value is None else float(value)

    def verified(self, name: str) -> Where:
        """The path of one of its files, whose size and checksum are as written.

        Raises
        ------
        CheckpointError
            Naming a file that is missing or damaged.
        """
        path = self.path / name
        entry = self.manifest["files"].get(name)
        size = self.store.size(name) if entry is not None and Path(name).name == name else None
        if size is None:
            raise CheckpointError(f"{path} is missing", fix="use another checkpoint of the folder")
        if name in self.checked:
            return path
        if size != entry["bytes"] or self.store.sha256(name) != entry["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its size or checksum is not as written",
                found=f"{size} bytes",
                needed=f"{entry['bytes']} bytes with SHA-256 {entry['sha256'][:12]}...",
                fix="use another checkpoint of the folder",
            )
        self.checked.add(name)
        return path

    def local(self, name: str) -> Path:
        """A path of this machine with the content of one of its files, which is as written; valid as long as this object is there."""
        self.verified(name)
        return self.store.path(name)

    def tensors(self, name: str) -> TensorFile:
        """One of its files of tensors, which is as written."""
        self.verified(name)
        return self.store.tensors(name)

    def verify(self) -> None:
        """Check every file."""
        for name in self.manifest["files"]:
            self.verified(name)


def read(place: Directory) -> SavedCheckpoint:
    """The checkpoint in a folder; raises :class:`CheckpointError` where there is none of a known format."""
    store = storage(place)
    path = store.place
    try:
        data = store.read(MANIFEST)
        manifest = None if data is None else json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read", found=str(error)) from None
    if data is None:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {MANIFEST} in it")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is no manifest of this package", needed=f'"format": "{FORMAT}"')
    if not isinstance(manifest.get("version"), int) or manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has a newer format",
            found=f"version {manifest.get('version')}",
            needed=f"at most {VERSION}",
            fix="update nvalchemi",
        )
    absent = [key for key in ("serial", "progress", "files") if key not in manifest]
    if absent:
        raise CheckpointError(f"{path / MANIFEST} is incomplete", needed=", ".join(absent))
    damaged = _damaged(manifest)
    if damaged:
        raise CheckpointError(f"{path / MANIFEST} is damaged", found=f"{', '.join(damaged)} of another kind than was written")
    return SavedCheckpoint(store, manifest)


def _damaged(manifest: Mapping[str, Any]) -> list[str]:
    """What of a manifest is not of the kind that was written: whoever reads one relies on that."""
    progress, metrics, files = manifest["progress"], manifest.get("metrics"), manifest["files"]
    whole = {
        "version": manifest["version"] >= 1,
        "serial": type(manifest["serial"]) is int,
        "progress": isinstance(progress, dict) and "step" in progress and all(type(count) is int for count in progress.values()),
        "metrics": isinstance(metrics, dict | None) and all(isinstance(v, int | float | None) for v in (metrics or {}).values()),
        "world_size": type(manifest.get("world_size", 1)) is int and manifest.get("world_size", 1) >= 1,
        "size and SHA-256 of every file": isinstance(files, dict) and all(map(_is_entry, files.values())),
    }
    return [name for name, good in whole.items() if not good]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)


def list_checkpoints(directory: Directory, *, quiet: bool = False) -> list[SavedCheckpoint]:
    """The readable checkpoints in ``directory``, in the order in which they were saved; others are named in the log, if not ``quiet``."""
    store, found = storage(directory), []
    for folder in store.folders():
        try:
            found.append(read(store.place / folder))
        except Unreachable:  # it may be the latest: a run must not start afresh over it
            raise
        except CheckpointError as error:
            logger.log(logging.DEBUG if quiet else logging.WARNING, "ignored: %s", error)
    return sorted(found, key=lambda c: c.serial)


def latest(directory: Directory) -> SavedCheckpoint | None:
    """The newest checkpoint whose files are all whole; a damaged newer one is named in the log and passed over."""
    for saved in reversed(list_checkpoints(directory)):
        try:
            saved.verify()
        except Unreachable:
            raise
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
        else:
            return saved
    return None


def best(directory: Directory, metric: str, mode: str = "min") -> SavedCheckpoint | None:
    """The checkpoint with the best ``metric``, or ``None`` where none has it."""
    ranked = _ranked(list_checkpoints(directory), metric, mode)
    return ranked[0] if ranked else None


def prune(
    directory: Directory,
    keep_last: int | None,
    keep_best: int | None = None,
    metric: str = "loss",
    mode: str = "min",
    saved: Sequence[SavedCheckpoint] | None = None,
) -> None:
    """Delete all but the last ``keep_last`` and the best ``keep_best`` checkpoints; the latest whole one always stays.

    ``keep_last=None`` keeps all; ``saved`` is what `list_checkpoints` gave, where the caller has it.
    """
    if keep_last is None:
        return
    if saved is None:
        saved = list_checkpoints(directory, quiet=True)  # the save before has named the others
    kept = {c.path for c in saved[-max(keep_last, 1) :]}
    newest = next((c for c in reversed(saved) if c.store.seems_whole(c.manifest["files"])), None)
    if newest is not None:
        kept.add(newest.path)
    if keep_best:
        kept.update(c.path for c in _ranked(saved, metric, mode)[:keep_best])
    store = storage(directory)
    for checkpoint in saved:
        if checkpoint.path not in kept:
            store.remove(checkpoint.path.name)


def _ranked(saved: Sequence[SavedCheckpoint], metric: str, mode: str) -> list[SavedCheckpoint]:
    # Several states may be saved after one validation: the first of them is the one that earned it.
    scored = []
    metrics: Any = None
    for checkpoint in saved:
        if checkpoint.manifest.get("metrics") != metrics:
            metrics = checkpoint.manifest.get("metrics")
            scored.append((checkpoint.metric(metric), checkpoint))
    finite = [(value, c) for value, c in scored if value is not None and value == value]
    sign = -1.0 if mode == "max" else 1.0
    return [c for _, c in sorted(finite, key=lambda pair: (sign * pair[0], pair[1].serial))]
