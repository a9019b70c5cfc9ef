"""One writer at a time: the lock that a writer of a store holds from its first look to its last byte."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Protocol

from nvalchemi.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


def _owner() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": started, "token": uuid.uuid4().hex}


def _refused(store: str, raw: bytes, where: str, *, can_be_stale: bool) -> DataError:
    try:
        owner = json.loads(raw)
        holder = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        holder = "another process"
    fix = "wait until it is done, or write to another store and merge"
    if can_be_stale:
        fix += f"; if that process no longer runs, delete {where}"
    return DataError(f"{store} is being written by another writer", found=holder, needed="one writer at a time", fix=fix)


class Lock(ABC):
    """A lock as a context manager; entering raises DataError when somebody else holds it, and never waits."""

    @abstractmethod
    def acquire(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PathLock(Lock):
    """A lock file that the kernel holds for us (``flock``), so that the death of a writer, however sudden, frees it.

    The file's text (process, host, time) is for the message only. Where a file system knows no ``flock``, the file's
    existence is the lock; a writer that was killed there leaves a file that its user must delete, as the message says.

    Parameters
    ----------
    path
        The lock file.
    store
        The store's name, for messages.
    """

    def __init__(self, path: Path, store: str) -> None:
        self._path, self._store = path, store
        self._fd: int | None = None

    def acquire(self) -> None:
        try:
            self._acquire()
        except OSError as error:
            raise DataError(
                f"{self._store} cannot be locked for writing",
                found=f"{type(error).__name__}: {error}",
                needed=f"leave to write {self._path}",
            ) from error

    def _acquire(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._flock(fd)
                # The last holder may have deleted the file between our open and our lock: then we hold a ghost.
                if os.fstat(fd).st_nlink == 0:
                    os.close(fd)
                    continue
            except BaseException:
                os.close(fd)
                raise
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(_owner()).encode(), 0)
            self._fd = fd
            return

    def _flock(self, fd: int) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                raise _refused(self._store, os.pread(fd, 4096, 0), str(self._path), can_be_stale=False) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        mark = self._path.with_name(self._path.name + ".held")
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            with open(self._path, "rb") as file:
                raise _refused(self._store, file.read(), str(mark), can_be_stale=True) from None

    def release(self) -> None:
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        self._path.unlink(missing_ok=True)  # while we still hold it, see acquire
        self._path.with_name(self._path.name + ".held").unlink(missing_ok=True)
        os.close(fd)


class _Keys(Protocol):
    name: str

    def create(self, key: str, data: bytes) -> bool: ...
    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> None: ...


class KeyLock(Lock):
    """A key in the store itself, for stores that are no folders; as strong as the store's "set if not there"."""

    def __init__(self, files: _Keys, key: str) -> None:
        self._files, self._key = files, key
        self._held = False

    def acquire(self) -> None:
        if not self._files.create(self._key, json.dumps(_owner()).encode()):
            raise _refused(self._files.name, self._files.get(self._key) or b"", f"the key {self._key!r} in it", can_be_stale=True)
        self._held = True

    def release(self) -> None:
        if self._held:
            self._files.delete(self._key)
            self._held = False
