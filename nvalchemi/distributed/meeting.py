"""A clean store for processes that torchrun has started again.

torchrun keeps one store for all its attempts, and so the processes of an attempt read the addresses that those of an earlier one left:
they try to connect to processes that are dead (https://github.com/pytorch/pytorch/issues/135712 and issues/167288). No variable that
torchrun sets is new in each attempt and the same on all nodes, hence the ranks agree on a name of their own for the attempt.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

PAUSE = 0.005  # seconds between two looks for ranks that have not come yet


def fresh_store(shared: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A part of ``shared`` in which nobody has written yet, the same on all ranks, whatever earlier processes have left in it.

    Each rank shows a number that it has just drawn, and takes the name only from an answer to that number; rank 0 answers whatever it is
    shown until all have taken the name that it has drawn for this attempt.

    Parameters
    ----------
    shared
        The store through which the ranks meet.
    rank, world_size
        Which process this is, of how many.
    timeout
        How long rank 0 waits for the others; they wait as long as ``shared`` does.

    Raises
    ------
    TimeoutError
        On rank 0, where others do not come; torch's own error on those.
    """
    notes = dist.PrefixStore("nvalchemi/meeting", shared)
    drawn = secrets.token_hex(8)
    if rank > 0:
        notes.set(f"shown/{rank}", drawn)
        name = notes.get(f"answer/{drawn}").decode()
        notes.set(f"taken/{name}/{rank}", "1")
    else:
        name = drawn
        _answer(notes, name, set(range(1, world_size)), time.monotonic() + timeout.total_seconds())
    return dist.PrefixStore(f"nvalchemi/attempt/{name}", shared)


def _answer(notes: dist.Store, name: str, missing: set[int], end: float) -> None:
    answered: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            if not notes.check([f"shown/{rank}"]):
                continue
            shown = notes.get(f"shown/{rank}").decode()
            if answered.get(rank) != shown:
                notes.set(f"answer/{shown}", name)
                answered[rank] = shown
            if notes.check([f"taken/{name}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > end:
            raise TimeoutError(f"ranks {', '.join(map(str, sorted(missing)))} did not come to the meeting of the ranks in time")
        time.sleep(PAUSE)
