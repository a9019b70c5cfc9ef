from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import pytest

from nvalchemi.data.datapipes.prefetch import Prefetcher, in_bursts
from nvalchemi.errors import ConfigError


def _threads() -> int:
    return sum(thread.name == "nvalchemi-prefetch" for thread in threading.enumerate())


def _settles(condition, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_items_arrive_in_order_and_the_thread_ends() -> None:
    before = _threads()
    prefetcher = Prefetcher(iter(range(100)), 3)
    assert list(prefetcher) == list(range(100))
    assert list(prefetcher) == []
    assert _settles(lambda: _threads() == before)


def test_no_more_than_depth_items_wait() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    prefetcher = Prefetcher(source(), 3)
    assert _settles(lambda: len(made) == 4)
    time.sleep(0.02)
    assert len(made) == 4  # three wait, one is in the thread's hand
    assert next(prefetcher) == 0
    assert _settles(lambda: len(made) == 5)
    prefetcher.close()


def test_error_comes_after_the_items_before_it_with_the_threads_traceback() -> None:
    def breaking_source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("lost chunk")

    prefetcher = Prefetcher(breaking_source(), 8)
    assert next(prefetcher) == 1
    assert next(prefetcher) == 2
    with pytest.raises(KeyError, match="lost chunk") as caught:
        next(prefetcher)
    assert "breaking_source" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(StopIteration):
        next(prefetcher)


@pytest.mark.parametrize("how", ["close", "del", "cycle"])
def test_a_consumer_that_leaves_ends_the_thread_and_the_source(how: str) -> None:
    before = _threads()
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    prefetcher = Prefetcher(source(), 2)
    next(prefetcher)
    if how == "close":
        prefetcher.close()
        prefetcher.close()
        assert list(prefetcher) == []
    elif how == "cycle":
        prefetcher.self = prefetcher
    del prefetcher
    gc.collect()
    assert closed.wait(2)
    assert _settles(lambda: _threads() == before)


def test_items_are_not_kept_alive_by_the_thread() -> None:
    class Item:
        pass

    release = threading.Event()

    def source() -> Iterator[Item]:
        yield Item()
        release.wait(2)
        yield Item()

    prefetcher = Prefetcher(source(), 1)
    item = next(prefetcher)
    reference = weakref.ref(item)
    del item
    assert reference() is None
    release.set()
    prefetcher.close()


def test_many_at_once() -> None:
    prefetchers = [Prefetcher(iter(range(50)), 2) for _ in range(8)]
    for i in range(50):
        assert [next(prefetcher) for prefetcher in prefetchers] == [i] * 8


def test_several_threads_may_share_one_and_all_come_to_an_end() -> None:
    prefetcher = Prefetcher(iter(range(200)), 2)
    found: list[list[int]] = [[] for _ in range(4)]
    consumers = [threading.Thread(target=lambda part=part: part.extend(prefetcher), daemon=True) for part in found]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join(timeout=10)
        assert not consumer.is_alive()
    assert sorted(i for part in found for i in part) == list(range(200))


def test_leaving_at_any_moment_never_hangs() -> None:
    before = _threads()
    for taken in range(60):
        prefetcher = Prefetcher(iter(range(40)), 1 + taken % 3)
        for _ in zip(range(taken), prefetcher, strict=False):
            pass
        prefetcher.close()
    assert _settles(lambda: _threads() <= before)


def test_depth_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="depth=0"):
        Prefetcher(iter([]), 0)


def test_a_forked_child_is_told_and_does_not_wait() -> None:
    prefetcher = Prefetcher(iter(range(100)), 2)
    next(prefetcher)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(prefetcher)
        except ConfigError:
            prefetcher.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    prefetcher.close()


def test_the_interpreter_ends_with_a_prefetcher_at_work() -> None:
    script = """
import itertools
from nvalchemi.data.datapipes.prefetch import Prefetcher, in_bursts
prefetcher = Prefetcher(itertools.count(), 2)
assert next(prefetcher) == 0
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 3
    assert not done.stderr


def test_bursts() -> None:
    made: list[int] = []

    def source(stop: int, error: bool) -> Iterator[int]:
        for i in range(stop):
            made.append(i)
            yield i
        if error:
            raise KeyError("lost")

    for stop in range(10):
        assert list(in_bursts(source(stop, False), 4)) == list(range(stop))
        found = []
        with pytest.raises(KeyError, match="lost"):
            for i in in_bursts(source(stop, True), 4):
                found.append(i)  # noqa: PERF402
        assert found == list(range(stop))
    made.clear()
    burst = in_bursts(source(10, False), 4)
    seen = [next(burst) and len(made) for _ in range(5)]
    assert len(made) == 8
    assert seen[1:] == [4, 4, 4, 8]
