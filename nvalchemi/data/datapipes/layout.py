"""How a store lies on disk: one plain zarr v3 group whose root attributes hold the commit record.

::

    a.zarr/zarr.json                 root group; attributes: "nvalchemi" (the commit record) and "metadata" (the user's)
    a.zarr/r1/ends/atom              per system: where its atoms end in the atom arrays (int64, cumulative)
    a.zarr/r1/ends/edge              the same for edges; only where there are edges
    a.zarr/r1/system/energy          one row a system
    a.zarr/r1/atom/positions         one row an atom, all systems one after the other; likewise forces, ...
    a.zarr/r1/edge/edge_index        one row an edge, (neighbour, centre) counted from the first atom of its system
    a.zarr/r1/present/forces         per system: has it this field? only for fields that some system lacks
    a.zarr/r1/deleted/4              per system: softly deleted? only after ``delete``; the number is that of the commit

A store of dense arrays has ``sample/<name>`` in place of these. Rows of systems that lack a field are written out (NaN,
or zero where zero means "none"), so that every array of a level has the same rows, and plain zarr can read them:
``data = root[root.attrs["nvalchemi"]["revision"]]; data["atom/positions"][:]``.

Three rules make it safe.

**Nothing is missing.** Every chunk that covers a committed row is written, also where it holds fill values only. A chunk
that cannot be found is therefore damage, never data. Chunks and shard indices carry crc32c checksums, the record its own.

**The record is the truth, and is written last.** It says how many rows are committed, and of which arrays. A commit writes
the shards, then the arrays' own ``zarr.json``, then the root's by a single atomic replacement. Whatever a killed writer
left behind lies past the committed rows or in arrays that the record does not name; the next writer overwrites it.

**No committed byte is changed in place.** An append starts in the last shard, which is read, filled up and put back as a
whole (temporary file, fsync, rename): before and after, the committed rows are in it. ``write(overwrite=True)`` and
``defragment`` write a new revision ``r2/`` beside the old one, and the commit switches over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

from nvalchemi.data.fields import Level
from nvalchemi.errors import ConfigError, DataError

VERSION = 1
"""Version of the layout; a reader refuses a newer one."""

ATOMIC_FORMAT = "nvalchemi.atomic"
ARRAY_FORMAT = "nvalchemi.arrays"
RECORD_KEY = "nvalchemi"
METADATA_KEY = "metadata"
ROOT = "zarr.json"
FIELD_GROUPS = frozenset(level.value for level in Level)
"""Groups whose arrays are fields; the other groups are the store's own."""
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")

CHUNK_BYTES = 128 * 1024
"""A chunk is what one read decodes: small enough for random reads, large enough that the call costs less than the bytes."""
CHUNKS_PER_SHARD = 32
"""A shard is a file and what the writer holds in memory of each array: 4 MiB."""

COMPRESSORS: dict[str, dict[str, Any] | None] = {
    "blosc": {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0}},
    "zstd": {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
    "none": None,
}
"""Compressors by short name. blosc (byte shuffle and LZ4) decodes floats five times as fast as zstd, at the same size."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of the store: what it holds and how it is cut.

    Parameters
    ----------
    level
        What one row belongs to: ``"system"``, ``"atom"``, ``"edge"`` or, in a store of dense arrays, ``"sample"``.
    dtype
        Name of the numpy dtype, one of ``DTYPES``.
    shape
        Shape of one row.
    unit
        Unit of the numbers, ``""`` where there is none.
    chunk_rows, shard_rows
        Rows in a chunk (decoded as one) and in a shard (one file); the second is a multiple of the first.
    compressor
        A zarr v3 codec, ``{"name": ..., "configuration": {...}}``, or None.
    """

    level: str
    dtype: str
    shape: tuple[int, ...]
    unit: str
    chunk_rows: int
    shard_rows: int
    compressor: dict[str, Any] | None = field(hash=False)

    @property
    def chunks_per_shard(self) -> int:
        return self.shard_rows // self.chunk_rows

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def key(self, path: str, shard: int) -> str:
        """Key of a shard's file in the store."""
        return f"{path}/c/{shard}" + "/0" * len(self.shape)

    def document(self, rows: int) -> dict[str, Any]:
        """The array's ``zarr.json`` for ``rows`` rows."""
        kind = np.dtype(self.dtype).kind
        little: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
        single: dict[str, Any] = {"name": "bytes"}
        values = single if np.dtype(self.dtype).itemsize == 1 else little
        codecs = [values, *([self.compressor] if self.compressor else []), {"name": "crc32c"}]
        sharding = {
            "chunk_shape": [self.chunk_rows, *self.shape],
            "codecs": codecs,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *self.shape],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [self.shard_rows, *self.shape]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            # A foreign reader that meets a lost chunk should at least see NaN, not plausible zeros.
            "fill_value": {"f": "NaN", "b": False}.get(kind, 0),
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"level": self.level, "unit": self.unit},
            "dimension_names": [self.level, *([None] * len(self.shape))],
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "unit": self.unit,
            "chunk_rows": self.chunk_rows,
            "shard_rows": self.shard_rows,
            "compressor": self.compressor,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArraySpec:
        return cls(**{**data, "shape": tuple(data["shape"])})


GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
"""``zarr.json`` of an inner group."""


@dataclass(frozen=True)
class Cut:
    """How a writer cuts its arrays; every None is chosen by the size of a row.

    Parameters
    ----------
    chunk_rows, shard_rows
        Rows in a chunk and in a shard, of every array.
    compressor
        ``"blosc"``, ``"zstd"``, ``"none"``, None (as ``"none"``) or a zarr v3 codec as a mapping.
    """

    chunk_rows: int | None = None
    shard_rows: int | None = None
    compressor: str | Mapping[str, Any] | None = "blosc"

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "shard_rows"):
            rows = getattr(self, name)
            if rows is not None and (not isinstance(rows, int) or rows < 1):
                raise ConfigError(f"{name} must be a positive whole number", found=repr(rows))
        if self.chunk_rows and self.shard_rows and self.shard_rows % self.chunk_rows:
            raise ConfigError(
                "a shard must hold whole chunks",
                found=f"shard_rows={self.shard_rows}, chunk_rows={self.chunk_rows}",
                needed="shard_rows a multiple of chunk_rows",
            )
        if isinstance(self.compressor, str) and self.compressor not in COMPRESSORS:
            raise ConfigError("unknown compressor", found=self.compressor, needed=", ".join(COMPRESSORS))
        codec = self.codec()
        if codec is not None and codec.get("name") not in ("blosc", "zstd", "gzip"):
            raise ConfigError("unknown compressor", found=codec.get("name"), needed="blosc, zstd or gzip")

    def codec(self) -> dict[str, Any] | None:
        if self.compressor is None:
            return None
        return COMPRESSORS[self.compressor] if isinstance(self.compressor, str) else dict(self.compressor)

    def spec(self, level: str, dtype: str, shape: tuple[int, ...], unit: str) -> ArraySpec:
        """The specification of an array of rows of ``shape``."""
        if dtype not in DTYPES:
            raise DataError("a dtype that the store cannot hold", found=dtype, needed=", ".join(DTYPES))
        itemsize = np.dtype(dtype).itemsize
        by_size = 2 ** int(math.log2(max(1, CHUNK_BYTES // max(1, itemsize * math.prod(shape)))))
        chunk = self.chunk_rows or (math.gcd(by_size, self.shard_rows) if self.shard_rows else by_size)
        shard = self.shard_rows or chunk * CHUNKS_PER_SHARD
        codec = self.codec()
        if codec is not None and codec["name"] == "blosc":
            codec = {"name": "blosc", "configuration": {"typesize": itemsize, **codec["configuration"]}}
        return ArraySpec(level, dtype, shape, unit, chunk, shard, codec)


@dataclass(frozen=True)
class Record:
    """The commit record: all that is committed, and nothing else.

    Parameters
    ----------
    format
        ``ATOMIC_FORMAT`` or ``ARRAY_FORMAT``.
    revision
        Name of the group that holds the arrays.
    commit
        Number of commits so far.
    rows
        Committed rows of each level.
    arrays
        The committed arrays, by path below the revision's group.
    extra
        What a format adds: the cutoff of the edges, the path of the deletion mask.
    metadata
        The user's own, JSON only.
    """

    format: str
    revision: str = "r1"
    commit: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, ArraySpec] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Record:
        return replace(self, **changes)

    def path(self, array: str) -> str:
        """Path of an array from the root of the store."""
        return f"{self.revision}/{array}"

    def _body(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "version": VERSION,
            "revision": self.revision,
            "commit": self.commit,
            "rows": self.rows,
            "arrays": {path: spec.to_dict() for path, spec in self.arrays.items()},
            "extra": self.extra,
        }

    def encode(self, other_attributes: Mapping[str, Any]) -> bytes:
        """The root's ``zarr.json``; ``other_attributes`` are foreign ones, which are kept."""
        body = self._body()
        body["checksum"] = _checksum(body, self.metadata)
        attributes = {**other_attributes, RECORD_KEY: body, METADATA_KEY: self.metadata}
        return json.dumps({**GROUP, "attributes": attributes}, indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, raw: bytes | None, store: str) -> tuple[Record, dict[str, Any]]:
        """The record in a root ``zarr.json`` and the foreign attributes beside it.

        Raises
        ------
        DataError
            No store, another kind of store, a newer version, or a damaged record.
        """
        if raw is None:
            raise DataError(
                f"no committed store at {store}", found="no zarr.json", needed="a store written by a zarr writer of this package"
            )
        try:
            attributes = dict(json.loads(raw)["attributes"])
            body, metadata = dict(attributes.pop(RECORD_KEY)), dict(attributes.pop(METADATA_KEY, {}))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{store}: {ROOT} holds no commit record", found=f"{type(error).__name__}: {error}", fix="convert the data anew"
            ) from error
        if body.get("version") != VERSION:
            raise DataError(
                f"{store}: version of the layout",
                found=body.get("version"),
                needed=VERSION,
                fix="use a newer release of the package",
            )
        stated = body.pop("checksum", None)
        if stated != _checksum(body, metadata):
            raise DataError(f"{store}: {ROOT} is damaged: the commit record does not match its checksum")
        try:
            record = cls(
                format=body["format"],
                revision=body["revision"],
                commit=body["commit"],
                rows=body["rows"],
                arrays={path: ArraySpec.from_dict(spec) for path, spec in body["arrays"].items()},
                extra=body["extra"],
                metadata=metadata,
            )
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{store}: the commit record lacks what it must have", found=f"{type(error).__name__}: {error}"
            ) from error
        return record, attributes


def _checksum(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    text = json.dumps([body, metadata], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"crc32c:{google_crc32c.value(text.encode()):08x}"


def check_document(raw: bytes | None, spec: ArraySpec, rows: int, path: str, store: str) -> None:
    """Check an array's ``zarr.json`` against what the commit record says of it.

    Raises
    ------
    DataError
        The array is missing, damaged, or not the one that was committed.
    """
    if raw is None:
        raise DataError(
            f"{store}: array {path} is missing", found=f"no {path}/{ROOT}", fix="restore the file or convert the data anew"
        )
    try:
        found = json.loads(raw)
        length = found["shape"][0]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{store}: {path}/{ROOT} is damaged", found=f"{type(error).__name__}: {error}") from error
    for key, needed in spec.document(length).items():
        if found.get(key) != needed:
            raise DataError(
                f"{store}: {path}/{ROOT} contradicts the commit record at {key!r}",
                found=json.dumps(found.get(key)),
                needed=json.dumps(needed),
            )
    if length < rows:
        raise DataError(
            f"{store}: array {path} is shorter than what was committed", found=f"{length} rows", needed=f"{rows} rows"
        )


def check_name(name: str) -> str:
    """A field's name, checked to be safe as the name of a folder."""
    if not NAME_PATTERN.fullmatch(name):
        raise DataError(
            "a field's name that the store cannot hold",
            found=repr(name),
            needed="letters, digits, '_', '.' and '-', not starting with a digit",
        )
    return name


def check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the user's metadata, checked to be JSON."""
    try:
        return json.loads(json.dumps(dict(metadata or {}), allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise DataError("metadata must be JSON: texts, finite numbers, lists and mappings of them", found=str(error)) from error
