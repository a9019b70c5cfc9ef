"""Entropic transport that may leave mass behind: pairs with weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvalchemi.ebm.couplings.base import CostCoupling, squared_distances
from nvalchemi.ebm.couplings.potentials import TOLERANCE
from nvalchemi.ebm.couplings.sinkhorn import checked, drawn, unconverged, uniform
from nvalchemi.errors import ConfigError


class UnbalancedSinkhornCoupling(CostCoupling):
    """Entropic transport with marginals that hold only softly (L. Chizat et al., Math. Comp. 87, 2018, arXiv:1607.05816).

    The plan minimises <P, C> + ε KL(P | 1) + ρ KL(P 1 | 1/n) + ρ KL(Pᵀ 1 | 1/m) with KL(p | q) = Σ p log(p/q) - p + q. What is far from
    everything is carried in part only: every row of ``x0`` draws its row of ``x1`` from its row of the plan, and the pair's weight is
    the mass of that row, over the mean of all.

    Parameters
    ----------
    reg
        The regularisation ε, in units of the largest squared distance.
    reg_marginal
        ρ, in the same units: how dearly mass is left behind. Large values are `SinkhornCoupling`, whose weights are all 1.
    n_iters
        At most so many iterations; a warning says so where the potentials still move then.
    process_group
        Refused: the weights of a rank's rows are over the mean of that rank.

    Examples
    --------
    >>> pairs = UnbalancedSinkhornCoupling(reg_marginal=0.1)(torch.randn_like(data), data)
    >>> pairs.weights  # (n,), less than 1 where a sample lies by itself
    """

    def __init__(self, reg: float = 0.05, reg_marginal: float = 1.0, n_iters: int = 100, process_group: object = None) -> None:
        self.reg, self.n_iters = checked(reg, n_iters)
        if not 0 < reg_marginal < math.inf:
            raise ConfigError("what mass costs that is left behind is a positive number", found=reg_marginal)
        if process_group is not None:
            raise ConfigError(
                "UnbalancedSinkhornCoupling couples the rows of one rank, over whose mean its weights are",
                found="a process_group",
                fix="use SinkhornCoupling(process_group=...)",
            )
        self.reg_marginal = reg_marginal

    def choose(self, x0: Tensor, x1: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        plan, change = unbalanced_plan(squared_distances(x0, x1), self.reg, self.reg_marginal, self.n_iters)
        if change > TOLERANCE:
            unconverged(self, change)
        mass = plan.sum(1)
        return drawn(plan, uniform(x0.shape[0], x0, generator)), (mass / mass.mean()).to(x0.dtype)


def unbalanced_plan(
    cost: Tensor, reg: float, reg_marginal: float, n_iters: int = 100, tolerance: float = TOLERANCE
) -> tuple[Tensor, float]:
    """The plan of unbalanced entropic transport between uniform marginals.

    Parameters
    ----------
    cost
        (n, m), finite.
    reg, reg_marginal
        ε and ρ in units of the cost.
    n_iters, tolerance
        Stop after so many iterations, or when the last one has changed no factor of the plan by more than this part.

    Returns
    -------
    plan : Tensor
        (n, m); its sums are not 1.
    change : float
        The part by which a factor changed at last.
    """
    damping = reg_marginal / (reg_marginal + reg)
    exponents = cost / -reg
    log_row, log_column = -math.log(cost.shape[0]), -math.log(cost.shape[1])
    columns = cost.new_zeros(cost.shape[1])
    rows = damping * (log_row - torch.logsumexp(exponents + columns, 1))
    change = math.inf
    for _ in range(n_iters):
        before = columns
        columns = damping * (log_column - torch.logsumexp(exponents + rows[:, None], 0))
        rows = damping * (log_row - torch.logsumexp(exponents + columns, 1))
        change = float((columns - before).abs().max())
        if change <= tolerance:
            break
    return exponents.add_(columns).add_(rows[:, None]).exp_(), change
