"""What a sampler must be able to tell, so that what is left of an epoch can be divided anew."""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable

#: Plain data that tell one order, or one division of it, from another.
Facts = dict[str, bool | int | str]


@runtime_checkable
class Divisible(Protocol):
    """A sampler, of indices or of batches, of an epoch whose order is the same on any number of ranks.

    What is left of an epoch can therefore be divided anew, and a run goes on with another number of ranks. Positions count the samples of
    all ranks together from the start of the epoch's order.
    """

    def remaining(self) -> int:
        """Samples that the ranks have together, repeats not counted: those of the epoch, or of what was left of it."""

    def dealt(self) -> int:
        """The same with repeats counted, and without what is left out."""

    def used(self, count: int) -> int:
        """The position at which every rank has had its first ``count`` items."""

    def after(self, samples: int) -> Self:
        """A sampler of what is left of the epoch from position ``samples`` on, divided between as many ranks as this one's."""

    def order_facts(self) -> Facts:
        """What the order depends on, whatever the number of ranks and the size of batches."""

    def division_facts(self) -> Facts:
        """What its division into ranks' batches depends on besides."""
