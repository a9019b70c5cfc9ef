"""The folder of checkpoints: names, the manifest, atomic appearance, the latest, retention.

``DIR/step-00001000/`` holds ``shared.pt`` (what all ranks agree on), ``rank-00000.pt`` (what is one rank's own) and
``manifest.json``, written last: format version, progress, metrics, and size and SHA-256 of every file. With several ranks the tensors
of the shared state are in ``shared-00000.safetensors``, one file a rank, and ``index.json`` says where each of them is. A checkpoint is
written in a hidden folder and becomes visible by one rename after everything is on disk, so a visible one is whole unless
it was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from nvalchemi.errors import CheckpointError, NvalchemiError

FORMAT = "nvalchemi-checkpoint"
VERSION = 3
MANIFEST = "manifest.json"
SHARED = "shared.pt"
INDEX = "index.json"

logger = logging.getLogger("nvalchemi")

_open: set[Path] = set()  # the hidden folders that this process is writing


def rank_file(rank: int) -> str:
    """Name of the file of one rank's own state."""
    return f"rank-{rank:05d}.pt"


def shard_file(rank: int) -> str:
    """Name of the file of the shared state's tensors that one rank writes."""
    return f"shared-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A whole checkpoint on disk: its folder and its manifest, and which of its files were already found to be as written."""

    path: Path
    manifest: Mapping[str, Any]
    checked: set[str] = field(default_factory=set, compare=False)

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

    def verified(self, name: str) -> Path:
        """The path of one of its files, whose size and checksum are as written.

        Raises
        ------
        CheckpointError
            Naming a file that is missing or damaged.
        """
        path = self.path / name
        entry = self.manifest["files"].get(name)
        if entry is None or Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing", fix="use another checkpoint of the folder")
        if name in self.checked:
            return path
        if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its size or checksum is not as written",
                found=f"{path.stat().st_size} bytes",
                needed=f"{entry['bytes']} bytes with SHA-256 {entry['sha256'][:12]}...",
                fix="use another checkpoint of the folder",
            )
        self.checked.add(name)
        return path

    def verify(self) -> None:
        """Check every file."""
        for name in self.manifest["files"]:
            self.verified(name)


def read(path: Path) -> SavedCheckpoint:
    """The checkpoint in folder ``path``; raises :class:`CheckpointError` where there is none of a known format."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read", found=str(error)) from None
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
    return SavedCheckpoint(path, manifest)


def list_checkpoints(directory: Path) -> list[SavedCheckpoint]:
    """The readable checkpoints in ``directory``, in the order in which they were saved; others are named in the log."""
    found = []
    if directory.is_dir():
        for path in sorted(directory.glob("step-*")):
            try:
                found.append(read(path))
            except CheckpointError as error:
                logger.warning("ignored: %s", error)
    return sorted(found, key=lambda c: c.serial)


def latest(directory: Path) -> SavedCheckpoint | None:
    """The newest checkpoint whose files are all whole; a damaged newer one is named in the log and passed over."""
    for saved in reversed(list_checkpoints(directory)):
        try:
            saved.verify()
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
        else:
            return saved
    return None


def best(directory: Path, metric: str, mode: str = "min") -> SavedCheckpoint | None:
    """The checkpoint with the best ``metric``, or ``None`` where none has it."""
    ranked = _ranked(list_checkpoints(directory), metric, mode)
    return ranked[0] if ranked else None


def begin(directory: Path) -> Path:
    """Make the hidden folder in which a checkpoint of ``directory`` is written, and clear away what a broken save left."""
    directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    temporary = next(path for n in count() if not (path := directory / f".writing-{n}-{os.getpid()}").exists())
    temporary.mkdir()
    _open.add(temporary)
    return temporary


def write_file(path: Path, write: Callable[[Path], Any]) -> dict[str, Any]:
    """Write one file of a checkpoint to the disk; returns its size and checksum: the dict that ``write`` gives, or as read again."""
    entry = write(path)
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)} if not isinstance(entry, dict) else entry


def finish(temporary: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> Path:
    """Let the checkpoint in the hidden folder appear, whole; returns its folder."""
    directory = temporary.parent
    saved = list_checkpoints(directory)
    serial = saved[-1].serial + 1 if saved else 0
    whole = {"format": FORMAT, "version": VERSION, "serial": serial, **manifest, "files": files}
    (temporary / MANIFEST).write_text(json.dumps(whole, indent=1))
    sync(temporary / MANIFEST)
    sync(temporary)
    path = _free_name(directory, int(manifest["progress"]["step"]))
    os.rename(temporary, path)
    _open.discard(temporary)
    sync(directory)
    return path


def discard(temporary: Path) -> None:
    """Remove the hidden folder of a save that failed."""
    shutil.rmtree(temporary, ignore_errors=True)
    _open.discard(temporary)


@contextmanager
def refusals_of_the_disk(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Say what was to be written, and what to do, where the disk refuses; collectives within it would be taken for the disk."""
    try:
        yield
    except NvalchemiError:
        raise
    except (OSError, RuntimeError) as error:  # torch tells of a full disk by a RuntimeError
        raise CheckpointError(
            f"the checkpoint could not be written to {directory}",
            found=str(error).partition("\n")[0] or type(error).__name__,
            fix="free space or fix the permission; nothing is lost",
        ) from error


def prune(directory: Path, keep_last: int | None, keep_best: int | None = None, metric: str = "loss", mode: str = "min") -> None:
    """Delete all but the last ``keep_last`` and the best ``keep_best`` checkpoints; the latest whole one always stays.

    ``keep_last=None`` keeps all.
    """
    if keep_last is None:
        return
    saved = list_checkpoints(directory)
    newest = latest(directory)
    kept = {c.path for c in saved[-max(keep_last, 1) :]}
    if newest is not None:
        kept.add(newest.path)
    if keep_best:
        kept.update(c.path for c in _ranked(saved, metric, mode)[:keep_best])
    for checkpoint in saved:
        if checkpoint.path not in kept:
            trash = directory / f".trash-{checkpoint.path.name}-{os.getpid()}"
            os.rename(checkpoint.path, trash)  # a half-deleted checkpoint must not look like one
            shutil.rmtree(trash, ignore_errors=True)


def _ranked(saved: list[SavedCheckpoint], metric: str, mode: str) -> list[SavedCheckpoint]:
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


def _free_name(directory: Path, step: int) -> Path:
    path = directory / f"step-{step:08d}"
    again = 2
    while path.exists():  # an epoch's end is another state after the same step
        path = directory / f"step-{step:08d}-{again}"
        again += 1
    return path


def _sweep(directory: Path) -> None:
    for path in directory.glob(".writing-*"):
        pid = path.name.rpartition("-")[2]
        mine = pid == str(os.getpid()) and path not in _open
        if mine or not (pid.isdigit() and _alive(int(pid))):
            logger.warning("removed %s, left by a save that did not finish", path)
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(".trash-*"):
        shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
