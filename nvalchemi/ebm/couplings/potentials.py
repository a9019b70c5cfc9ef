"""Entropic optimal transport: the potentials of a cost matrix, at any regularisation.

The plan of cost C and regularisation ε with marginals 1/n and 1/m is P = exp((f_i + g_j - C_ij) / ε), and Sinkhorn's sweeps make its row
sums and column sums right in turn (M. Cuturi, NeurIPS 2013, arXiv:1306.0895). What is done here besides:

- Potentials are kept in logarithms, and the products are made with a kernel into which they have gone (stabilised scaling, B. Schmitzer,
  SIAM J. Sci. Comput. 41, 2019, arXiv:1610.06519). Sweeps are then two matrix-vector products and no exponentials, and nothing under-
  or overflows.
- A small ε is reached from a large one by halves.
- Where sweeps have become slow, Newton's method on the columns' potentials takes over. Its matrix, diag(c) - Pᵀ diag(1/r) P, is never made:
  conjugate gradients need two products with the kernel a step, as a sweep does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-3
"""Largest relative error of a column sum at which a plan is right."""

FIRST = 1 / 20
"""The largest regularisation, in units of the spread of the cost, at which a kernel without potentials neither under- nor overflows."""

SLOW = 0.6
"""A sweep that leaves more of the error than this is slow."""

ROUGH = 3
"""Sweeps at each regularisation on the way down."""

MOST_PRODUCTS = 50
"""Steps of conjugate gradients in one Newton step."""

FAR = 1e12
"""Ratio of the columns' factors from which they go into the kernel."""

LARGEST_STEP = 3.0
"""How far, in units of ε, a Newton step may move a potential: its quadratic model knows no more."""


@dataclass(frozen=True)
class Plan:
    """A transport plan ``left[i] * kernel[i, j] * right[j] / n`` whose row sums are 1/n exactly.

    Parameters
    ----------
    kernel
        (n, m).
    left, right
        (n,) and (m,).
    columns
        (m,) potentials of the columns, in units of the cost.
    error
        Largest relative error of a column sum.
    converged
        Whether that is within the tolerance.
    updates
        Sweeps and Newton steps that were taken at the last regularisation.
    """

    kernel: Tensor
    left: Tensor
    right: Tensor
    columns: Tensor
    error: float
    converged: bool
    updates: int

    def matrix(self) -> Tensor:
        """The plan, (n, m), of sum 1."""
        return (self.left / self.left.shape[0])[:, None] * self.kernel * self.right


def potentials(cost: Tensor, reg: float, n_iters: int = 100, tolerance: float = TOLERANCE) -> Plan:
    """Solve entropic optimal transport between uniform marginals.

    Parameters
    ----------
    cost
        (n, m), finite, of float32 or float64.
    reg
        The regularisation ε, in units of the cost.
    n_iters
        At most so many updates of the potentials at ``reg``.
    tolerance
        Largest relative error of a column sum at which to stop.

    Returns
    -------
    Plan
        Which says whether it has converged; it is finite in any case.
    """
    low, high = (float(x) for x in torch.aminmax(cost))
    epsilons = [reg]
    while epsilons[0] * 2 < (high - low) * FIRST:
        epsilons.insert(0, epsilons[0] * 2)
    state = _Scaling(cost, epsilons[0], low)
    for next_reg in epsilons[1:]:
        for _ in range(ROUGH):
            state.balance()
            state.sweep()
        state.sharpen(next_reg)
    updates, before, error = 0, math.inf, state.refresh()
    while updates < n_iters and not error <= tolerance:
        if updates >= 2 and error > SLOW * before:
            state.newton()
        else:
            state.sweep()
        updates, before, error = updates + 1, error, state.refresh()
    return Plan(state.kernel, state.left, state.right, state.potential(), error, error <= tolerance, updates)


def rough_columns(cost: Tensor) -> Tensor:
    """Potentials of the columns, (m,) in units of the cost, after a few sweeps at a large and at a small regularisation."""
    low, high = (float(x) for x in torch.aminmax(cost))
    if not high > low:
        return cost.new_zeros(cost.shape[1])
    state = _Scaling(cost, (high - low) * FIRST, low)
    for _ in range(2):
        state.balance()
        state.sweep()
    state.sharpen(state.reg / 8)
    for _ in range(min(16, len(cost) // 16)):
        state.balance()
        state.sweep()
    return state.potential()


class _Scaling:
    """A kernel and the factors of its rows and columns. After `refresh` the row sums are right and the column sums are known."""

    def __init__(self, cost: Tensor, reg: float, low: float) -> None:
        n, m = cost.shape
        self.cost, self.reg = cost, reg
        self.share = n / m  # of a column, where a row has 1
        self.absorbed = cost.new_zeros(m)  # the columns' potentials inside the kernel
        self.kernel = torch.sub(low, cost).mul_(1.0 / reg).exp_()
        self.left, self.right = cost.new_empty(n), cost.new_ones(m)
        self.backs = cost.new_empty(m)  # column sums over `right`
        self.tiny = torch.finfo(cost.dtype).tiny * 1e8

    def potential(self) -> Tensor:
        """The columns' potentials, (m,)."""
        return self.absorbed + self.reg * self.right.log()

    def refresh(self) -> float:
        """Make the row sums right, and give the largest relative error of a column sum."""
        self.balance()
        low, high = torch.aminmax(self.backs * self.right)
        return max(float(high) / self.share - 1, 1 - float(low) / self.share)

    def balance(self) -> None:
        """Make the row sums right."""
        torch.mv(self.kernel, self.right, out=self.left).reciprocal_()
        torch.mv(self.kernel.T, self.left, out=self.backs)

    def sweep(self) -> None:
        """Make the column sums right, but for one factor of all of them, which the row sums take back."""
        torch.reciprocal(self.backs.clamp_(min=self.tiny), out=self.right)

    def newton(self) -> None:
        """Move the columns' potentials to where the dual's quadratic model has its top, or towards it."""
        sums = self.backs * self.right
        residual = self.share - sums
        wanted = min(0.1, math.sqrt(float(residual.abs().mean()) / self.share))  # the nearer, the closer to a whole Newton step
        scale = sums.rsqrt()  # diag(c) is the preconditioner
        step, residual = torch.zeros_like(scale), residual.mul_(scale)
        direction, square = residual.clone(), float(residual.dot(residual))
        enough = square * wanted**2
        weights = self.left.square()
        for _ in range(MOST_PRODUCTS):
            if square <= enough:
                break
            moved = direction * scale
            image = torch.mv(self.kernel, moved * self.right).mul_(weights)
            image = torch.mv(self.kernel.T, image).mul_(self.right)
            image = moved.mul_(sums).sub_(image).mul_(scale)
            curvature = float(direction.dot(image))
            if not curvature > 0:  # only rounding is left
                break
            step.add_(direction, alpha=square / curvature)
            residual.sub_(image, alpha=square / curvature)
            next_square = float(residual.dot(residual))
            direction.mul_(next_square / square).add_(residual)
            square = next_square
        step.mul_(scale)
        far = float(step.abs().max())
        if not far > 0 or not math.isfinite(far):
            self.sweep()
            return
        self.right.mul_(step.mul_(min(1.0, LARGEST_STEP / far)).exp_())
        low, high = torch.aminmax(self.right)
        if float(high) > FAR * float(low):
            self.sharpen(self.reg)

    def sharpen(self, reg: float) -> None:
        """Put the columns' potentials into the kernel, and go on with another regularisation."""
        self.absorbed, self.reg = self.potential(), reg
        kernel = torch.sub(self.absorbed, self.cost).mul_(1.0 / reg)
        self.kernel = kernel.sub_(kernel.amax(1, keepdim=True)).exp_()  # a row's own factor goes with the row's
        self.right.fill_(1.0)
