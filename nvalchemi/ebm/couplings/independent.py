"""Pairs as they come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvalchemi.ebm.couplings.base import Coupling, CouplingResult, check_conditions, needed
from nvalchemi.errors import DataError


class IndependentCoupling(Coupling):
    """Keeps the pairs as they come: noise that knows nothing of the data, or pairs that belong together already.

    Examples
    --------
    >>> x0, x1 = IndependentCoupling()(torch.randn(64, 2), data)
    """

    def couple(self, x0: Tensor, x1: Tensor | None, *, generator: torch.Generator | None, conditions: Any) -> CouplingResult:
        x1 = needed(self, x0, x1)
        if x0.shape[0] != x1.shape[0]:
            raise DataError("pairs as they come need as many of both", found=f"{x0.shape[0]} and {x1.shape[0]}")
        check_conditions(conditions, x1.shape[0])
        return CouplingResult(x0, x1, conditions)
