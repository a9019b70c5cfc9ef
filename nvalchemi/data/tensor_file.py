"""A file of named tensors in the safetensors format: written in one pass with its checksum, and read by parts.

The format is eight bytes with the length of a JSON header, the header (name, dtype, shape and place of each tensor), and the numbers.
Nothing in it can run code. See https://github.com/huggingface/safetensors for its description.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi.data.address import Bytes, Where
from nvalchemi.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000


class Entry(NamedTuple):
    """A tensor that is to be written: what it is, and how to get it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]


def write_tensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write tensors one after another, so that one at a time is in memory; returns the file's size and SHA-256.

    Raises
    ------
    CheckpointError
        For a dtype that the format does not know.
    """
    # the widest first: each tensor then begins where numbers of its kind may
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, _ in ordered:
        if dtype not in CODES:
            raise CheckpointError(
                f"'{name}' has a dtype that the file cannot hold", found=dtype, needed=", ".join(map(str, CODES))
            )
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: Any) -> None:
            nonlocal size
            file.write(data)
            digest.update(data)
            size += len(data)

        put(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape, get in ordered:
            tensor = get().detach()
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"'{name}' is not what was announced",
                    found=f"{tuple(tensor.shape)} {tensor.dtype}",
                    needed=f"{shape} {dtype}",
                )
            if tensor.numel():
                flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
                put(flat.numpy().data)
    return {"bytes": size, "sha256": digest.hexdigest()}


class TensorFile:
    """The tensors of a file, read when they are asked for.

    Parameters
    ----------
    path
        Of the file, here or elsewhere; of one elsewhere just the parts that are asked for are fetched.

    Raises
    ------
    CheckpointError
        For a file that is not of the format, or whose header does not fit its length.
    """

    def __init__(self, path: Where) -> None:
        self.path = path
        try:
            self._bytes = Bytes(path)
            whole = self._bytes.size
            length = int.from_bytes(self._bytes.read(0, 8).tobytes(), "little") if whole >= 8 else 0
            if not 2 <= length <= min(_LONGEST_HEADER, whole - 8):
                raise ValueError(f"a header of {length} bytes in a file of {whole}")
            header = json.loads(self._bytes.read(8, 8 + length).tobytes())
            self._begin = 8 + length
            self.metadata: dict[str, str] = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            self._entries = {name: _checked(name, entry, whole - self._begin) for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no file of tensors", found=str(error)[:200]) from None

    def names(self) -> list[str]:
        """Names of the tensors, in the order of the header."""
        return list(self._entries)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor.

        Raises
        ------
        CheckpointError
            Where there is none of that name.
        """
        dtype, shape, _ = self._entry(name)
        return dtype, shape

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, mapped from a file here, so that only what is looked at is read. Changing it does not change the file."""
        dtype, shape, (start, end) = self._entry(name)
        if start == end:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._bytes.read(self._begin + start, self._begin + end)).view(dtype).reshape(shape)

    def _entry(self, name: str) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no tensor '{name}'", found=", ".join(self.names()[:5]))
        return self._entries[name]


def _checked(name: str, entry: Any, room: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    dtype, shape, (start, end) = DTYPES[entry["dtype"]], _whole(entry["shape"]), _whole(entry["data_offsets"])
    if not start <= end <= room or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"'{name}' lies at {start} to {end} of {room} bytes, with shape {list(shape)} and {dtype}")
    return dtype, shape, (start, end)


def _whole(numbers: Sequence[Any]) -> tuple[int, ...]:
    if any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return tuple(numbers)
