"""Each target once: the pairing of least total cost, and a quick one near it."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from torch import Tensor

from nvalchemi.ebm.couplings.base import CostCoupling, squared_distances
from nvalchemi.ebm.couplings.potentials import rough_columns
from nvalchemi.errors import ConfigError, DataError

WARM_FROM = 96
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
        return self.assign(x0, x1), None

    @abstractmethod
    def assign(self, x0: Tensor, x1: Tensor) -> Tensor:
        """The row of ``x1`` (m, ...) for each row of ``x0`` (n, ...), n at most m: (n,) int64, none twice."""

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
    Where there are as many targets as sources, Σ |a - b|² over the pairs is a constant less 2 Σ a·b: moving all sources, or making all targets
    larger, changes no pairing. So both sets are brought to the same middle and size, where near pairs are pairs that will be made, and where
    rounding does not know how far apart the sets were.
    """

    def assign(self, x0: Tensor, x1: Tensor) -> Tensor:
        if x0.shape[0] == x1.shape[0]:
            x0, x1 = same_size(x0), same_size(x1)
        return exact_assignment(squared_distances(x0, x1))


class GreedyCoupling(AssignmentCoupling):
    """The nearest pair first, then the nearest of what is left, and so on: quick, not optimal, nothing drawn.

    ``process_group`` is refused: what one rank takes, another could not.
    """

    def assign(self, x0: Tensor, x1: Tensor) -> Tensor:
        return greedy_assignment(squared_distances(x0, x1))


def same_size(x: Tensor) -> Tensor:
    """Samples (n, ...) as rows of mean 0 and norm 1 all together, in at least float32; those that are all alike stay at 0."""
    x = x.flatten(1).to(torch.promote_types(torch.float32, x.dtype))
    x = x - x.mean(0)
    size = float(x.norm())
    return x.div_(size) if 0 < size < float("inf") else x  # what is not finite is refused with the distances


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

    n, m = cost.shape
    matrix = cost.detach().to("cpu", torch.float64, copy=True)
    if n == m and n >= WARM_FROM:
        matrix.sub_(rough_columns(cost.float()).to(matrix))
        matrix.sub_(matrix.amin(1, keepdim=True)).sub_(matrix.amin(0))  # now no row and no column is without a zero
    _, columns = linear_sum_assignment(matrix.numpy())
    return torch.from_numpy(np.asarray(columns, dtype=np.int64)).to(cost.device)


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
    A pair of which each is the other's nearest free one is taken sooner or later whatever else is taken. So from any row one goes to its
    nearest column, from there to its nearest row, and on until two are each other's, which are then taken (nearest-neighbour chains,
    J. Juan, 1982): n m steps in all, and no sorting of n m costs.
    """
    by_row = cost.detach().cpu().numpy()
    by_column = np.ascontiguousarray(by_row.T)
    taken_rows, taken_columns = np.zeros_like(by_column[0]), np.zeros_like(by_row[0])  # 0 is free, infinity taken
    result = np.full(by_row.shape[0], -1, dtype=np.int64)
    chain: list[int] = []  # row, column, row, ...: each the nearest of the one before
    start = 0
    while start < len(result):
        if not chain:
            if result[start] >= 0:
                start += 1
                continue
            chain.append(start)
        at_row = len(chain) % 2 == 1
        costs = by_row[chain[-1]] + taken_columns if at_row else by_column[chain[-1]] + taken_rows
        nearest = int(costs.argmin())
        if len(chain) < 2 or nearest != chain[-2]:
            chain.append(nearest)
            continue
        row, column = (chain[-1], chain[-2]) if at_row else (chain[-2], chain[-1])
        del chain[-2:]
        result[row], taken_rows[row], taken_columns[column] = column, np.inf, np.inf
    return torch.from_numpy(result).to(cost.device)
