"""Ranks find each other in a store that holds what dead ones have left."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from nvalchemi.distributed.meeting import fresh_store


def attempt(store, size, delays, limit=20.0):
    """What each rank writes into and reads from its store, as threads that come one after the other."""
    read = {}

    def rank(number):
        time.sleep(delays[number])
        mine = fresh_store(store, number, size, timedelta(seconds=limit))
        assert not mine.check([f"address/{number}"])
        mine.set(f"address/{number}", f"{id(delays)} of {number}")
        read[number] = [mine.get(f"address/{other}").decode() for other in range(size)]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
    return read, [f"{id(delays)} of {number}" for number in range(size)]


@pytest.mark.parametrize("late", range(3))
def test_an_attempt_reads_nothing_of_those_before(late):
    """Also of another number of ranks, and whichever rank comes late."""
    store = dist.HashStore()
    for size in (3, 3, 2, 4):
        delays = [0.2 if number == late else 0.0 for number in range(size)]
        read, wanted = attempt(store, size, delays)
        assert read == dict.fromkeys(range(size), wanted)


def test_one_rank_meets_itself():
    store = dist.HashStore()
    first, second = (fresh_store(store, 0, 1, timedelta(seconds=1)) for _ in range(2))
    first.set("a", "1")
    assert first.check(["a"]) and not second.check(["a"])


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(TimeoutError, match="ranks 1, 2"):
        fresh_store(dist.HashStore(), 0, 3, timedelta(seconds=0.05))
