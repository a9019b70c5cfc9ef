"""Where checkpoints lie, in a few verbs: a folder of this machine (:class:`Disk`), or an address of an object store.

A checkpoint is there for everybody as soon as it is there at all, and whole. A disk has a rename for that, after all is on it. An object
store has none, but writes one object whole or not at all: there the manifest is written last, and a folder without one is no checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from nvalchemi.data import address
from nvalchemi.data.address import Address, Where, file_size, sync
from nvalchemi.data.tensor_file import TensorFile

MANIFEST = "manifest.json"

logger = logging.getLogger("nvalchemi")

Writer = Callable[[Path], Any]
"""Writes a file of a checkpoint; gives a dict of its size and checksum where it knows them."""


class Storage(ABC):
    """A folder that holds checkpoints, or files of one. ``name`` is that of a file in it, such as ``"step-00000010/index.json"``.

    Attributes
    ----------
    place
        The folder.
    poll
        Seconds between looks for what another rank is writing.
    """

    place: Where
    poll: float

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the folder, sorted; empty where there is no folder."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """A small file, or ``None`` where there is none."""

    @abstractmethod
    def sha256(self, name: str) -> str:
        """The checksum of a file, of which nothing is kept."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """A path of this machine with the content of a file, valid as long as this object is there."""

    @abstractmethod
    def seems_whole(self, files: Mapping[str, Any]) -> bool:
        """Whether the files are as their sizes and checksums say, as far as that is known without fetching them."""

    @abstractmethod
    def begin(self, step: int) -> str:
        """Clear away what broken saves left; the name of a new folder, in which no checkpoint is seen before :meth:`appear`."""

    @abstractmethod
    def sees(self, draft: str) -> bool:
        """Whether the folder that another rank has begun is there for this one."""

    @abstractmethod
    def write(self, name: str, writer: Writer) -> dict[str, Any]:
        """Write a file and bring it to the disk; its size and checksum."""

    @abstractmethod
    def written(self, name: str) -> int:
        """Bytes that are there already of a file that is being written."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    def appear(self, draft: str, step: int, manifest: bytes, files: Mapping[str, Any]) -> str:
        """Let a checkpoint be there; the name of its folder."""

    @abstractmethod
    def discard(self, draft: str) -> None:
        """Remove what there is of a save that failed; never raises for what cannot be removed."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a checkpoint; a half-removed one does not look like one."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, or ``None`` where there is none."""
        return file_size(self.place / name)

    def exists(self) -> bool:
        """Whether there is such a folder; an object store has none that is empty."""
        return bool(self.names())

    def folders(self) -> list[str]:
        """Of what may be checkpoints, by their names."""
        return [name for name in self.names() if name.startswith("step-")]

    def appeared(self) -> list[str]:
        """Names of the folders of checkpoints that were once whole; each of them is somebody's, damaged or not."""
        return self.folders()

    def tensors(self, name: str) -> TensorFile:
        """A file of tensors, of which is read what is asked for."""
        return TensorFile(self.place / name)

    def free_name(self, step: int) -> str:
        """A name for the folder of a new checkpoint."""
        taken = set(self.names())
        name = f"step-{step:08d}"
        # an epoch's end is another state after the same step
        return name if name not in taken else next(new for n in count(2) if (new := f"{name}-{n}") not in taken)


def storage(place: str | PathLike[str]) -> Storage:
    """What reads and writes in a folder or at an address."""
    found = address.where(place)
    if isinstance(found, Address):
        from nvalchemi.training.remote_storage import Remote

        return Remote(found)
    return Disk(found)


_open: set[Path] = set()  # the hidden folders that this process is writing


class Disk(Storage):
    """A folder of this machine's file system. A checkpoint is written in a hidden folder, and one rename lets it appear."""

    poll = 0.02

    def __init__(self, place: Path) -> None:
        self.place: Path = place

    def names(self) -> list[str]:
        """See the base class."""
        return sorted(path.name for path in self.place.iterdir()) if self.place.is_dir() else []

    def exists(self) -> bool:
        """See the base class."""
        return self.place.exists()

    def read(self, name: str) -> bytes | None:
        """See the base class."""
        try:
            return (self.place / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sha256(self, name: str) -> str:
        """See the base class."""
        with (self.place / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def path(self, name: str) -> Path:
        """See the base class."""
        return self.place / name

    def seems_whole(self, files: Mapping[str, Any]) -> bool:
        """See the base class: here all is known."""
        return all(self.size(name) == entry["bytes"] and self.sha256(name) == entry["sha256"] for name, entry in files.items())

    def begin(self, step: int) -> str:
        """See the base class."""
        self.place.mkdir(parents=True, exist_ok=True)
        self._sweep()
        temporary = next(path for n in count() if not (path := self.place / f".writing-{n}-{os.getpid()}").exists())
        temporary.mkdir()
        _open.add(temporary)
        return temporary.name

    def sees(self, draft: str) -> bool:
        """See the base class."""
        return (self.place / draft).is_dir()

    def write(self, name: str, writer: Writer) -> dict[str, Any]:
        """See the base class."""
        path = self.place / name
        entry = writer(path)
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": self.sha256(name)} if not isinstance(entry, dict) else entry

    def written(self, name: str) -> int:
        """See the base class."""
        return self.size(name) or 0

    def put(self, name: str, data: bytes) -> None:
        """See the base class."""
        path = self.place / name
        part = path.with_suffix(".part")
        part.write_bytes(data)
        os.replace(part, path)

    def delete(self, name: str) -> None:
        """See the base class."""
        (self.place / name).unlink()

    def appear(self, draft: str, step: int, manifest: bytes, files: Mapping[str, Any]) -> str:
        """See the base class."""
        temporary, folder = self.place / draft, self.free_name(step)
        (temporary / MANIFEST).write_bytes(manifest)
        sync(temporary / MANIFEST)
        sync(temporary)
        os.rename(temporary, self.place / folder)
        _open.discard(temporary)
        sync(self.place)
        return folder

    def discard(self, draft: str) -> None:
        """See the base class."""
        shutil.rmtree(self.place / draft, ignore_errors=True)
        _open.discard(self.place / draft)

    def remove(self, folder: str) -> None:
        """See the base class."""
        trash = self.place / f".trash-{folder}-{os.getpid()}"
        os.rename(self.place / folder, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _sweep(self) -> None:
        for path in self.place.glob(".writing-*"):
            pid = path.name.rpartition("-")[2]
            mine = pid == str(os.getpid()) and path not in _open
            if mine or not (pid.isdigit() and _alive(int(pid))):
                logger.warning("removed %s, left by a save that did not finish", path)
                shutil.rmtree(path, ignore_errors=True)
        for path in self.place.glob(".trash-*"):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
