"""What takes long says in the log that it goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("nvalchemi")

FIRST = 10.0  # seconds before the first line; each pause is twice the one before it
LONGEST = 600.0  # seconds between two lines


@contextmanager
def alive(what: str, amount: Callable[[], str] | None = None, *, here: bool = True) -> Iterator[None]:
    """Say while something is done that it is, and for how long: after ten seconds, and less and less often.

    The lines are warnings, because a script that sets up no log shows nothing less.

    Parameters
    ----------
    what
        Is being done, such as ``"writing the checkpoint of step 10"``.
    amount
        Says how much of it is done; it is called by another thread.
    here
        Whether this process is the one to say so.
    """
    if not here:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_tell, args=(over, what, amount), name="nvalchemi-alive", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _tell(over: threading.Event, what: str, amount: Callable[[], str] | None) -> None:
    begun, pause = time.monotonic(), FIRST
    while not over.wait(pause):
        pause = min(2 * pause, LONGEST)
        much = "" if amount is None else f": {amount()}"
        logger.warning("still %s%s, for %.0f s now", what, much, time.monotonic() - begun)


def size_text(size: float) -> str:
    """Bytes in words, such as ``"1.2 GB"``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
