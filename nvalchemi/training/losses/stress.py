"""Losses of the stress, (B, 3, 3) in eV/Å³ with tension positive: means over the nine components of the labelled structures."""

from __future__ import annotations

from torch import Tensor

from nvalchemi.training.losses.base import HuberTerm, Term


class StressTerm(Term):
    """A difference of stress components.

    Parameters
    ----------
    target_key, prediction_key, name
        As in :class:`~nvalchemi.training.losses.base.Term`; ``"stress"`` unless given.
    """

    key = "stress"


class StressMSELoss(StressTerm):
    """Mean over the labelled stress components of the squared difference."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.square()


class StressMAELoss(StressTerm):
    """Mean over the labelled stress components of the absolute difference."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.abs()


class StressHuberLoss(HuberTerm, StressTerm):
    """Mean over the labelled stress components of the Huber cost of the difference.

    Parameters
    ----------
    delta
        Difference in eV/Å³ from which on the cost is linear.
    target_key, prediction_key, name
        As in :class:`StressTerm`.
    """
