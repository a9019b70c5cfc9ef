"""Whether a run is interrupted, asked in the midst of something that each rank does at its own pace."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

from nvalchemi.distributed.collectives import agree
from nvalchemi.distributed.notices import post, posted

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext

SELDOM = 0.5  # seconds between two looks at the other ranks' notes

_numbers = count(1)


class Interruption:
    """Ranks that are told to stop in the midst of their work say so to the others, which look now and then.

    All ranks must make one together, and end it together with :meth:`agreed`.

    Parameters
    ----------
    ctx
        The run.
    """

    def __init__(self, ctx: TrainContext) -> None:
        self._ctx = ctx
        # The sum is new each time and the same on all ranks, also where one of them has failed on the way before.
        asked, number = agree([ctx.interrupt_asked, next(_numbers)], ctx.manager)
        self.at_start = self._adopt(asked)
        self._note = f"interrupted/{int(number)}"
        self._next_look = time.monotonic() + SELDOM
        self._told = False

    def asked(self) -> bool:
        """Whether this rank has heard of an interruption, its own or another's; the answer may differ between ranks."""
        if self._told:
            return True
        if self._ctx.interrupt_asked:
            post(self._note, self._ctx.manager)
            self._told = True
        elif time.monotonic() >= self._next_look:
            self._told = posted(self._note, self._ctx.manager)
            self._next_look = time.monotonic() + SELDOM
        return self._told

    def agreed(self) -> bool:
        """Whether any rank has heard of one: the same answer on all of them."""
        return self._adopt(agree([self._told], self._ctx.manager)[0])

    def _adopt(self, count: float) -> bool:
        self._ctx.interrupted = self._ctx.interrupted or bool(count)
        self._ctx.stop_agreed = self._ctx.stop_agreed or bool(count)
        return bool(count)
