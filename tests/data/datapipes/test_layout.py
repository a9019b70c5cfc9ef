"""The layout's own checks: cuts, the commit record, descriptions of arrays."""

from __future__ import annotations

import json

import pytest
import zarr

from nvalchemi.data.datapipes.layout import (
    ATOMIC_FORMAT,
    RECORD_KEY,
    Cut,
    Record,
    check_document,
    check_metadata,
    check_name,
)
from nvalchemi.errors import ConfigError, DataError


def record() -> Record:
    spec = Cut().spec("atom", "float32", (3,), "angstrom")
    return Record(ATOMIC_FORMAT, commit=3, rows={"atom": 7}, arrays={"atom/positions": spec}, metadata={"who": "me"})


@pytest.mark.parametrize(
    ("dtype", "shape", "chunk"),
    [("float64", (3,), 4096), ("int64", (), 16384), ("bool", (), 131072), ("float32", (3, 256, 256), 1)],
)
def test_a_chunk_is_about_128_kib_and_a_shard_32_chunks(dtype: str, shape: tuple[int, ...], chunk: int) -> None:
    spec = Cut().spec("system", dtype, shape, "")
    assert (spec.chunk_rows, spec.shard_rows) == (chunk, 32 * chunk)


def test_given_rows_are_kept_and_a_shard_holds_whole_chunks() -> None:
    assert Cut(4, 16).spec("atom", "float64", (3,), "").shard_rows == 16
    assert Cut(4).spec("atom", "float64", (3,), "").shard_rows == 128
    spec = Cut(None, 48).spec("atom", "float64", (3,), "")
    assert spec.shard_rows == 48 and 48 % spec.chunk_rows == 0
    with pytest.raises(ConfigError, match="shard_rows=10, chunk_rows=4"):
        Cut(4, 10)
    with pytest.raises(ConfigError, match="chunk_rows must be a positive whole number"):
        Cut(0)


def test_unknown_compressors_and_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown compressor"):
        Cut(compressor="rar")
    with pytest.raises(ConfigError, match="unknown compressor"):
        Cut(compressor={"name": "bz2", "configuration": {}})
    with pytest.raises(DataError, match="bfloat16"):
        Cut().spec("atom", "bfloat16", (), "")


def test_a_record_comes_back_as_it_was_with_foreign_attributes_beside_it() -> None:
    raw = record().encode({"note": [1, 2]})
    back, others = Record.decode(raw, "a.zarr")
    assert back == record() and others == {"note": [1, 2]}


def test_an_edited_record_is_an_error() -> None:
    document = json.loads(record().encode({}))
    document["attributes"][RECORD_KEY]["rows"]["atom"] = 8
    with pytest.raises(DataError, match="does not match its checksum"):
        Record.decode(json.dumps(document).encode(), "a.zarr")
    document = json.loads(record().encode({}))
    document["attributes"]["metadata"]["who"] = "you"
    with pytest.raises(DataError, match="does not match its checksum"):
        Record.decode(json.dumps(document).encode(), "a.zarr")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"attributes": {}}', b'{"attributes": {"nvalchemi": 3}}', b"\xff\xfe"])
def test_what_is_no_record_is_an_error(raw: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.zarr"):
        Record.decode(raw, "a.zarr")


def test_no_store_and_a_newer_store_are_errors_that_say_so() -> None:
    with pytest.raises(DataError, match=r"no committed store at a\.zarr"):
        Record.decode(None, "a.zarr")
    document = json.loads(record().encode({}))
    document["attributes"][RECORD_KEY]["version"] = 99
    with pytest.raises(DataError, match="found: 99"):
        Record.decode(json.dumps(document).encode(), "a.zarr")


def test_a_description_is_checked_against_the_record() -> None:
    spec = record().arrays["atom/positions"]
    good = spec.document(7)
    check_document(json.dumps(good).encode(), spec, 7, "r1/atom/positions", "a.zarr")
    check_document(json.dumps({**good, "shape": [9, 3]}).encode(), spec, 7, "r1/atom/positions", "a.zarr")
    with pytest.raises(DataError, match="shorter than what was committed"):
        check_document(json.dumps({**good, "shape": [6, 3]}).encode(), spec, 7, "r1/atom/positions", "a.zarr")
    with pytest.raises(DataError, match=r"array r1/atom/positions is missing"):
        check_document(None, spec, 7, "r1/atom/positions", "a.zarr")
    with pytest.raises(DataError, match="contradicts the commit record at 'data_type'"):
        check_document(json.dumps({**good, "data_type": "float64"}).encode(), spec, 7, "r1/atom/positions", "a.zarr")
    with pytest.raises(DataError, match="is damaged"):
        check_document(b"{}", spec, 7, "r1/atom/positions", "a.zarr")


@pytest.mark.parametrize("compressor", ["blosc", "zstd", "none"])
@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
def test_zarr_understands_the_description(compressor: str, dtype: str) -> None:
    from zarr.core.metadata import ArrayV3Metadata

    document = Cut(4, 16, compressor).spec("atom", dtype, (3,), "eV").document(5)
    array = ArrayV3Metadata.from_dict(json.loads(json.dumps(document)))
    assert array.shape == (5, 3)
    assert zarr.Array(zarr.AsyncArray(array, zarr.storage.StorePath(zarr.storage.MemoryStore()))).chunks == (4, 3)


def test_names_and_metadata_are_checked() -> None:
    assert check_name("homo_lumo-gap.2") == "homo_lumo-gap.2"
    for name in ("", "a/b", "../x", "2d", "naïve"):
        with pytest.raises(DataError, match="name that the store cannot hold"):
            check_name(name)
    with pytest.raises(DataError, match="metadata must be JSON"):
        check_metadata({"x": float("nan")})
    with pytest.raises(DataError, match="metadata must be JSON"):
        check_metadata({"x": object()})
