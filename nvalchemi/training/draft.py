"""A checkpoint that is being written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

from nvalchemi.data.address import Where
from nvalchemi.errors import CheckpointError, NvalchemiError
from nvalchemi.training.alive import size_text
from nvalchemi.training.layout import FORMAT, VERSION, list_checkpoints
from nvalchemi.training.storage import Storage, Writer, storage


class Draft:
    """A checkpoint that is no checkpoint yet to anybody who looks. Rank 0 begins and finishes it, and all ranks write into it.

    Parameters
    ----------
    store
        The folder of the checkpoints.
    folder
        The name of its own in there.
    """

    def __init__(self, store: Storage, folder: str) -> None:
        self.store, self.folder = store, folder
        self._done, self._now, self._expected = 0, "", 0

    @classmethod
    def begin(cls, directory: str | PathLike[str], step: int) -> Draft:
        """A new one, of the state after so many steps; what broken saves left in the folder is cleared away."""
        store = storage(directory)
        return cls(store, store.begin(step))

    @property
    def place(self) -> Where:
        """Where it is being written."""
        return self.store.place / self.folder

    def expect(self, size: int) -> Draft:
        """So many bytes are going to be written by this rank; gives itself."""
        self._expected = size
        return self

    def check_seen(self, rank: int) -> None:
        """Raise where this rank does not see what rank 0 has begun."""
        if not self.store.sees(self.folder):
            raise CheckpointError(
                f"rank {rank} does not see the folder {self.place}, which rank 0 has made",
                needed="a folder for checkpoints that all ranks see",
            )

    def write(self, name: str, writer: Writer) -> dict[str, Any]:
        """Write one of its files; its size and checksum."""
        self._now = name
        entry = self.store.write(f"{self.folder}/{name}", writer)
        self._now, self._done = "", self._done + entry["bytes"]
        return entry

    def amount(self) -> str:
        """How much is written."""
        now = self._now
        if not now and self._done:
            return f"{size_text(self._done)} are written here, and the rest is waited for"
        done = self._done + (self.store.written(f"{self.folder}/{now}") if now else 0)
        return f"{size_text(done)} of about {size_text(max(self._expected, done))} are written"

    def put(self, name: str, value: Any) -> None:
        """Leave a note of plain data."""
        self.store.put(f"{self.folder}/{name}", json.dumps(value).encode())

    def has(self, name: str) -> bool:
        """Whether a file or note is there."""
        return self.store.size(f"{self.folder}/{name}") is not None

    def take(self, name: str) -> Any:
        """A note, which is removed."""
        data = self.store.read(f"{self.folder}/{name}")
        assert data is not None
        self.store.delete(f"{self.folder}/{name}")
        return json.loads(data)

    def finish(self, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> Where:
        """Let the checkpoint appear, whole.

        Parameters
        ----------
        manifest
            What it says of itself.
        files
            Size and checksum of the files of all ranks.

        Returns
        -------
        Path or Address
            Its folder.
        """
        saved = list_checkpoints(self.store.place)
        serial = saved[-1].serial + 1 if saved else 0
        whole = {"format": FORMAT, "version": VERSION, "serial": serial, **manifest, "files": files}
        text = json.dumps(whole, indent=1).encode()
        return self.store.place / self.store.appear(self.folder, int(manifest["progress"]["step"]), text, files)

    def discard(self) -> None:
        """Remove what there is of it, after a save that failed."""
        self.store.discard(self.folder)


@contextmanager
def refusals_of_the_disk(directory: str | PathLike[str]) -> Iterator[None]:
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
