"""Losses of the forces, (N, 3) in eV/Å: means over all labelled atoms of the step, not over structures."""

from __future__ import annotations

from torch import Tensor

from nvalchemi.training.losses.base import HuberTerm, Term

# Below this length (eV/Å) a difference counts as zero: the second derivative of a norm goes as one over the length and would overflow.
_ZERO = 1e-12


class ForceTerm(Term):
    """A difference of force components.

    Parameters
    ----------
    target_key, prediction_key, name
        As in :class:`~nvalchemi.training.losses.base.Term`; ``"forces"`` unless given.
    """

    key = "forces"


class ForceMSELoss(ForceTerm):
    """Mean over the labelled force components of the squared difference."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.square()


class ForceMAELoss(ForceTerm):
    """Mean over the labelled force components of the absolute difference."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.abs()


class ForceHuberLoss(HuberTerm, ForceTerm):
    """Mean over the labelled force components of the Huber cost of the difference.

    Parameters
    ----------
    delta
        Difference in eV/Å from which on the cost is linear.
    target_key, prediction_key, name
        As in :class:`ForceTerm`.
    """


class ForceL2NormLoss(ForceTerm):
    """Mean over the labelled atoms of the length of the difference vector.

    Rotating a structure does not change it, as it does the mean absolute component. All its derivatives are finite, zero at a
    difference of zero. An atom with one unlabelled component counts as unlabelled.
    """

    per_row = True

    def penalty(self, difference: Tensor) -> Tensor:
        square = difference.square().sum(-1)
        zero = square < _ZERO**2
        return square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)
