"""One commit to a store, from the lock to the record: what the writers of structures and of dense arrays share."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Literal

import numpy as np

from nvalchemi.data.datapipes.chunk_cache import ChunkCache
from nvalchemi.data.datapipes.files import Files
from nvalchemi.data.datapipes.layout import GROUP, RECORD_KEY, ROOT, ArraySpec, Record, check_document
from nvalchemi.data.datapipes.shards import encode_shard, filler, make_codec
from nvalchemi.errors import DataError


class Appender:
    """Appends rows to one array, holding less than a shard of them in memory.

    Parameters
    ----------
    files
        The store's files.
    path
        The array's path in the store.
    spec
        What it holds.
    rows
        Committed rows; those of an unfilled last shard are read, to be written again with what follows them.
    """

    def __init__(self, files: Files, path: str, spec: ArraySpec, rows: int) -> None:
        self.spec, self.rows = spec, rows
        self.files, self._path = files, path
        self._codec = make_codec(spec.compressor)
        self._pending: list[np.ndarray] = []
        self._buffered = rows % spec.shard_rows
        self._shard = rows // spec.shard_rows
        if self._buffered:
            self._pending.append(ChunkCache(files, path, spec, rows).range(rows - self._buffered, rows))

    def add(self, rows: np.ndarray) -> None:
        """Append rows; whole shards are written at once."""
        self._pending.append(rows)
        self._buffered += len(rows)
        self.rows += len(rows)
        size = self.spec.shard_rows
        if self._buffered >= size:
            joined = np.concatenate(self._pending)
            whole = self._buffered // size * size
            for start in range(0, whole, size):
                self._write(joined[start : start + size])
                self._shard += 1
            self._pending = [joined[whole:].copy()]
            self._buffered -= whole
        else:
            self._pending[-1] = rows.copy()  # the caller may use its memory again

    def fill(self, count: int, value: float) -> None:
        """Append ``count`` rows of ``value`` (zero where the array holds no floats)."""
        for start in range(0, count, self.spec.shard_rows):
            self.add(filler(self.spec, min(self.spec.shard_rows, count - start), value))

    def finish(self) -> None:
        """Write the last, unfilled shard and the array's description."""
        if self._buffered:
            joined = np.concatenate(self._pending)
            self._pending = [joined]
            self._write(joined)
        self.files.put(f"{self._path}/{ROOT}", json.dumps(self.spec.document(self.rows), indent=1).encode())

    def _write(self, rows: np.ndarray) -> None:
        self.files.put(self.spec.key(self._path, self._shard), encode_shard(self.spec, self._codec, rows))


class StoreWriter:
    """A transaction: entered, it holds the lock; nothing is visible before `commit`; left without, nothing happened.

    Parameters
    ----------
    files
        The store's files.
    format
        Format of the store.
    mode
        ``"new"``: there must be no store; ``"replace"``: whatever is committed is given up at the commit; ``"append"``: go
        on where the last commit ended, or begin.

    Attributes
    ----------
    record
        What is committed (an empty record for a new store).
    arrays
        The appenders, by path below the revision.
    """

    def __init__(self, files: Files, format: str, mode: Literal["new", "replace", "append"]) -> None:
        self.files, self._format, self._mode = files, format, mode
        self._lock = files.lock()
        self.record = Record(format)
        self.arrays: dict[str, Appender] = {}
        self._foreign: dict[str, Any] = {}
        self._before: bytes | None = None

    def __enter__(self) -> StoreWriter:
        self._lock.acquire()
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.files.discard()
        self._lock.release()

    def _open(self) -> None:
        name = self.files.name
        raw = self._before = self.files.get(ROOT)
        if raw is None:
            strange = [c for c in self.files.children("") if not _ours(c)]
            if strange:
                raise DataError(
                    f"{name} is not empty and not a store", found=", ".join(strange[:5]), needed="an empty or a new folder"
                )
        else:
            if self._mode == "new":
                raise DataError(
                    f"{name} exists", found="a store", fix="append() to it, write elsewhere, or give overwrite=True to replace it"
                )
            try:
                self.record, self._foreign = Record.decode(raw, name)
            except DataError:
                # A damaged store of ours may be replaced; a folder that was never ours may not.
                if self._mode != "replace" or RECORD_KEY.encode() not in raw:
                    raise
                self.record = Record(self._format, revision="r0")
            if self._mode == "append" and self.record.format != self._format:
                raise DataError(f"{name} is another kind of store", found=self.record.format, needed=self._format)
        if self._mode == "replace" and raw is not None:
            self.begin_revision()
        else:
            self._clean()
            for path, spec in self.record.arrays.items():
                rows = self.record.rows[spec.level]
                full = self.record.path(path)
                check_document(self.files.get(f"{full}/{ROOT}"), spec, rows, full, name)
                self.arrays[path] = Appender(self.files, full, spec, rows)

    def begin_revision(self) -> None:
        """Start from nothing in a new revision; the commit will give the present one up."""
        taken = [int(c[1:]) for c in self.files.children("") if _is_revision(c)]
        fresh = f"r{max(taken, default=0) + 1}"
        self.arrays = {}
        self.record = Record(self._format, revision=fresh, commit=self.record.commit, metadata=dict(self.record.metadata))

    def rows(self, array: str) -> int:
        """Rows of an array so far, committed or not."""
        return self.arrays[array].rows

    def create(self, path: str, spec: ArraySpec) -> Appender:
        """Add an array without rows. Bring it up to the rows of its level before the commit."""
        full = self.record.path(path)
        self.files.delete(full)  # what a killed writer may have left
        self.arrays[path] = Appender(self.files, full, spec, 0)
        return self.arrays[path]

    def drop(self, path: str) -> None:
        """Leave an array out of the next commit."""
        self.arrays.pop(path, None)

    def commit(self, *, extra: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Make everything added so far visible, at once.

        Parameters
        ----------
        extra
            What the format adds to the record.
        metadata
            The user's metadata of the whole store.
        """
        rows: dict[str, int] = {}
        for path, array in self.arrays.items():
            if rows.setdefault(array.spec.level, array.rows) != array.rows:
                raise AssertionError(f"{path} has {array.rows} rows, other arrays of its level {rows[array.spec.level]}")
        record = self.record.with_(
            commit=self.record.commit + 1,
            rows=rows,
            arrays={path: array.spec for path, array in self.arrays.items()},
            extra=extra,
            metadata=metadata,
        )
        for array in self.arrays.values():
            array.finish()
        group = json.dumps(GROUP).encode()
        folders = {path.rsplit("/", 1)[0] for path in self.arrays}
        for folder in sorted({record.revision, *(record.path(folder) for folder in folders)}):
            if self.files.get(f"{folder}/{ROOT}") is None:
                self.files.put(f"{folder}/{ROOT}", group)
        self.files.flush()
        if self.files.get(ROOT) != self._before:
            raise DataError(
                f"{self.files.name} was changed by another writer meanwhile",
                fix="write again; nothing of this write was committed",
            )
        self._before = record.encode(self._foreign)
        self.files.put(ROOT, self._before)
        self.files.flush()
        self.record = record
        self._clean()

    def _clean(self) -> None:
        """Take away what no commit names: leavings of a killed writer, revisions and arrays that were given up."""
        files, record = self.files, self.record
        for name in files.children(""):
            if (_is_revision(name) and name != record.revision) or _is_partial(name):
                files.delete(name)
        for folder in files.children(record.revision):
            for name in files.children(record.path(folder)):
                if name != ROOT and f"{folder}/{name}" not in record.arrays:
                    files.delete(record.path(f"{folder}/{name}"))
        for path, spec in record.arrays.items():
            shards = -(-record.rows[spec.level] // spec.shard_rows)
            for name in files.children(record.path(f"{path}/c")):
                if name.isdigit() and int(name) >= shards:
                    files.delete(record.path(f"{path}/c/{name}"))


def _is_revision(name: str) -> bool:
    return name[:1] == "r" and name[1:].isdigit()


def _is_partial(name: str) -> bool:
    return name.endswith(".partial")


def _ours(name: str) -> bool:
    return _is_revision(name) or _is_partial(name) or name == "writer.lock"
