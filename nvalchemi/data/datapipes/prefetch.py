"""Items made ahead of time in a background thread.

:class:`Prefetcher` runs an iterator in a thread of its own and hands its items on in order, at most ``depth`` of them waiting. An exception
of the iterator is raised in the consumer, after the items that came before it, with the traceback of the thread. The thread ends when the
iterator does, when the consumer calls ``close`` or is garbage-collected, and at interpreter exit. Each Prefetcher has a thread and a queue
of its own, so several may run over one loader at once.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from nvalchemi.errors import ConfigError

T = TypeVar("T")


class _Channel(Generic[T]):
    """A bounded queue with two ends; it never refers to the Prefetcher, so that the thread does not keep its consumer alive."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.pid = os.getpid()
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.ended = False  # by the producer: nothing more will come
        self.closed = False  # by the consumer: nothing more is wanted
        # Re-entrant, because the garbage collector may run `close` in a thread that holds the lock already.
        lock = threading.RLock()
        self.not_empty = threading.Condition(lock)
        self.not_full = threading.Condition(lock)

    def put(self, item: T) -> bool:
        """Append ``item`` once there is room; False if the consumer has gone."""
        with self.not_full:
            while len(self.items) >= self.depth and not self.closed:
                self.not_full.wait()
            if self.closed:
                return False
            self.items.append(item)
            self.not_empty.notify()
            return True

    def end(self, error: BaseException | None) -> None:
        """Say that nothing more will come, and why if it is an error."""
        with self.not_empty:
            self.error, self.ended = error, True
            self.not_empty.notify_all()

    def take(self) -> T:
        """Next item; StopIteration after the last, or the producer's error once."""
        with self.not_empty:
            while not (self.items or self.ended or self.closed):
                self.not_empty.wait()
            if self.items:
                self.not_full.notify()
                return self.items.popleft()
            error, self.error = self.error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame; without this the two would keep each other alive

    def close(self) -> None:
        """Say that nothing more is wanted. A forked copy does nothing: its lock may be held by a thread that was not copied."""
        if os.getpid() != self.pid:
            return
        with self.not_full:
            self.closed = True
            self.items.clear()
            self.not_full.notify_all()
            self.not_empty.notify_all()


_running: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Wait for the threads still at work: one that is inside a library when the interpreter is taken down can crash it."""
    for thread, channel in list(_running.items()):
        channel.close()
        thread.join(timeout=10)


def _produce(source: Iterator[T], channel: _Channel[T]) -> None:
    error: BaseException | None = None
    try:
        try:
            for item in source:
                if not channel.put(item):
                    break
                del item  # it is the consumer's now, and must not live on in here while the next one is made
        finally:
            if hasattr(source, "close"):
                source.close()
    except BaseException as raised:  # noqa: BLE001 - whatever it is, it is raised again in the consumer
        error = raised
    channel.end(error)


class Prefetcher(Iterator[T]):
    """Iterator over ``source``, run ahead by up to ``depth`` items in a background thread.

    Parameters
    ----------
    source
        Any iterator; it is advanced in the thread only, and closed there if it has ``close`` (generators have).
    depth
        Items that may wait, at least 1. One more is being made.
    name
        Name of the thread, for debuggers.
    """

    def __init__(self, source: Iterator[T], depth: int, *, name: str = "nvalchemi-prefetch") -> None:
        if depth < 1:
            raise ConfigError("a prefetcher keeps at least one item ready", found=f"depth={depth}", needed="1 or more")
        self._channel: _Channel[T] = _Channel(depth)
        # A daemon: threading waits for others before anything at exit could tell them to end.
        self._thread = threading.Thread(target=_produce, args=(source, self._channel), name=name, daemon=True)
        weakref.finalize(self, self._channel.close).atexit = False
        self._thread.start()
        _running[self._thread] = self._channel

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._channel.pid:  # waiting would be for ever: a fork does not copy threads
            raise ConfigError("this iterator was begun in another process", fix="begin a new one in this process")
        return self._channel.take()

    def close(self) -> None:
        """End the thread and drop what waits, and return once the item being made is done with. A second call does nothing."""
        self._channel.close()
        if os.getpid() == self._channel.pid and self._thread is not threading.current_thread():
            self._thread.join()


def in_bursts(source: Iterator[T], size: int) -> Iterator[T]:
    """The items of ``source``, made ``size`` at a time without a thread, for items that cost microseconds.

    Between two steps of training the code and the data that make an item have left the processor's caches: the first of a burst costs
    several times as much as each of the others. An error is raised after the items that were made before it.
    """
    error: Exception | None = None
    waiting: deque[T] = deque()
    while error is None:
        try:
            waiting.extend(islice(source, size))  # what came before an error stays
        except Exception as raised:  # noqa: BLE001 - raised below, in its turn
            error = raised
        if not waiting and error is None:
            return
        while waiting:
            yield waiting.popleft()
    raise error
