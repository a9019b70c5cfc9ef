"""How fast batches come: from a zarr store, shuffled, and from memory, beside what plain zarr and NumPy need for the same rows.

    python benchmarks/loader.py [--structures 20000] [--rounds 5] [--other ADAPTER.py]

prints one JSON line a figure: ``name``, ``value``, ``unit``, and what it is to be held against. The store is made in a temporary folder:
molecules of 5 to 60 atoms with positions, atomic numbers, energy and forces. The floor decodes every chunk once with zarr and then slices
the arrays batch by batch with NumPy, in the same random order; it makes no tensors and checks nothing. Floor and loader take turns, and
the best of the rounds is kept, because other work on the machine only ever slows one down.

To measure another package, give a file that defines ``write(arrays, path)`` and ``batches(path, batch_size)``, the second returning an
iterator over the batches of one shuffled epoch, with ``path`` opened anew; ``arrays`` has positions, atomic_numbers, forces, energy, counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from nvalchemi.data import Batch, Level
from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter, DataLoader, Dataset, InMemoryDataset
from nvalchemi.data.transforms import NeighborList

BATCH = 64
Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--structures", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--other", type=Path, help="a file with write(arrays, path) and batches(path, batch_size)")
    parser.add_argument("--first-batch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_batch is not None:
        print(json.dumps(first_batch(options.first_batch, adapter(options.other).batches)))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        from_store(options, Path(folder))
        if options.other is None:
            random_against_contiguous(Path(folder), options.rounds)
            from_memory(options, Path(folder))


def report(name: str, value: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": float(f"{value:.4g}"), "unit": unit, **more}), flush=True)


# -- the data --------------------------------------------------------------------------------------------------------------------------


def molecules(n: int, smallest: int = 5, largest: int = 60) -> Arrays:
    random = np.random.default_rng(0)
    counts = random.integers(smallest, largest + 1, n)
    atoms = int(counts.sum())
    # As dense as a molecule: about 0.1 atoms a cubic ångström, in a cube.
    edge = np.repeat((counts / 0.1) ** (1 / 3), counts)[:, None]
    return {
        "positions": (random.random((atoms, 3)) * edge).astype(np.float32),
        "atomic_numbers": random.choice([1, 6, 7, 8], atoms),
        "forces": random.normal(size=(atoms, 3)).astype(np.float32),
        "energy": random.normal(size=n),
        "counts": counts,
    }


def as_batch(arrays: Arrays) -> Batch:
    levels = {"positions": Level.ATOM, "atomic_numbers": Level.ATOM, "forces": Level.ATOM, "energy": Level.SYSTEM}
    fields = {name: torch.from_numpy(arrays[name]) for name in levels}
    return Batch(fields, levels, torch.from_numpy(np.concatenate([[0], np.cumsum(arrays["counts"])])))


class Ours:
    """This package, as the file of ``--other`` is another."""

    @staticmethod
    def write(arrays: Arrays, path: Path) -> None:
        AtomicDataZarrWriter(path).write(as_batch(arrays))

    @staticmethod
    def batches(path: Path, batch_size: int) -> Iterator[Any]:
        return iter(DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=batch_size, shuffle=True))


def adapter(path: Path | None) -> Any:
    if path is None:
        return Ours
    spec = importlib.util.spec_from_file_location("other", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the floor -------------------------------------------------------------------------------------------------------------------------


def floor_batches(path: Path, order: np.ndarray) -> Iterator[Arrays]:
    root = zarr.open_group(path, mode="r")
    data = root[root.attrs["nvalchemi"]["revision"]]
    ends = data["ends/atom"][:]
    atom = {name: data[f"atom/{name}"][:] for name in ("positions", "atomic_numbers", "forces")}
    energy = data["system/energy"][:]
    starts, counts = np.concatenate([[0], ends[:-1]]), np.diff(ends, prepend=0)
    for first in range(0, len(order), BATCH):
        index = order[first : first + BATCH]
        count = counts[index]
        begins = np.cumsum(count) - count
        rows = np.repeat(starts[index] - begins, count) + np.arange(count.sum())
        yield {**{name: array[rows] for name, array in atom.items()}, "energy": energy[index]}


def seconds(batches: Iterator[Any]) -> float:
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def opened(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Puts what ``make`` costs inside the iteration, where it is timed."""
    yield from make()


def first_batch(path: Path, batches: Callable[[Path, int], Iterator[Any]]) -> list[float]:
    """Seconds by the clock and of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    next(iter(batches(path, BATCH)))
    return [time.perf_counter() - begin, time.process_time() - busy]


# -- the figures -----------------------------------------------------------------------------------------------------------------------


def from_store(options: argparse.Namespace, folder: Path) -> None:
    n, package = options.structures, adapter(options.other)
    arrays, path, plain = molecules(n), folder / "measured.zarr", folder / "plain.zarr"
    begin = time.perf_counter()
    package.write(arrays, path)
    report("write", n / (time.perf_counter() - begin), "structures/s", structures=n)
    Ours.write(arrays, plain)
    order = np.random.default_rng(1).permutation(n)
    floor, cold = [], []
    for _ in range(options.rounds):
        floor.append(seconds(floor_batches(plain, order)))
        cold.append(seconds(opened(lambda: package.batches(path, BATCH))))
    report("floor_epoch", n / min(floor), "structures/s", what="zarr decodes every chunk once, NumPy slices each batch")
    report(
        "loader_epoch",
        n / min(cold),
        "structures/s",
        what="shuffled, from opening the store",
        floor_ratio=round(min(floor) / min(cold), 3),
    )
    if options.other is None:
        loader = DataLoader(Dataset(AtomicDataZarrReader(path)), batch_size=BATCH, shuffle=True)
        warm = [seconds(iter(loader)) for _ in range(options.rounds + 1)][1:]
        report("loader_epoch_again", n / min(warm), "structures/s", what="every chunk is decoded already")
    command = [sys.executable, __file__, "--first-batch", str(path), *(["--other", str(options.other)] if options.other else [])]
    first = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    what = "new process, from opening the store; imports are done"
    report(
        "first_batch", min(wall for wall, _ in first), "s", what=what, processor=round(min(cpu for _, cpu in first), 3), limit=0.1
    )


def random_against_contiguous(folder: Path, rounds: int) -> None:
    """100 batches of 64 of 2000 structures, random against contiguous, the store opened anew for each."""
    path = folder / "small.zarr"
    Ours.write(molecules(2000), path)
    random = np.random.default_rng(2)
    contiguous = [[(start + k) % 2000 for k in range(BATCH)] for start in range(0, 100 * BATCH, BATCH)]
    shuffled = [random.integers(0, 2000, BATCH).tolist() for _ in range(100)]

    def best(batches: list[list[int]]) -> float:
        times = []
        for _ in range(rounds):
            dataset = Dataset(AtomicDataZarrReader(path))
            times.append(seconds(iter(DataLoader(dataset, batch_sampler=batches))))
        return min(times)

    report("random_over_contiguous", best(shuffled) / best(contiguous), "ratio", limit=3)


def from_memory(options: argparse.Namespace, folder: Path) -> None:
    n, path = options.structures, folder / "measured.zarr"
    ready, served = [], []
    for _ in range(options.rounds):
        begin = time.perf_counter()
        dataset = InMemoryDataset(AtomicDataZarrReader(path))
        ready.append(time.perf_counter() - begin)
        served.append(seconds(iter(DataLoader(dataset, batch_size=BATCH, shuffle=True))))
    report("resident_ready", min(ready), "s", structures=n, limit=0.3)
    report("resident_epoch", n / min(served), "structures/s", limit=150_000)
    some = as_batch(molecules(min(n, 4000)))
    begin = time.perf_counter()
    dataset = InMemoryDataset(some, transforms=[NeighborList(5.0)])
    report("resident_ready_with_edges", time.perf_counter() - begin, "s", structures=len(dataset), cutoff=5.0)
    served = [seconds(iter(DataLoader(dataset, batch_size=BATCH, shuffle=True))) for _ in range(options.rounds)]
    per_structure = dataset.read_many(range(len(dataset))).num_edges / len(dataset)
    report("resident_epoch_with_edges", len(dataset) / min(served), "structures/s", edges_per_structure=round(per_structure))
    dataset = InMemoryDataset(as_batch(molecules(950, 9, 9)), transforms=[NeighborList(5.0)])
    small = [[int(i) for i in row] for row in np.random.default_rng(3).integers(0, 950, (400, 5))]
    times = []
    for rows in itertools.chain(*[small] * options.rounds):
        begin = time.perf_counter()
        dataset.read_many(rows)
        times.append(time.perf_counter() - begin)
    report("small_batch", float(np.median(times)) * 1e6, "µs", what="5 molecules of 9 atoms with edges", limit=60)
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    step = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(20)])
    x = torch.randn(64, 128)

    def steps(batches: Iterator[Any]) -> float:
        begin = time.process_time()
        for _ in batches:
            step(x).sum().backward()
        return (time.process_time() - begin) / 40

    added = []
    for _ in range(8 * options.rounds):
        bare = steps(iter(range(40)))
        added.append(steps(loader.iter_from(len(loader) - 40)) - bare)
    value = float(np.median(added)) * 1e6
    report("small_batch_in_a_loop", value, "µs", what="processor time added to a step by its batch", step=round(bare * 1e6))


if __name__ == "__main__":
    main()
