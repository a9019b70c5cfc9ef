"""Rows of one array of a store, by number: chunks are decoded when first needed and kept in one block of memory."""

from __future__ import annotations

import numpy as np

from nvalchemi.data.datapipes.files import Blob, Files
from nvalchemi.data.datapipes.layout import ArraySpec
from nvalchemi.data.datapipes.shards import (
    DamagedError,
    coalesce,
    decode_chunk,
    decode_index,
    index_bytes,
    make_codec,
)
from nvalchemi.errors import DataError


class ChunkCache:
    """The committed rows of one array.

    Decoded chunks lie in slots of one array. With a slot for each chunk the slots stand in the order of the rows: reading is
    then plain indexing, once every chunk has been decoded. With fewer, the slot used longest ago is given up.

    Not thread-safe; its owner holds a lock.

    Parameters
    ----------
    files
        The store's files.
    path
        The array's path in the store.
    spec
        What it holds.
    rows
        Committed rows.
    """

    def __init__(self, files: Files, path: str, spec: ArraySpec, rows: int) -> None:
        self._files, self._path, self._spec, self._rows = files, path, spec, rows
        self._codec = make_codec(spec.compressor)
        self.chunks = -(-rows // spec.chunk_rows)
        self._indices: dict[int, tuple[object, np.ndarray]] = {}
        self.resize(self.chunks)

    @property
    def slot_bytes(self) -> int:
        """Memory of one decoded chunk."""
        return self._spec.row_bytes * self._spec.chunk_rows

    def kept(self, samples: int) -> int:
        """How many of ``samples`` samples, which all rows belong to, the slots hold on the average."""
        return samples if self._resident else samples * self._slots * self._spec.chunk_rows // self._rows

    def resize(self, slots: int) -> None:
        """Forget what was decoded and keep up to ``slots`` chunks from now on."""
        self._slots = max(1, min(slots, self.chunks))
        self._resident = self._slots >= self.chunks
        self._storage: np.ndarray | None = None
        self._slot_of = np.full(self.chunks, -1, np.int32)
        self._chunk_in = np.full(self._slots, -1, np.int64)
        self._used = np.zeros(self._slots, np.int64)
        self._clock = 0
        self._missing = self.chunks
        self.decoded = 0

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Rows by number, in the order given, repeats allowed; each chunk is decoded at most once.

        Parameters
        ----------
        rows
            (n,) int64, each within the committed rows.
        """
        if len(rows) == 0:
            return np.empty((0, *self._spec.shape), self._spec.dtype)
        if self._resident and not self._missing:
            return self._block().take(rows, axis=0)
        chunk = rows // self._spec.chunk_rows
        slot = self._slot_of[chunk]
        absent = slot < 0
        if absent.any():
            wanted, _ = _runs(np.sort(chunk))
            if len(wanted) > self._slots:
                return self._stream(rows, chunk)
            if not self._resident:
                self._touch(self._slot_of[wanted])
            self._fill(_runs(np.sort(chunk[absent]))[0])
            slot = self._slot_of[chunk]
        elif not self._resident:
            self._touch(slot)
        if self._resident:
            return self._block().take(rows, axis=0)
        return self._block().take(rows + (slot - chunk) * self._spec.chunk_rows, axis=0)

    def range(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop - 1``, not kept in the cache."""
        if self._resident and not self._missing and self.chunks:
            return self._block()[start:stop].copy()
        first, last = start // self._spec.chunk_rows, -(-stop // self._spec.chunk_rows)
        out = self._empty(last - first)
        if first < last:
            self._read(np.arange(first, last), out)
        offset = first * self._spec.chunk_rows
        return out.reshape(-1, *self._spec.shape)[start - offset : stop - offset]

    def all(self) -> np.ndarray:
        """All committed rows, not kept in the cache."""
        return self.range(0, self._rows)

    def verify(self) -> None:
        """Decode every chunk, keeping none."""
        scratch = self._empty(1)
        for start in range(0, self.chunks, self._spec.chunks_per_shard):
            self._read(np.arange(start, min(start + self._spec.chunks_per_shard, self.chunks)), scratch, same=True)

    # -- the slots ---------------------------------------------------------------------------------------------------

    def _empty(self, chunks: int) -> np.ndarray:
        return np.empty((chunks, self._spec.chunk_rows, *self._spec.shape), self._spec.dtype)

    def _block(self) -> np.ndarray:
        """The slots' rows, one after the other."""
        if self._storage is None:
            self._storage = self._empty(self._slots)  # the operating system gives the memory as it is written to
        return self._storage.reshape(-1, *self._spec.shape)

    def _touch(self, slots: np.ndarray) -> None:
        self._clock += 1
        self._used[slots[slots >= 0]] = self._clock

    def _fill(self, chunks: np.ndarray) -> None:
        """Decode chunks (sorted, none of them in a slot) into slots that the present call does not use."""
        self._block()
        assert self._storage is not None
        if self._resident:
            slots = chunks
        else:
            slots = (
                np.argpartition(self._used, len(chunks) - 1)[: len(chunks)]
                if len(chunks) < self._slots
                else np.arange(self._slots)
            )
            old = self._chunk_in[slots]
            self._slot_of[old[old >= 0]] = -1
            self._chunk_in[slots] = -1
            self._used[slots] = 0  # an error below leaves them free
        self._read(chunks, self._storage, slots)
        self._slot_of[chunks] = slots
        self._chunk_in[slots] = chunks
        self._used[slots] = self._clock
        self._missing -= len(chunks)

    def _stream(self, rows: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """More chunks in one call than there are slots: go through them a shard's worth at a time, and keep none."""
        out = np.empty((len(rows), *self._spec.shape), self._spec.dtype)
        order = np.argsort(chunk, kind="stable")
        wanted, starts = _runs(chunk[order])
        stops = np.append(starts[1:], len(rows))
        step = min(self._spec.chunks_per_shard, len(wanted))
        scratch = self._empty(step)
        flat = scratch.reshape(-1, *self._spec.shape)
        for a in range(0, len(wanted), step):
            group = wanted[a : a + step]
            slots = self._slot_of[group]
            kept = np.flatnonzero(slots >= 0)
            if len(kept):
                assert self._storage is not None
                scratch[kept] = self._storage[slots[kept]]
            lacking = np.flatnonzero(slots < 0)
            if len(lacking):
                self._read(group[lacking], scratch, lacking)
            where = order[starts[a] : stops[a + len(group) - 1]]
            local = np.repeat(np.arange(len(group)) - group, (stops - starts)[a : a + step]) * self._spec.chunk_rows
            out[where] = flat[rows[where] + local]
        return out

    # -- the files ---------------------------------------------------------------------------------------------------

    def _read(self, chunks: np.ndarray, out: np.ndarray, slots: np.ndarray | None = None, *, same: bool = False) -> None:
        """Decode chunks (sorted, at least one) into ``out[slots]``: by default in their order, with ``same`` all into the first."""
        if slots is None:
            slots = np.zeros(len(chunks), np.int64) if same else np.arange(len(chunks))
        shards, starts = _runs(chunks // self._spec.chunks_per_shard)
        stops = [*starts[1:].tolist(), len(chunks)]
        for shard, start, stop in zip(shards.tolist(), starts.tolist(), stops, strict=True):
            part, targets = chunks[start:stop], slots[start:stop]
            try:
                self._read_shard(shard, part, out, targets)
            except DataError:
                # An append may have replaced the file between our look at its index and now. Once more from the start.
                if self._indices.pop(shard, None) is None:
                    raise
                self._read_shard(shard, part, out, targets)

    def _read_shard(self, shard: int, chunks: np.ndarray, out: np.ndarray, slots: np.ndarray) -> None:
        key, at = self._spec.key(self._path, shard), 0
        cause: Exception
        try:
            with self._files.open(key) as blob:
                ranges = self._index(shard, blob)[chunks % self._spec.chunks_per_shard]
                if (ranges[:, 0] < 0).any():
                    at = int(np.flatnonzero(ranges[:, 0] < 0)[0])
                    raise DamagedError("the chunk is missing from the shard")
                merged = coalesce(ranges)
                for (_, _, count), data in zip(merged, blob.read([(a, b) for a, b, _ in merged]), strict=True):
                    raw, offset = np.frombuffer(data, np.uint8), 0
                    for length in ranges[at : at + count, 1].tolist():
                        decode_chunk(self._codec, raw[offset : offset + length], length, out[slots[at]])
                        offset += length
                        at += 1
            self.decoded += len(chunks)
            return
        except (FileNotFoundError, NotADirectoryError) as error:
            cause, problem = error, "the file is missing"
        except OSError as error:
            cause, problem = error, f"the file cannot be read ({type(error).__name__}: {error})"
        except DamagedError as error:
            cause, problem = error, str(error)
        chunk = int(chunks[at])
        first = chunk * self._spec.chunk_rows
        last = min(first + self._spec.chunk_rows, self._rows) - 1
        raise DataError(
            f"{self._files.name}: array {self._path}, chunk {chunk} (rows {first} to {last}), file {key}: {problem}",
            fix="restore the file from a copy or convert the data anew",
        ) from cause

    def _index(self, shard: int, blob: Blob) -> np.ndarray:
        """Where the shard's chunks lie in its file, read again when the file was replaced."""
        version, index = self._indices.get(shard, (None, None))
        if index is None or version != blob.version:
            index = decode_index(self._spec, blob.tail(index_bytes(self._spec)))
            self._indices[shard] = (blob.version, index)
        return index


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of a sorted array of at least one, and where each begins.

    As ``np.unique`` does it, which at its first call imports numpy.ma for 60 ms, the time of the whole first batch.
    """
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return values[starts], starts
