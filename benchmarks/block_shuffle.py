"""How random a shuffle by blocks is, and what it saves where a store does not fit in memory.

    python benchmarks/block_shuffle.py [--structures 20000] [--rounds 3]

prints one JSON line a figure. Randomness, for each window, beside a full shuffle of the same samples (whose value is 1 in all three):

- ``batch_spread``: every sample has its number in the store as its value, as if the store were sorted. The variance of the batches' means,
  over that of a full shuffle's. 1 means that a batch is as good a picture of sorted data as it is there.
- ``co_occurrence``: how often two samples of one block come in one batch, over how often they do in a full shuffle.
- ``displacement``: how far a sample lies from its place in the store, on the average, over a third of the length.

Reading: a store of molecules of 5 to 60 atoms, with a cache that holds a quarter of it. ``chunks_decoded`` is how often each chunk is
decoded in an epoch, on the average; ``epoch`` is the speed of the loader. The three orders take turns, and the best of the rounds is kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nvalchemi.data import Batch, Level
from nvalchemi.data.datapipes import (
    AtomicDataZarrReader,
    AtomicDataZarrWriter,
    BlockPermutation,
    BlockShuffleSampler,
    DataLoader,
    Dataset,
    Permutation,
    shard_loader,
)

Orders = Sequence[NDArray[np.int64]]
BATCH = 64


def batch_spread(orders: Orders, batch: int) -> float:
    """Variance of the batches' mean positions in the store, over that of a full shuffle: (n² - 1) / 12 batch, without replacement."""
    n = len(orders[0])
    means = np.concatenate([order[: n // batch * batch].reshape(-1, batch).mean(1) for order in orders])
    expected = (n * n - 1) / 12 / batch * (n - batch) / (n - 1)
    return float(np.mean((means - (n - 1) / 2) ** 2) / expected)


def co_occurrence(orders: Orders, batch: int, block: int) -> float:
    """Pairs of samples of one block that come in one batch, over their number in a full shuffle."""
    n, pairs, batches = len(orders[0]), 0, 0
    for order in orders:
        for rows in order[: n // batch * batch].reshape(-1, batch) // block:
            counts = np.bincount(rows, minlength=-(-n // block))
            pairs += int((counts * (counts - 1)).sum())
            batches += 1
    sizes = np.bincount(np.arange(n) // block).astype(float)
    expected = batches * batch * (batch - 1) * float((sizes * (sizes - 1)).sum()) / n / (n - 1)
    return pairs / expected


def displacement(orders: Orders) -> float:
    """Mean distance of a sample from its place in the store, over that of a full shuffle: (n² - 1) / 3 n."""
    n = len(orders[0])
    found = np.mean([np.abs(order - np.arange(n)).mean() for order in orders])
    return float(found / ((n * n - 1) / 3 / n))


def report(name: str, value: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": float(f"{value:.4g}"), "unit": unit, **more}), flush=True)


def randomness() -> None:
    n, block, epochs = 1_000_000, 1000, 3
    full = [Permutation(n, (1, epoch))(np.arange(n)) for epoch in range(epochs)]
    cases: list[tuple[str, Orders]] = [("full", full)]
    for window in (1, 4, 16, 64, 256):
        orders = [BlockPermutation(n, (1, epoch), block, window)(np.arange(n)) for epoch in range(epochs)]
        cases.append((str(window), orders))
    for window, orders in cases:
        facts = {"window": window, "samples": n, "block_size": block}
        for batch in (64, 512):
            report("batch_spread", batch_spread(orders, batch), "of a full shuffle", batch=batch, **facts)
        report("co_occurrence", co_occurrence(orders, BATCH, block), "of a full shuffle", batch=BATCH, **facts)
        report("displacement", displacement(orders), "of a full shuffle", **facts)


def molecules(n: int) -> Batch:
    random = np.random.default_rng(0)
    counts = random.integers(5, 61, n)
    atoms = int(counts.sum())
    fields = {
        "positions": torch.from_numpy(random.random((atoms, 3), dtype=np.float32) * 9),
        "atomic_numbers": torch.from_numpy(random.choice([1, 6, 7, 8], atoms)),
        "forces": torch.from_numpy(random.normal(size=(atoms, 3)).astype(np.float32)),
        "energy": torch.from_numpy(random.normal(size=n)),
    }
    levels = {name: Level.SYSTEM if name == "energy" else Level.ATOM for name in fields}
    return Batch(fields, levels, torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])))


def reading(structures: int, rounds: int, folder: Path) -> None:
    path, batch = folder / "a.zarr", molecules(structures)
    # Smaller chunks than by default, so that a store that is made in seconds has as many as one that is not.
    AtomicDataZarrWriter(path, chunk_rows=512).write(batch)
    size = sum(tensor.nbytes for tensor in batch.fields.values())
    opened = AtomicDataZarrReader(path)
    chunks = sum(cache.chunks for cache in opened._store.state.caches.values())
    facts = {"structures": structures, "chunks": chunks, "cache": 0.25, "batch": BATCH}

    def epoch(order: str, rank: int = 0, ranks: int = 1) -> tuple[float, float]:
        dataset = Dataset(AtomicDataZarrReader(path, cache_bytes=size // 4))
        if order == "blocks":
            loader = DataLoader(dataset, BATCH, sampler=BlockShuffleSampler(dataset, window=16))
        else:
            loader = DataLoader(dataset, BATCH, shuffle=order == "full")
        loader = shard_loader(loader, rank, ranks)
        begin = time.perf_counter()
        count = sum(len(batch) for batch in loader)
        return count / (time.perf_counter() - begin), dataset.reader._store.decoded / chunks

    best: dict[str, float] = {}
    for order in ("sequential", "blocks", "full"):
        report("chunks_decoded", epoch(order)[1], "times an epoch", order=order, **facts)
    for order in ("blocks", "full"):
        decoded = sum(epoch(order, rank, 4)[1] for rank in range(4))
        report("chunks_decoded", decoded, "times an epoch, on 4 ranks together", order=order, **facts)
    for _ in range(rounds):
        for order in ("sequential", "blocks", "full"):
            best[order] = max(best.get(order, 0.0), epoch(order)[0])
    for order, speed in best.items():
        report("epoch", speed, "structures/s", order=order, of_full_shuffle=round(speed / best["full"], 2), **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--structures", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    randomness()
    with tempfile.TemporaryDirectory() as folder:
        reading(options.structures, options.rounds, Path(folder))


if __name__ == "__main__":
    main()
