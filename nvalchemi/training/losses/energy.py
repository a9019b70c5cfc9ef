"""Losses of the total energy, one label a structure."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nvalchemi.training.losses.base import HuberTerm, Term


class EnergyTerm(Term):
    """A difference of energies, (B,), in eV, or in eV an atom where ``per_atom``.

    Parameters
    ----------
    per_atom
        Divide each structure's difference by its number of atoms before it is penalised.
    target_key, prediction_key, name
        As in :class:`~nvalchemi.training.losses.base.Term`; ``"energy"`` unless given.
    """

    key = "energy"
    per_atom: bool = False

    def __init__(
        self,
        *,
        per_atom: bool = False,
        target_key: str | None = None,
        prediction_key: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(target_key=target_key, prediction_key=prediction_key, name=name)
        self.per_atom = per_atom

    def scaled(self, difference: Tensor, batch: Any) -> Tensor:
        return difference / batch.num_nodes_per_graph if self.per_atom else difference


class EnergyMSELoss(EnergyTerm):
    """Mean over the labelled structures of the squared difference of the energies."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.square()


class EnergyMAELoss(EnergyTerm):
    """Mean over the labelled structures of the absolute difference of the energies."""

    def penalty(self, difference: Tensor) -> Tensor:
        return difference.abs()


class EnergyHuberLoss(HuberTerm, EnergyTerm):
    """Mean over the labelled structures of the Huber cost of the difference of the energies.

    Parameters
    ----------
    delta
        Difference in eV (eV an atom where ``per_atom``) from which on the cost is linear.
    per_atom, target_key, prediction_key, name
        As in :class:`EnergyTerm`.
    """

    def __init__(
        self,
        delta: float = 0.01,
        *,
        per_atom: bool = False,
        target_key: str | None = None,
        prediction_key: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(delta, target_key=target_key, prediction_key=prediction_key, name=name)
        self.per_atom = per_atom
