"""How many threads torch computes in on the CPU, while a command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Compute in ``count`` threads, and in as many as before afterwards; ``None`` leaves the number alone.

    On batches of small molecules a second thread gains nothing, and waits for whatever else the machine does.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
