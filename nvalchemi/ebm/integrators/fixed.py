"""Runge-Kutta methods of a fixed step, two of which take noise."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from nvalchemi.ebm.integrators.base import Field, FixedStepIntegrator
from nvalchemi.ebm.settings import Value, add_


def combined(x: Tensor, h: Value, weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    """``x + h * sum(weight * slope)``, a new tensor."""
    out: Tensor | None = None
    for weight, slope in zip(weights, slopes, strict=False):
        if weight:
            factor = h * weight
            if out is None:
                out = x.add(slope, alpha=factor) if isinstance(factor, float) else x.addcmul(slope, factor)
            else:
                add_(out, factor, slope)
    return x.clone() if out is None else out


class RungeKutta(FixedStepIntegrator):
    """An explicit Runge-Kutta method from its table.

    Attributes
    ----------
    nodes, stages, weights
        The table: stage i is f at time ``t + nodes[i] h`` and state ``x + h sum(stages[i][j] f_j)``, and a step adds
        ``h sum(weights[j] f_j)``.
    """

    nodes: ClassVar[tuple[float, ...]]
    stages: ClassVar[tuple[tuple[float, ...], ...]]
    weights: ClassVar[tuple[float, ...]]

    def step(self, field: Field, x: Tensor, t: float, h: Value, noise: Tensor | None = None) -> Tensor:
        """See `FixedStepIntegrator.step`."""
        length = h if isinstance(h, float) else 0.0  # steps of unlike lengths have no common time; the field then has none
        slopes: list[Tensor] = []
        for node, stage in zip(self.nodes, self.stages, strict=True):
            slopes.append(field(combined(x, h, stage, slopes) if slopes else x, t + node * length))
        return combined(x, h, self.weights, slopes)


class EulerMaruyamaIntegrator(FixedStepIntegrator):
    """x + h f(x, t) + noise: of first order, weakly so where there is noise; Euler's method without noise."""

    order = 1
    stochastic = True

    def step(self, field: Field, x: Tensor, t: float, h: Value, noise: Tensor | None = None) -> Tensor:
        """See `FixedStepIntegrator.step`."""
        out = combined(x, h, (1.0,), [field(x, t)])
        return out if noise is None else out.add_(noise)


class HeunIntegrator(FixedStepIntegrator):
    """The mean of the slopes at both ends of an Euler step, with the same noise in both: of second order.

    Weakly so where there is noise, if that does not depend on the state (Kloeden and Platen, Numerical solution of stochastic
    differential equations (1992), section 15.1).
    """

    order = 2
    stochastic = True

    def step(self, field: Field, x: Tensor, t: float, h: Value, noise: Tensor | None = None) -> Tensor:
        """See `FixedStepIntegrator.step`."""
        first = field(x, t)
        there = combined(x, h, (1.0,), [first])
        if noise is not None:
            there.add_(noise)
        out = combined(x, h, (0.5, 0.5), [first, field(there, t + (h if isinstance(h, float) else 0.0))])
        return out if noise is None else out.add_(noise)


class MidpointIntegrator(RungeKutta):
    """The slope at the middle of an Euler step: of second order."""

    order = 2
    nodes = (0.0, 0.5)
    stages = ((), (0.5,))
    weights = (0.0, 1.0)


class RK4Integrator(RungeKutta):
    """The classical method of fourth order. Kutta, Zeitschrift für Mathematik und Physik 46, 435 (1901)."""

    order = 4
    nodes = (0.0, 0.5, 0.5, 1.0)
    stages = ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0))
    weights = (1 / 6, 1 / 3, 1 / 3, 1 / 6)


class RK438Integrator(RungeKutta):
    """The 3/8 rule, of fourth order, with smaller errors than the classical method. Kutta, as above."""

    order = 4
    nodes = (0.0, 1 / 3, 2 / 3, 1.0)
    stages = ((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0))
    weights = (1 / 8, 3 / 8, 3 / 8, 1 / 8)
