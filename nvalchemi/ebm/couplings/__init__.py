"""Couplings: which noise goes with which data.

``x0, x1 = coupling(x0, x1, generator=generator)``; see `nvalchemi.ebm.couplings.base.Coupling`.
"""

from __future__ import annotations

from nvalchemi.ebm.couplings.assignment import ExactOTCoupling, GreedyCoupling
from nvalchemi.ebm.couplings.base import CostCoupling, Coupling, CouplingResult
from nvalchemi.ebm.couplings.independent import IndependentCoupling
from nvalchemi.ebm.couplings.reflow import ReflowCoupling
from nvalchemi.ebm.couplings.sinkhorn import SinkhornCoupling
from nvalchemi.ebm.couplings.unbalanced import UnbalancedSinkhornCoupling

__all__ = [
    "CostCoupling",
    "Coupling",
    "CouplingResult",
    "ExactOTCoupling",
    "GreedyCoupling",
    "IndependentCoupling",
    "ReflowCoupling",
    "SinkhornCoupling",
    "UnbalancedSinkhornCoupling",
]
