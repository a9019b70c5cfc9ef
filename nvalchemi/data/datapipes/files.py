"""Where a store's bytes lie: a folder, or any store that zarr knows. Both give the same few verbs to the rest."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from nvalchemi.data.address import sync
from nvalchemi.data.datapipes.lock import KeyLock, Lock, PathLock
from nvalchemi.errors import ConfigError, DataError


class Blob(ABC):
    """One file, open for reading. Reading raises FileNotFoundError where there is none, OSError where it fails.

    Of a local file every read sees the same bytes, also when the file is replaced meanwhile.
    """

    version: Hashable = None
    """Changes when the file is replaced; None where that is not known."""

    @abstractmethod
    def tail(self, count: int) -> bytes:
        """The last ``count`` bytes, or fewer where the file is shorter."""

    @abstractmethod
    def read(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """The bytes of each range ``(start, stop)``, shorter at the end of the file."""


class Files(ABC):
    """The files of one store, by key (a path with slashes, from the root of the store)."""

    name: str

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """A whole file, None where there is none."""

    @abstractmethod
    def open(self, key: str) -> contextlib.AbstractContextManager[Blob]:
        """A file to read parts of."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a whole file, by `flush` at the latest; a kill at any instant leaves the old or the new one."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Take a file or everything below a folder away, if it is there."""

    @abstractmethod
    def children(self, key: str) -> list[str]:
        """Names of the files and folders right below a folder, in order; none where it does not exist."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all that was put is in place and on disk, names of files included."""

    @abstractmethod
    def discard(self) -> None:
        """Forget what was put and is not yet in place, as far as that is possible."""

    @abstractmethod
    def lock(self) -> Lock:
        """The lock that a writer holds."""


def open_files(store: Any) -> Files:
    """The files of a store given as a path (of a folder) or as a zarr store object.

    Raises
    ------
    ConfigError
        Neither of the two.
    """
    if isinstance(store, Files):
        return store
    if isinstance(store, (str, os.PathLike)):
        return LocalFiles(os.fspath(store))
    from zarr.abc.store import Store  # zarr takes a third of a second to import, and a folder does not need it

    if isinstance(store, Store):
        from zarr.storage import LocalStore

        return LocalFiles(str(store.root)) if isinstance(store, LocalStore) else ZarrFiles(store)
    raise ConfigError("no store", found=type(store).__name__, needed="the path of a folder, or a zarr store object")


class _LocalBlob(Blob):
    def __init__(self, fd: int) -> None:
        self._fd = fd
        status = os.fstat(fd)
        self._size = status.st_size
        self.version = (status.st_ino, status.st_size, status.st_mtime_ns)

    def tail(self, count: int) -> bytes:
        return self._pread(max(0, self._size - count), self._size)

    def read(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        return [self._pread(start, stop) for start, stop in ranges]

    def _pread(self, start: int, stop: int) -> bytes:
        data = os.pread(self._fd, stop - start, start)
        while len(data) < stop - start and (more := os.pread(self._fd, stop - start - len(data), start + len(data))):
            data += more
        return data


class LocalFiles(Files):
    """A store in a folder."""

    def __init__(self, path: str) -> None:
        if "://" in path:
            raise ConfigError(
                "an address is no folder",
                found=path,
                fix="give a zarr store object, such as zarr.storage.FsspecStore.from_url(address)",
            )
        self.name = path
        self._root = Path(os.path.realpath(path))  # one store, one lock, by whatever name
        self._waiting: list[tuple[Path, Path]] = []
        self._rooted = False

    def get(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Blob]:
        fd = os.open(f"{self._root}/{key}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _LocalBlob(fd)
        finally:
            os.close(fd)

    def put(self, key: str, data: bytes) -> None:
        temporary = self._root / f".{uuid.uuid4().hex}.partial"  # all in one place, where the next writer clears them away
        self._waiting.append((temporary, self._root / key))
        with self._writing():
            self._root.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)

    def delete(self, key: str) -> None:
        path = self._root / key
        with self._writing():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def children(self, key: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / key))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.name} cannot be written",
                found=f"{type(error).__name__}: {error}",
                fix="mend that and write again; what was committed before is untouched",
            ) from error

    def flush(self) -> None:
        with self._writing():
            self._flush()

    def _flush(self) -> None:
        # Contents before names: else a power cut could leave a name on an empty file, and the old file gone. All contents
        # first: the file system then writes its journal once, not once a file.
        for temporary, _ in self._waiting:
            sync(temporary)
        folders: set[Path] = set()
        for temporary, path in self._waiting:
            folders.update(_make_folder(path.parent))
            temporary.replace(path)
        if not self._rooted:
            folders.add(self._root.parent)
        self._rooted = True
        self._waiting.clear()
        for folder in folders:
            with contextlib.suppress(OSError):  # a file system on which folders cannot be synced
                sync(folder)

    def discard(self) -> None:
        for temporary, _ in self._waiting:
            temporary.unlink(missing_ok=True)
        self._waiting.clear()

    def lock(self) -> Lock:
        # Beside the store: within it, zarr would warn of a file that it does not know.
        return PathLock(self._root.with_name(self._root.name + ".lock"), self.name)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder; it and those that were changed by making it."""
    changed = [folder]
    for parent in folder.parents:
        if changed[-1].exists():
            break
        changed.append(parent)
    folder.mkdir(parents=True, exist_ok=True)
    return changed


class _ZarrBlob(Blob):
    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def tail(self, count: int) -> bytes:
        from zarr.abc.store import SuffixByteRequest

        return self._fetch([SuffixByteRequest(count)])[0]

    def read(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        from zarr.abc.store import RangeByteRequest

        return self._fetch([RangeByteRequest(start, stop) for start, stop in ranges])

    def _fetch(self, requests: list[Any]) -> list[bytes]:
        found = [data for data in _fetch(self._store, self._key, requests) if data is not None]
        if len(found) < len(requests):
            raise FileNotFoundError(self._key)
        return found


def _fetch(store: Any, key: str, requests: list[Any]) -> list[bytes | None]:
    """Read parts of one file at once: a remote store answers many requests in the time of one."""
    import asyncio

    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    async def gather() -> list[Any]:
        prototype = default_buffer_prototype()
        return await asyncio.gather(*(store.get(key, prototype, byte_range=request) for request in requests))

    return [None if buffer is None else buffer.to_bytes() for buffer in sync(gather())]


class ZarrFiles(Files):
    """A store that zarr reads for us: in memory, in a zip archive, in the cloud.

    One file at a time is written and replaced as the zarr store itself does it, which for object stores is atomic.
    """

    def __init__(self, store: Any) -> None:
        from zarr.core.sync import sync

        self.name = str(store)
        self._store = store
        sync(store._ensure_open())  # a zip archive, for one, answers nothing before

    def get(self, key: str) -> bytes | None:
        return _fetch(self._store, key, [None])[0]

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Blob]:
        yield _ZarrBlob(self._store, key)

    def put(self, key: str, data: bytes) -> None:
        from zarr.core.buffer import cpu
        from zarr.core.sync import sync

        sync(self._store.set(key, cpu.Buffer.from_bytes(data)))

    def delete(self, key: str) -> None:
        from zarr.core.sync import sync

        sync(self._store.delete(key))
        sync(self._store.delete_dir(key))

    def children(self, key: str) -> list[str]:
        from zarr.core.sync import sync

        async def names() -> list[str]:
            return [name async for name in self._store.list_dir(key)]

        return sorted(set(sync(names())))

    def flush(self) -> None:
        """Nothing to do: a zarr store has written when it returns."""

    def discard(self) -> None:
        """Nothing to do: what lies past the commit is never read, and overwritten by the next writer."""

    def lock(self) -> Lock:
        return KeyLock(self, "writer.lock")

    def create(self, key: str, data: bytes) -> bool:
        """Write a file unless there is one; whether it was written."""
        from zarr.core.buffer import cpu
        from zarr.core.sync import sync

        sync(self._store.set_if_not_exists(key, cpu.Buffer.from_bytes(data)))
        return self.get(key) == data
