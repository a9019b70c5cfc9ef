"""A committed store, open for reading: what the readers of structures and of dense arrays share."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from nvalchemi.data.datapipes.chunk_cache import ChunkCache
from nvalchemi.data.datapipes.files import Files, open_files
from nvalchemi.data.datapipes.layout import ROOT, Record, check_document
from nvalchemi.errors import DataError

CACHE_BYTES = 512 * 1024**2
"""Memory for decoded chunks, of all arrays of a store together."""


CHUNKS_PER_BLOCK = 4
"""Chunks that a shuffle by blocks keeps together. Blocks of structures begin within a chunk, so one in so many is decoded twice."""


class _State:
    """What a process owns: the lock, and the decoded chunks that it guards."""

    def __init__(self, store: StoreReader) -> None:
        self.lock = threading.RLock()
        record = store.record
        self.caches = {
            path: ChunkCache(store.files, record.path(path), spec, record.rows[spec.level])
            for path, spec in record.arrays.items()
        }
        # Small arrays whole, and what is left in equal parts among the large ones: each is asked for as often as the others.
        left = store.cache_bytes
        by_size = sorted(self.caches.values(), key=lambda c: c.chunks * c.slot_bytes)
        for number, cache in enumerate(by_size):
            slots = min(cache.chunks, left // (len(by_size) - number) // max(1, cache.slot_bytes))
            cache.resize(slots)
            left -= min(left, max(1, slots) * cache.slot_bytes)


class StoreReader:
    """Rows of the arrays of one store, as they were committed when it was opened.

    Safe to use from several threads. A forked process starts with an empty cache and a lock of its own; so does a pickled
    copy, which sees the same commit as the original.

    Parameters
    ----------
    store
        Path of the folder, or a zarr store object.
    format
        The format that is wanted.
    cache_bytes
        Memory for decoded chunks.

    Raises
    ------
    DataError
        No store of this format, or its record or the description of an array is damaged or missing.
    """

    def __init__(self, store: Any, format: str, cache_bytes: int = CACHE_BYTES) -> None:
        self.files: Files = open_files(store)
        self.cache_bytes = int(cache_bytes)
        self._states: dict[int, _State] = {}
        while True:
            raw = self.files.get(ROOT)
            try:
                self._open(raw, format)
                return
            except DataError:
                if self.files.get(ROOT) == raw:  # else a commit came in between: look again
                    raise

    def _open(self, raw: bytes | None, format: str) -> None:
        self.record, _ = Record.decode(raw, self.files.name)
        if self.record.format != format:
            raise DataError(f"{self.files.name} is another kind of store", found=self.record.format, needed=format)
        for path, spec in self.record.arrays.items():
            full = self.record.path(path)
            check_document(self.files.get(f"{full}/{ROOT}"), spec, self.record.rows[spec.level], full, self.files.name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": {}}

    @property
    def state(self) -> _State:
        """The lock and caches of this process, made when first asked for.

        Kept by process id: a lock that another thread held at a fork stays locked in the child for ever.
        """
        pid = os.getpid()
        state = self._states.get(pid)
        if state is None:
            state = self._states.setdefault(pid, _State(self))  # one operation, so two threads get the same
            for other in [p for p in self._states if p != pid]:
                self._states.pop(other, None)
        return state

    def take(self, rows: dict[str, np.ndarray | None], arrays: list[str]) -> dict[str, np.ndarray]:
        """Rows of several arrays.

        Parameters
        ----------
        rows
            The numbers of the rows by level; None for all of them.
        arrays
            Which arrays.
        """
        state = self.state
        levels = self.record.arrays
        with state.lock:
            found = {}
            for path in arrays:
                wanted = rows[levels[path].level]
                cache = state.caches[path]
                found[path] = cache.all() if wanted is None else cache.take(wanted)
            return found

    def column(self, array: str) -> np.ndarray:
        """All rows of one array; not kept."""
        with self.state.lock:
            return self.state.caches[array].all()

    @property
    def decoded(self) -> int:
        """How many chunks this process has decoded, for tests and benchmarks."""
        return sum(cache.decoded for cache in self.state.caches.values())

    def block_size(self, samples: int, arrays: list[str]) -> int:
        """How many of ``samples`` samples, on the average, `CHUNKS_PER_BLOCK` chunks hold, of the array that has the most of them."""
        specs = ((self.record.rows[self.record.arrays[path].level], self.record.arrays[path]) for path in arrays)
        return max(1, min((samples * CHUNKS_PER_BLOCK * spec.chunk_rows // rows for rows, spec in specs if rows), default=1))

    def cached_samples(self, samples: int, arrays: list[str]) -> int:
        """How many of ``samples`` samples, on the average, are kept decoded in this process."""
        caches = self.state.caches
        return min((caches[path].kept(samples) for path in arrays), default=samples)

    def verify(self) -> None:
        """Decode every chunk of every array.

        Raises
        ------
        DataError
            The first damaged or missing chunk.
        """
        state = self.state
        for cache in state.caches.values():
            with state.lock:
                cache.verify()
