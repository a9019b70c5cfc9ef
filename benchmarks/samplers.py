"""What an order of many samples costs: to make it, to get the first batch of it, to change the epoch, and in memory.

    python benchmarks/samplers.py [--largest 1000000000] [--theirs 10000000]

prints one JSON line a figure, for 10^5, 10^6, ... samples, shuffled, in batches of 64, on rank 3 of 8:

- ``construction``: making the sampler and its batches.
- ``first_batch``: from there to the first list of indices.
- ``set_epoch``: telling the epoch, and ``next_first_batch``: from there to the first batch of the new order.
- ``memory``: what the process grows by through all of these, at its peak.
- ``throughput``: samples a second, over 100,000 of them.

Each sampler is measured in a process forked for it, as memory that is given back would hide the next one's. torch's ``DistributedSampler``
is measured up to ``--theirs`` samples: it draws a list of all. ``limit`` is what is asked of ours, at 10^9 samples.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.utils.data

from nvalchemi.data.datapipes import (
    BatchSampler,
    BlockShuffleSampler,
    DistributedSampler,
    MultiDatasetBatchSampler,
    MultiDatasetSampler,
    PreShardedSampler,
)

BATCH, RANKS, RANK = 64, 8, 3
LIMITS = {"first_batch": 0.05, "next_first_batch": 0.05, "memory": 20.0, "set_epoch": 1e-4}


def children(n: int) -> Any:
    """What the samplers of a MultiDataset need of it: three data sets of unlike sizes."""
    sizes = (n // 2, n // 3, n - n // 2 - n // 3)
    return SimpleNamespace(lengths=sizes, names=("a", "b", "c"))


def torchs(n: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(range(n), RANKS, RANK)  # type: ignore[arg-type]
    batches = torch.utils.data.BatchSampler(sampler, BATCH, False)
    batches.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    return batches


def own_store(n: int) -> Any:
    sizes = [n // RANKS + number for number in range(RANKS)]
    return BatchSampler(PreShardedSampler(sizes[RANK], sizes, RANKS, RANK), BATCH)


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "torch DistributedSampler": torchs,
    "DistributedSampler": lambda n: BatchSampler(DistributedSampler(n, RANKS, RANK), BATCH),
    "BlockShuffleSampler": lambda n: BatchSampler(BlockShuffleSampler(n, 1024, 64, RANKS, RANK), BATCH),
    "PreShardedSampler": own_store,
    "MultiDatasetSampler": lambda n: BatchSampler(MultiDatasetSampler(children(n), num_replicas=RANKS, rank=RANK), BATCH),
    "MultiDatasetBatchSampler": lambda n: MultiDatasetBatchSampler(children(n), BATCH, num_replicas=RANKS, rank=RANK),
    "MultiDatasetBatchSampler.balanced": lambda n: MultiDatasetBatchSampler.balanced(
        children(n), BATCH, epoch_policy="max_size", num_replicas=RANKS, rank=RANK
    ),
}
UNITS = {"memory": "MB", "throughput": "samples/s"}


def resident(line: str) -> float:
    """``VmRSS`` or ``VmHWM``, the peak, of this process in MB."""
    (found,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(line))
    return int(found.split()[1]) / 1024


def measured(make: Callable[[int], Any], n: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, marks = resident("VmRSS"), [time.perf_counter()]
    sampler = make(n)
    marks.append(time.perf_counter())
    first = next(iter(sampler))
    marks.append(time.perf_counter())
    sampler.set_epoch(1)
    marks.append(time.perf_counter())
    assert next(iter(sampler)) != first
    marks.append(time.perf_counter())
    names = ("construction", "first_batch", "set_epoch", "next_first_batch")
    found = {name: b - a for name, a, b in zip(names, marks, marks[1:], strict=False)}
    found["memory"] = resident("VmHWM") - before
    batches = iter(sampler)
    begin = time.perf_counter()
    count = sum(len(batch) for batch in islice(batches, 100_000 // BATCH))
    found["throughput"] = count / (time.perf_counter() - begin)
    return found


def in_a_fork(make: Callable[[int], Any], n: int) -> dict[str, float]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps(measured(make, n)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: dict[str, float] = json.loads(text)
    return found


def sizes(largest: int) -> Iterator[int]:
    n = 10**5
    while n <= largest:
        yield n
        n *= 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--largest", type=int, default=10**9)
    parser.add_argument("--theirs", type=int, default=10**7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in SAMPLERS.items():
        next(iter(make(10**5)))  # imports, and NumPy's first calls
        for n in sizes(options.theirs if name.startswith("torch") else options.largest):
            for figure, value in in_a_fork(make, n).items():
                limit = {"limit": LIMITS[figure]} if n == 10**9 and figure in LIMITS else {}
                line = {"name": figure, "value": float(f"{value:.3g}"), "unit": UNITS.get(figure, "s")}
                print(json.dumps({**line, "sampler": name, "samples": n, **limit}), flush=True)


if __name__ == "__main__":
    main()
