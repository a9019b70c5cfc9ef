"""Each target once: the pairing of least total cost, and a quick one near it."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from nvalchemi.ebm.couplings.base import CostCoupling, squared_distances
from nvalchemi.ebm.couplings.potentials import potentials
from nvalchemi.errors import ConfigError, DataError

WARM_FROM = 48
"""Rows from which potentials are worth their time."""


class AssignmentCoupling(CostCoupling):
    """Gives every row of ``x0`` a row of ``x1`` of its own."""

    def __init__(self, *, process_group: object = None) -> None:
        if process_group is not None:
            raise ConfigError(
                f"{type(self).__name__} pairs the rows of one rank",
                found="a process_group",
                fix="use SinkhornCoupling(process_group=...); an assignment takes the cube of the rows of all ranks, "
                "one after the other on one core",
            )

    def choose(self, x0: Tensor, x1: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        if x0.shape[0] > x1.shape[0]:
            raise DataError("each source takes a target of its own", found=f"{x0.shape[0]} sources, {x1.shape[0]} targets")
        return self.assign(squared_distances(x0, x1)), None

    @abstractmethod
    def assign(self, cost: Tensor) -> Tensor:
        """The column of each row of a cost matrix (n, m), n at most m: (n,) int64, none twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ExactOTCoupling(AssignmentCoupling):
    """The pairing of least total squared distance: minibatch optimal transport (Tong et al., TMLR 2024, arXiv:2302.00482).

    Nothing is drawn. ``process_group`` is refused: the problem of all ranks together takes too long.

    Notes
    -----
    The assignment is solved by ``scipy.optimize.linear_sum_assignment``, which follows shortest paths of reduced costs (D. F. Crouse,
    IEEE Trans. Aerosp. Electron. Syst. 52, 2016). Taking a number from all of a row or a column changes no assignment, and rough
    entropic potentials are numbers after which most rows have their column at once; so they are taken first.
    """

    def assign(self, cost: Tensor) -> Tensor:
        return exact_assignment(cost)


class GreedyCoupling(AssignmentCoupling):
    """The nearest pair first, then the nearest of what is left, and so on: quick, not optimal, nothing drawn.

    ``process_group`` is refused: what one rank takes, another could not.
    """

    def assign(self, cost: Tensor) -> Tensor:
        return greedy_assignment(cost)


def exact_assignment(cost: Tensor) -> Tensor:
    """The column of each row, none twice, for which the sum of the costs is least.

    Parameters
    ----------
    cost
        (n, m), finite, n at most m.

    Returns
    -------
    Tensor
        (n,) int64 on the device of ``cost``.
    """
    from scipy.optimize import linear_sum_assignment  # not needed by anybody who imports this package

    matrix = cost.detach().double().cpu().numpy()
    n, m = matrix.shape
    if n == m and n >= WARM_FROM:
        matrix = matrix - rough_potential(cost).double().cpu().numpy()
        matrix -= matrix.min(1, keepdims=True)
    _, columns = linear_sum_assignment(matrix)
    return torch.from_numpy(np.asarray(columns, dtype=np.int64)).to(cost.device)


def rough_potential(cost: Tensor) -> Tensor:
    """Numbers (m,) to take from the columns, so that few are wanted by more rows than one."""
    spread = float(cost.max() - cost.min())
    if not spread > 0 or not math.isfinite(spread):
        return cost.new_zeros(cost.shape[1])
    return potentials(cost.float(), spread / 500, n_iters=10, tolerance=0.3).columns


def greedy_assignment(cost: Tensor) -> Tensor:
    """The column of each row, none twice, taking the smallest cost that is still free each time.

    Parameters
    ----------
    cost
        (n, m), n at most m.

    Returns
    -------
    Tensor
        (n,) int64. Of equal costs the one in the upper row, then in the left column, is taken first.

    Notes
    -----
    A pair of which either is the other's nearest free one is taken sooner or later whatever else is taken, so all such pairs are taken at
    once and the sorting of n m costs is spared.
    """
    result = torch.empty(cost.shape[0], dtype=torch.int64, device=cost.device)
    rows, columns = torch.arange(cost.shape[0], device=cost.device), torch.arange(cost.shape[1], device=cost.device)
    while rows.numel():
        nearest_column, nearest_row = cost.argmin(1), cost.argmin(0)
        mutual = nearest_row[nearest_column] == torch.arange(rows.numel(), device=cost.device)
        if not mutual.any():  # equal costs, of which an accelerator may find another one by row than by column
            row, column = divmod(int(cost.argmin()), columns.numel())
            nearest_column[row], mutual[row] = column, True
        taken = nearest_column[mutual]
        result[rows[mutual]] = columns[taken]
        free = torch.ones_like(columns, dtype=torch.bool)
        free[taken] = False
        cost, rows, columns = cost[~mutual][:, free], rows[~mutual], columns[free]
    return result
