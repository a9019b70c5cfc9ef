"""Forked readers, in a process of its own: a parent that has read, and one that is reading, in threads, while it forks."""

from __future__ import annotations

import os
import sys
import threading

import torch

from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader


class Structures(torch.utils.data.Dataset):
    def __init__(self, reader: AtomicDataZarrReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.reader.read_many(indices).positions


def main(path: str) -> None:
    torch.set_num_threads(1)
    reader = AtomicDataZarrReader(path)
    expected = [reader.read_many(range(start, start + 8)).positions for start in range(0, 64, 8)]
    loader = torch.utils.data.DataLoader(
        Structures(reader), batch_size=8, num_workers=2, multiprocessing_context="fork", collate_fn=lambda batch: batch
    )
    assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))
    print("workers")

    small = AtomicDataZarrReader(path, cache_bytes=0)
    stop = threading.Event()

    def keep_reading() -> None:
        while not stop.is_set():
            small.read_many([1, 50, 30])

    thread = threading.Thread(target=keep_reading)
    thread.start()
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.equal(small.read_many(range(8)).positions, expected[0]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    stop.set()
    thread.join()
    print("forks")


if __name__ == "__main__":
    main(sys.argv[1])
