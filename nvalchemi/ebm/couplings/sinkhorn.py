"""Pairs drawn from an entropic transport plan, of one rank's rows or of all ranks' together."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi.distributed import Manager, broadcast, gather, members
from nvalchemi.ebm.couplings.base import (
    CostCoupling,
    CouplingResult,
    check_conditions,
    in_full,
    needed,
    rows_mapped,
    squared_distances,
    take_rows,
)
from nvalchemi.ebm.couplings.potentials import potentials
from nvalchemi.errors import ConfigError


class SinkhornCoupling(CostCoupling):
    """Entropic minibatch optimal transport (M. Cuturi, NeurIPS 2013, arXiv:1306.0895).

    Every row of ``x0`` draws its row of ``x1`` from its row of the plan, so the sources are all there once, and the targets once on
    average.

    Parameters
    ----------
    reg
        The regularisation ε, in units of the largest squared distance between the two batches. Small is near `ExactOTCoupling`.
    n_iters
        At most so many updates of the potentials at ``reg``; it ends as soon as the column sums are right to 1e-3. Where that is not
        reached, a warning says so.
    process_group
        The ranks whose rows are coupled together: a process group or a manager. Each rank then keeps its own rows of ``x0``, in their
        order, and gets targets and conditions of any rank. All ranks must call, with any number of rows; rank 0 draws for all, so the
        pairs are those of one process that has all rows and rank 0's generator. None couples the rows of this rank alone. A loss does so
        too while its model is in evaluation mode: ranks may have unlike numbers of batches to validate on.

    Examples
    --------
    >>> coupling = SinkhornCoupling(reg=0.05)
    >>> pairs = coupling(torch.randn_like(data), data, generator=generator, conditions=labels)
    >>> x0, x1 = pairs
    >>> labels_of_x1 = pairs.conditions
    """

    def __init__(self, reg: float = 0.05, n_iters: int = 100, process_group: dist.ProcessGroup | Manager | None = None) -> None:
        self.reg, self.n_iters = checked(reg, n_iters)
        self.process_group = process_group

    def on_this_rank(self) -> SinkhornCoupling:
        """See `Coupling.on_this_rank`."""
        return self if self.process_group is None else SinkhornCoupling(self.reg, self.n_iters)

    def couple(self, x0: Tensor, x1: Tensor | None, *, generator: torch.Generator | None, conditions: Any) -> CouplingResult:
        if self.process_group is None:
            return super().couple(x0, x1, generator=generator, conditions=conditions)
        x1 = needed(self, x0, x1)
        check_conditions(conditions, x1.shape[0])
        manager = members(self.process_group)
        sources, targets = gather(x0, manager), torch.cat(gather(x1, manager))
        conditions = rows_mapped(conditions, lambda tensor: torch.cat(gather(tensor, manager)))
        # every rank solves the same problem: it would have to wait for the one that does, and an error then comes to all
        draws = broadcast(uniform(sum(map(len, sources)), x0, generator), manager)
        with in_full(x0):
            chosen = self.choose_by(torch.cat(sources), targets, draws)
        chosen = chosen.split([len(rows) for rows in sources])[manager.rank]
        return CouplingResult(x0, targets[chosen], take_rows(conditions, chosen))

    def choose(self, x0: Tensor, x1: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        return self.choose_by(x0, x1, uniform(x0.shape[0], x0, generator)), None

    def choose_by(self, x0: Tensor, x1: Tensor, draws: Tensor) -> Tensor:
        """The targets that numbers (n,) from 0 to 1 choose from the rows of the plan."""
        plan = potentials(squared_distances(x0, x1), self.reg, self.n_iters)
        if not plan.converged:
            unconverged(self, plan.error)
        return drawn(plan.kernel.mul_(plan.right), draws)


def checked(reg: float, n_iters: int) -> tuple[float, int]:
    """Settings that can work.

    Raises
    ------
    ConfigError
        Otherwise.
    """
    if not 0 < reg < float("inf"):
        raise ConfigError("the regularisation of entropic transport is a positive number", found=reg, fix="0.05 is usual")
    if n_iters < 1:
        raise ConfigError("entropic transport needs at least one iteration", found=n_iters)
    return reg, n_iters


def unconverged(coupling: object, error: float) -> None:
    """Say that a plan is not what was asked for."""
    warnings.warn(
        f"{coupling!r}: the plan's marginals are still wrong by {error:.1e} of their value; raise n_iters or reg",
        RuntimeWarning,
        stacklevel=2,
    )


def uniform(n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Numbers (n,) from 0 to 1 on the device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.rand(n, generator=generator, device=device).to(like.device)


def drawn(weights: Tensor, draws: Tensor) -> Tensor:
    """One column for each row of weights (n, m), chosen by numbers (n,) from 0 to 1: (n,) int64. Overwrites ``weights``."""
    cumulative = weights.cumsum_(1)
    total = cumulative[:, -1]
    # never the total itself, to which a number near 1 would be rounded: behind it is nothing, before it may be columns of weight 0
    points = draws.to(total.dtype).clamp(max=1 - 2**-22) * total
    return torch.searchsorted(cumulative, points[:, None], right=True).squeeze(1)
