"""The bytes of a shard: encode rows, and decode single chunks with every check.

Written here after the zarr v3 specification (sharding_indexed, crc32c) rather than left to zarr-python, for two reasons:
zarr-python reads a chunk that it cannot find as fill values, and its machinery costs some hundred µs a chunk, five times
what the decoding itself costs. What is written here, zarr-python reads; tests compare the two.

A shard is its chunks one after the other, then the index, (offset, length) of each as little-endian uint64, then the
crc32c of the index. A chunk is compressed and followed by its crc32c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import google_crc32c
import numpy as np

from nvalchemi.data.datapipes.layout import ArraySpec

_ABSENT = np.uint64(2**64 - 1)


class DamagedError(Exception):
    """Bytes that are not what was written; the message says in what way. Callers say where."""


class Codec(Protocol):
    """A compressor of numcodecs."""

    def encode(self, buf: Any) -> Any: ...
    def decode(self, buf: Any, out: Any = None) -> Any: ...


def make_codec(codec: Mapping[str, Any] | None) -> Codec | None:
    """The compressor of a zarr v3 codec description; None for none."""
    if codec is None:
        return None
    settings = dict(codec["configuration"])
    # Brought in here, because importing numcodecs adds a warnings filter.
    if codec["name"] == "blosc":
        from numcodecs.blosc import BITSHUFFLE, NOSHUFFLE, SHUFFLE, Blosc

        shuffle = {"noshuffle": NOSHUFFLE, "shuffle": SHUFFLE, "bitshuffle": BITSHUFFLE}[settings["shuffle"]]
        return Blosc(settings["cname"], settings["clevel"], shuffle, settings.get("blocksize", 0))
    if codec["name"] == "zstd":
        from numcodecs.zstd import Zstd

        return Zstd(level=settings["level"], checksum=settings.get("checksum", False))
    if codec["name"] == "gzip":
        from numcodecs.gzip import GZip

        return GZip(level=settings["level"])
    raise ValueError(f"unknown compressor {codec['name']!r}")


def _crc(data: bytes | np.ndarray) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def filler(spec: ArraySpec, rows: int, value: float = float("nan")) -> np.ndarray:
    """Rows that stand where there is no value: ``value`` in arrays of floats, else zero."""
    dtype = np.dtype(spec.dtype)
    return np.full((rows, *spec.shape), value if dtype.kind == "f" else 0, dtype)


def encode_shard(spec: ArraySpec, codec: Codec | None, rows: np.ndarray) -> bytes:
    """The file of a shard that holds ``rows`` (at most ``spec.shard_rows`` of them, at least one)."""
    rows = np.ascontiguousarray(rows)
    short = -len(rows) % spec.chunk_rows
    parts: list[bytes] = []
    index = np.full((spec.chunks_per_shard, 2), _ABSENT, "<u8")
    offset = 0
    for number, start in enumerate(range(0, len(rows), spec.chunk_rows)):
        chunk = rows[start : start + spec.chunk_rows]
        if short and len(chunk) < spec.chunk_rows:
            chunk = np.concatenate([chunk, filler(spec, short)])
        data = chunk.tobytes() if codec is None else bytes(codec.encode(chunk))
        parts += [data, _crc(data)]
        index[number] = offset, len(data) + 4
        offset += len(data) + 4
    tail = index.tobytes()
    return b"".join([*parts, tail, _crc(tail)])


def index_bytes(spec: ArraySpec) -> int:
    """Length of the index at the end of a shard."""
    return 16 * spec.chunks_per_shard + 4


def decode_index(spec: ArraySpec, tail: bytes) -> np.ndarray:
    """(chunks, 2) int64: offset and length of each chunk; the offset is -1 where there is none."""
    if len(tail) < index_bytes(spec):
        raise DamagedError(f"the file is too short: {len(tail)} bytes where the index alone has {index_bytes(spec)}")
    if _crc(tail[:-4]) != tail[-4:]:
        raise DamagedError("the checksum of the shard's index does not match")
    return np.frombuffer(tail[:-4], "<u8").view("<i8").reshape(-1, 2)


def decode_chunk(codec: Codec | None, data: bytes | np.ndarray, length: int, out: np.ndarray) -> None:
    """Check and decode one chunk into ``out``, a contiguous array of the chunk's shape."""
    raw = np.frombuffer(data, np.uint8)
    if len(raw) < length or length < 4:
        raise DamagedError(f"the file ends within the chunk: {len(raw)} of {length} bytes")
    body = raw[:-4]
    if _crc(body) != raw[-4:].tobytes():
        raise DamagedError("the chunk's checksum does not match")
    flat = out.reshape(-1).view(np.uint8)
    if codec is None:
        if len(body) != len(flat):
            raise DamagedError(f"the chunk has {len(body)} bytes in place of {len(flat)}")
        flat[:] = body
        return
    try:
        codec.decode(body, out=flat)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(f"the chunk cannot be decompressed: {error}") from error


def coalesce(ranges: np.ndarray) -> list[tuple[int, int, int]]:
    """Neighbouring byte ranges as one: ``(start, stop, count)`` for (n, 2) offsets and lengths, which lie in order."""
    if len(ranges) == 1:
        start, length = ranges[0].tolist()
        return [(start, start + length, 1)]
    stops = ranges[:, 0] + ranges[:, 1]
    breaks = np.flatnonzero(ranges[1:, 0] != stops[:-1]) + 1
    first = np.concatenate([[0], breaks])
    last = np.concatenate([breaks, [len(ranges)]])
    return [(int(ranges[a, 0]), int(stops[b - 1]), int(b - a)) for a, b in zip(first, last, strict=True)]
