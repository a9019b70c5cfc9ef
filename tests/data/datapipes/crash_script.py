"""What the writer's tests do with processes: run as a script, so that forking meets no threads of a test runner."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from nvalchemi.data import AtomicData
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.errors import DataError
from tests.data.random_structures import same, structure

os.fsync = lambda fd: None  # a killed process loses nothing that it has written; only a power cut does

LABELS = frozenset(["energy"])
CUT = {"chunk_rows": 4, "shard_rows": 16}


def some(count: int, fields: frozenset[str] = LABELS, seed: int = 0) -> list[AtomicData]:
    return [structure(seed + i, 2 + i % 5, fields) for i in range(count)]


def everything(path: Path) -> list[AtomicData]:
    reader = AtomicDataZarrReader(path)
    reader.verify()
    return reader.read_many(range(len(reader))).to_data_list()


def check(path: Path, *allowed: list[AtomicData]) -> None:
    found = everything(path)
    for expected in allowed:
        if len(found) == len(expected) and all(same(a, b) for a, b in zip(found, expected, strict=True)):
            return
    raise AssertionError(f"{len(found)} structures, none of the allowed contents")


def in_child(call: Callable[[], object]) -> int:
    """Run in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def die_at(count: int) -> None:
    """Let this process be killed in place of its ``count``-th operation on the file system that changes something."""
    left = [count]

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for module, names in ((os, ["replace", "unlink", "rmdir"]), (Path, ["write_bytes"])):
        for name in names:
            setattr(module, name, wrap(getattr(module, name)))


def killed_at_each_operation(folder: Path, step: str) -> None:
    old, new = some(5), some(4, frozenset({"energy", "charge"}), seed=100)
    cut = {"chunk_rows": 4, "shard_rows": 32}  # the append starts in a shard that is partly filled
    calls: dict[str, tuple[Callable[[Path], object], list[AtomicData]]] = {
        "first": (lambda path: AtomicDataZarrWriter(path, **cut).write(new), new),
        "append": (lambda path: AtomicDataZarrWriter(path, **cut).append(new), old + new),
        "overwrite": (lambda path: AtomicDataZarrWriter(path, **cut, overwrite=True).write(new), new),
        "delete": (
            lambda path: AtomicDataZarrWriter(path, **cut).delete([0, 4]),
            [d for i, d in enumerate(old) if i not in (0, 4)],
        ),
        "defragment": (lambda path: AtomicDataZarrWriter(path, **cut).defragment(), old),
    }
    call, expected = calls[step]
    path = folder / "a.zarr"
    AtomicDataZarrWriter(folder / "old.zarr", **cut).write(old)
    count = 0
    while True:
        count += 1
        shutil.rmtree(path, ignore_errors=True)
        if step != "first":
            shutil.copytree(folder / "old.zarr", path)

        def child(count: int = count) -> None:
            die_at(count)
            call(path)

        status = in_child(child)
        if step == "first":
            try:
                check(path, expected)
            except DataError as error:
                assert "no committed store" in str(error), error
        else:
            check(path, old, expected)
        if status == 0:
            check(path, expected)
            break
        assert os.WIFSIGNALED(status), status
        committed = step == "first" and (path / "zarr.json").exists()
        done = len(everything(path)) == len(expected) if step in ("append", "delete") else committed
        if not done:
            call(path)  # the same call again
        check(path, expected)
        names = {p.name for p in path.iterdir()}
        assert len(names) == 2 and "zarr.json" in names, names
        assert count < 400
    print(count)


def killed_at_random(folder: Path) -> None:
    path, data = folder / "a.zarr", some(600)
    AtomicDataZarrWriter(path, **CUT).write(data[:5])

    def keep_appending() -> None:
        while True:
            AtomicDataZarrWriter(path, **CUT).append(data[:7])

    rng = random.Random(0)
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            keep_appending()
        time.sleep(rng.uniform(0.01, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = everything(path)
        assert len(found) % 7 == 5
        assert all(same(a, data[i] if i < 5 else data[(i - 5) % 7]) for i, a in enumerate(found))
    AtomicDataZarrWriter(path, **CUT).append(data[:7])
    assert len(everything(path)) == len(found) + 7


def two_writers(folder: Path) -> None:
    written = 0
    for round_ in range(20):
        path = folder / f"{round_}.zarr"
        base, parts = some(3), [some(8, seed=100), some(8, seed=200)]
        AtomicDataZarrWriter(path, **CUT).write(base)
        start = time.monotonic() + 0.02

        def append(part: list[AtomicData], path: Path = path, start: float = start) -> None:
            while time.monotonic() < start:
                pass
            try:
                AtomicDataZarrWriter(path, **CUT).append(part)
            except DataError as error:
                assert "another writer" in str(error), error
                os._exit(7)

        pids = []
        for part in parts:
            pid = os.fork()
            if pid == 0:
                try:
                    append(part)
                    os._exit(0)
                except BaseException as error:  # noqa: BLE001
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(codes) <= {0, 7} and 0 in codes, codes
        kept = [part for part, code in zip(parts, codes, strict=True) if code == 0]
        written += len(kept)
        check(path, *([*base, *(d for part in order for d in part)] for order in (kept, kept[::-1])))
    print(written)


def fresh_reader(folder: Path) -> None:
    reader = AtomicDataZarrReader(folder / "a.zarr")
    assert len(reader) == 150 and "dipole" in reader.field_names
    assert same(reader.read(149), some(50, LABELS | {"dipole"}, seed=500)[49])
    assert "dipole" not in reader.read(99)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
