"""An object store that all ranks of this machine see: ``bucket:///FOLDER``. It renames nothing, and makes no folders by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    protocol = "bucket"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("bucket://").rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"bucket://{name}"

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object store has no rename")

    def cat_file(
        self, path: str, version_id: Any = None, start: int | None = None, end: int | None = None
    ) -> Any:  # as s3fs has it
        assert version_id is None
        return super().cat_file(path, start=start, end=end)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """An object is there whole or not at all, also to who looks while it is being written."""
        part = Path(f"{path}.{os.getpid()}")
        part.write_bytes(value)
        os.replace(part, path)

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        assert not rpath.endswith(".safetensors"), "a file of tensors is read by parts"
        super().get_file(rpath, lpath, **kwargs)


fsspec.register_implementation("bucket", Bucket, clobber=True)
