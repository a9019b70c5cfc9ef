"""Files here and elsewhere: paths of this machine, and addresses such as ``s3://bucket/runs`` that fsspec knows.

Every kind of address has a package of its own, which fsspec imports when the first file of that kind is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nvalchemi.errors import CheckpointError, ConfigError, NvalchemiError

_HERE = ("file://", "local://")


class Unreachable(CheckpointError):
    """Something elsewhere that could not be asked: nobody knows whether it is there."""


class Address(str):
    """Of a file or folder that is not on this machine, such as ``s3://bucket/runs/demo``; like a path, it has names joined by ``/``."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self}{name}" if self.endswith("://") else f"{self.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """What comes after the last slash."""
        return self.rstrip("/").rpartition("/")[2]


Where = Path | Address


def where(place: str | PathLike[str]) -> Where:
    """A path of this machine, or the address of something elsewhere. ``file:///folder`` is a path.

    Raises
    ------
    ConfigError
        For a path that was made from an address, which is one no more.
    """
    if isinstance(place, Address):
        return place
    text = os.fspath(place)
    if text.startswith(_HERE):
        return Path(text.partition("://")[2])
    if "://" in text:
        return Address(text)
    if isinstance(place, PathLike) and re.match(r"[a-z][a-z0-9]+:/", text):
        raise ConfigError("a path was made from an address", found=repr(place), fix="give the address as a string")
    return Path(place)


def connect(address: Address) -> tuple[Any, str]:
    """The file system of an address, and the path in it. Cheap: fsspec keeps one connection a thread.

    Raises
    ------
    ConfigError
        For an address of an unknown kind, or of one whose package is not installed.
    """
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    kind = address.partition("://")[0].rpartition("::")[2]
    try:
        return url_to_fs(str(address))
    except ImportError as error:
        package = known_implementations.get(kind, {}).get("class", kind).partition(".")[0]
        raise ConfigError(
            f"{address} needs a package that is not installed", found=str(error), needed=package, fix=f"pip install {package}"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{address} is an address of an unknown kind",
            found=str(error),
            needed="a path, or an address such as s3://bucket/runs",
        ) from None


@contextmanager
def reached(address: Address) -> Iterator[None]:
    """Raise `Unreachable` for the errors of any kind of address. That something is not there passes through."""
    try:
        yield
    except (NvalchemiError, FileNotFoundError):
        raise
    except Exception as error:
        raise Unreachable(
            f"{address} cannot be reached",
            found=f"{type(error).__name__}: {error}".partition("\n")[0][:300],
            fix="look at the address, the credentials and the network; nothing is lost",
        ) from error


def file_size(place: Where) -> int | None:
    """Bytes of a file, or ``None`` where there is none."""
    if not isinstance(place, Address):
        return place.stat().st_size if place.is_file() else None
    try:
        with reached(place):
            fs, path = connect(place)
            fs.invalidate_cache()  # others write there
            facts = fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(facts["size"]) if facts["type"] == "file" else None


class Bytes:
    """The bytes of a file, of which parts are read.

    Parameters
    ----------
    place
        Of the file.

    Raises
    ------
    OSError
        Where it cannot be opened.
    """

    def __init__(self, place: Where) -> None:
        self.place = place
        size = file_size(place)
        if size is None:
            raise FileNotFoundError(f"there is no file {place}")
        self.size = size

    def read(self, start: int, stop: int) -> np.ndarray:
        """The bytes from ``start`` to before ``stop``, which may be written to; those of a file here are mapped, not read."""
        if isinstance(self.place, Address):
            with reached(self.place):
                fs, path = connect(self.place)
                return np.frombuffer(bytearray(fs.cat_file(path, start=start, end=stop)), np.uint8)
        return np.memmap(self.place, np.uint8, "c", start, (stop - start,))


class Scratch:
    """A folder on this machine for as long as this object is there."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="nvalchemi-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove it now."""
        self._gone()


def upload(source: Path, address: Address, callback: Any = None) -> None:
    """Send a file of this machine to an address, where it appears whole or not at all if it is an object store's."""
    with reached(address):
        fs, path = connect(address)
        more = {} if callback is None else {"callback": callback}
        try:
            fs.put_file(str(source), path, **more)
        except FileNotFoundError:
            make_folder(fs, path.rpartition("/")[0])
            fs.put_file(str(source), path, **more)


def make_folder(fs: Any, path: str) -> None:
    """Make a folder where a file system has any. In an object store there are none, and no bucket is made for a misspelt name."""
    top = re.match(r"/*[^/]*", path)
    if top is None or not fs.exists(top.group()):
        raise FileNotFoundError(f"there is no {path.strip('/').partition('/')[0]}")
    fs.makedirs(path, exist_ok=True)


@contextmanager
def whole_file(target: Where) -> Iterator[Path]:
    """A path of this machine to write a file to, which becomes ``target`` when it is whole; after an error nothing is there."""
    if isinstance(target, Address):
        scratch = Scratch()
        try:
            yield scratch.path / "file"
            upload(scratch.path / "file", target)
        finally:
            scratch.close()
        return
    part = target.with_name(target.name + ".part")
    try:
        yield part
        sync(part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Bring a file or a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
