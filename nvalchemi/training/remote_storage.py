"""Checkpoints at an address that fsspec knows, such as a bucket of an object store."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvalchemi.data.address import Address, Scratch, connect, make_folder, reached, upload
from nvalchemi.errors import CheckpointError
from nvalchemi.training.storage import MANIFEST, Storage, Writer

logger = logging.getLogger("nvalchemi")

_CHUNK = 1 << 24  # bytes read at once

_open: set[Address] = set()  # what this process is writing


class Remote(Storage):
    """A folder elsewhere. Its checkpoints have their names from the beginning, and are some when the manifest is there.

    A file is first written to a folder of this machine for what is temporary, then sent; its checksum is that of what was written here.
    """

    poll = 1.0

    def __init__(self, place: Address) -> None:
        self.place: Address = place
        self._scratch: Scratch | None = None
        self._sent: dict[str, int] = {}

    def names(self) -> list[str]:
        """See the base class."""
        try:
            with reached(self.place):
                fs, root = self._fresh()
                found = fs.ls(root, detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != root.strip("/")})

    def folders(self) -> list[str]:
        """See the base class; without those that this process is still writing."""
        return [name for name in super().folders() if self.place / name not in _open]

    def appeared(self) -> list[str]:
        """See the base class; without what a broken save left."""
        return [folder for folder in self.folders() if self.size(f"{folder}/{MANIFEST}") is not None]

    def read(self, name: str) -> bytes | None:
        """See the base class."""
        try:
            with reached(self.place / name):
                fs, path = connect(self.place / name)
                return bytes(fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sha256(self, name: str) -> str:
        """See the base class. A file of tensors is read by parts later; any other is fetched, because it is read whole."""
        if not name.endswith(".safetensors"):
            return _digest(self.path(name))
        digest = hashlib.sha256()
        with reached(self.place / name):
            fs, path = connect(self.place / name)
            with fs.open(path, "rb", block_size=_CHUNK, cache_type="readahead") as file:
                while data := file.read(_CHUNK):
                    digest.update(data)
        return digest.hexdigest()

    def path(self, name: str) -> Path:
        """See the base class: fetched once."""
        self._scratch = self._scratch or Scratch()
        here = self._scratch.path / name
        if not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            with reached(self.place / name):
                fs, path = connect(self.place / name)
                fs.get_file(path, str(here))
        return here

    def seems_whole(self, files: Mapping[str, Any]) -> bool:
        """See the base class: by their sizes."""
        return all(self.size(name) == entry["bytes"] for name, entry in files.items())

    def begin(self, step: int) -> str:
        """See the base class."""
        for folder in sorted(set(self.folders()) - set(self.appeared())):
            logger.warning("removed %s, left by a save that did not finish", self.place / folder)
            self.discard(folder)
        draft = self.free_name(step)
        _open.add(self.place / draft)
        return draft

    def sees(self, draft: str) -> bool:
        """See the base class: there is no folder before there is a file in it."""
        return True

    def write(self, name: str, writer: Writer) -> dict[str, Any]:
        """See the base class."""
        from fsspec.callbacks import Callback

        scratch = Scratch()
        try:
            here = scratch.path / "file"
            entry = writer(here)
            if not isinstance(entry, dict):
                entry = {"bytes": here.stat().st_size, "sha256": _digest(here)}
            count = Callback(hooks={"sent": lambda size, value, **_: self._sent.update({name: value})})
            upload(here, self.place / name, count)
            return entry
        finally:
            scratch.close()

    def written(self, name: str) -> int:
        """See the base class."""
        return self._sent.get(name, 0)

    def put(self, name: str, data: bytes) -> None:
        """See the base class."""
        with reached(self.place / name):
            fs, path = connect(self.place / name)
            try:
                fs.pipe_file(path, data)
            except FileNotFoundError:
                make_folder(fs, path.rpartition("/")[0])
                fs.pipe_file(path, data)

    def delete(self, name: str) -> None:
        """See the base class."""
        with reached(self.place / name):
            fs, path = connect(self.place / name)
            fs.rm_file(path)

    def appear(self, draft: str, step: int, manifest: bytes, files: Mapping[str, Any]) -> str:
        """See the base class: the manifest is the last object that is written."""
        absent = [name for name, entry in files.items() if self.size(f"{draft}/{name}") != entry["bytes"]]
        if absent:
            raise CheckpointError(
                f"{self.place / draft} has not what the ranks have written",
                found=f"{', '.join(absent)} not there",
                needed="a place that all ranks see",
            )
        self.put(f"{draft}/{MANIFEST}", manifest)
        _open.discard(self.place / draft)
        return draft

    def discard(self, draft: str) -> None:
        """See the base class; what has its manifest is a checkpoint, whatever failed after that."""
        try:
            if self.size(f"{draft}/{MANIFEST}") is None:
                self._remove_all(draft)
        except CheckpointError as error:  # the next save tries again; without a manifest it is no checkpoint
            logger.warning("%s", error)
        _open.discard(self.place / draft)

    def remove(self, folder: str) -> None:
        """See the base class."""
        self.delete(f"{folder}/{MANIFEST}")
        self._remove_all(folder)

    def _remove_all(self, folder: str) -> None:
        try:
            with reached(self.place / folder):
                fs, root = self._fresh()
                fs.rm(f"{root.rstrip('/')}/{folder}", recursive=True)
        except FileNotFoundError:
            pass

    def _fresh(self) -> tuple[Any, str]:
        fs, root = connect(self.place)
        fs.invalidate_cache()  # other ranks write there
        return fs, root


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
