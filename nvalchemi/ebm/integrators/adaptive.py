"""Runge-Kutta methods that choose their steps by an estimate of the error."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nvalchemi.ebm.integrators.base import Field, Increment, Integrator, check_stochastic
from nvalchemi.ebm.integrators.fixed import combined
from nvalchemi.errors import ConfigError, TrainingError


@dataclass(frozen=True, slots=True)
class Table:
    """The numbers of an embedded pair; the last of ``errors`` belongs to the slope at the end of the step.

    ``second`` is another estimate, of lower order, that method 8(5,3) mixes in.
    """

    nodes: tuple[float, ...]
    stages: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    errors: tuple[float, ...]
    second: tuple[float, ...] | None = None


def _of_scipy(method: Any, errors: Any, second: Any = None) -> Table:
    """The table of one of scipy's solvers: the numbers of a well-kept library, none of them typed again."""
    stages = tuple(tuple(float(a) for a in row[:i]) for i, row in enumerate(method.A))

    def plain(numbers: Any) -> tuple[float, ...]:
        return tuple(float(number) for number in numbers)

    return Table(plain(method.C), stages, plain(method.B), plain(errors), None if second is None else plain(second))


class AdaptiveIntegrator(Integrator):
    """Takes steps as long as the error allows.

    The error of a sample is the root mean square, over its coordinates, of the estimate over ``atol + rtol |x|``; the step is such that
    it stays below 1 for every sample of the batch. So the tolerance holds for each sample, whatever the batch, and one hard sample
    makes the steps of all short.

    Parameters
    ----------
    rtol, atol
        Relative and absolute tolerance.
    max_steps
        Steps, refused ones included, after which the equation is given up.
    """

    def __init__(self, rtol: float = 1e-3, atol: float = 1e-6, max_steps: int = 10_000) -> None:
        if not (rtol >= 0.0 and atol >= 0.0 and rtol + atol > 0.0) or max_steps < 1:
            raise ConfigError("no such tolerance", found=f"rtol={rtol}, atol={atol}, max_steps={max_steps}")
        self.rtol, self.atol, self.max_steps = float(rtol), float(atol), max_steps

    even_calls: ClassVar[bool] = False

    @abstractmethod
    def table(self) -> Table:
        """The method's numbers."""

    def path(self, field: Field, x: Tensor, times: Sequence[float], increment: Increment | None = None) -> Iterator[Tensor]:
        """See `Integrator.path`."""
        if increment is not None:
            check_stochastic(self)
        if len(times) < 2:
            return
        if not x.numel():  # no sample says how long a step may be
            yield from (x for _ in times[1:])
            return
        table, t, taken = self.table(), float(times[0]), 0
        slope = field(x, t)
        h = self._first_step(field, x, slope, t, float(times[-1]))
        for stop in times[1:]:
            while t != stop:
                taken += 1
                if taken > self.max_steps or t + h == t or not math.isfinite(h):
                    raise TrainingError(
                        f"{type(self).__name__} cannot go on at time {t:.6g}",
                        found=f"step size {h:.3g} after {taken - 1} steps",
                        fix="a field that is finite and smooth there, or looser tolerances",
                    )
                last = abs(stop - t) <= abs(h) * (1 + 1e-9)
                size = stop - t if last else h
                new, new_slope, error = self._attempt(table, field, x, slope, t, size)
                # NaN compares false: a step into nowhere is refused as any other that was too long.
                if error <= 1.0:
                    x, slope, t = new, new_slope, stop if last else t + size
                    # A step cut short to end at a time says little about the next.
                    h = size * self._factor(error) if not last else max(h, size * self._factor(error), key=abs)
                else:
                    h = size * (self._factor(error) if math.isfinite(error) else 0.1)
            yield x

    def _factor(self, error: float) -> float:
        """How much longer the next step may be."""
        return 10.0 if error == 0.0 else min(10.0, max(0.2, 0.9 * error ** (-1.0 / self.order)))

    def _attempt(self, table: Table, field: Field, x: Tensor, slope: Tensor, t: float, h: float) -> tuple[Tensor, Tensor, float]:
        """The state after a step, the slope there, and the error over the tolerance."""
        slopes = [slope]
        for node, stage in zip(table.nodes[1:], table.stages[1:], strict=True):
            slopes.append(field(combined(x, h, stage, slopes), t + node * h))
        new = combined(x, h, table.weights, slopes)
        slopes.append(field(new, t + h))
        allowed = torch.maximum(x.abs(), new.abs()).mul_(self.rtol).add_(self.atol)
        zero = torch.zeros_like(x)
        square = combined(zero, h, table.errors, slopes).div_(allowed).square_().flatten(1)
        if table.second is None:
            error = square.mean(1).sqrt()
        else:
            lower = combined(zero, h, table.second, slopes).div_(allowed).square_().flatten(1)
            fifth, third = square.sum(1), lower.sum(1)
            both = (fifth + 0.01 * third) * square.shape[1]
            error = fifth / both.sqrt().clamp(min=torch.finfo(x.dtype).tiny)
        return new, slopes[-1], float(error.max())

    def _first_step(self, field: Field, x: Tensor, slope: Tensor, t: float, end: float) -> float:
        """Hairer, Nørsett and Wanner, Solving ordinary differential equations I (1993), section II.4."""
        direction = math.copysign(1.0, end - t)
        allowed = x.abs().mul(self.rtol).add(self.atol)

        def size(v: Tensor) -> float:
            return float((v / allowed).square().flatten(1).mean(1).sqrt().max())

        state, speed = size(x), size(slope)
        h = 1e-6 if state < 1e-5 or speed < 1e-5 else 0.01 * state / speed
        h = min(h, abs(end - t))
        bend = size(field(x.add(slope, alpha=direction * h), t + direction * h) - slope) / h
        steep = max(speed, bend)
        longer = max(1e-6, h * 1e-3) if steep <= 1e-15 else (0.01 / steep) ** (1.0 / self.order)
        return direction * min(100 * h, longer, abs(end - t))


class AdaptiveHeunIntegrator(AdaptiveIntegrator):
    """Heun's method with Euler's as the estimate: 2(1)."""

    order: ClassVar[int] = 2

    def table(self) -> Table:
        """See `AdaptiveIntegrator.table`."""
        return Table((0.0, 1.0), ((), (1.0,)), (0.5, 0.5), (-0.5, 0.5, 0.0))


class Bosh3Integrator(AdaptiveIntegrator):
    """Bogacki and Shampine's 3(2), Applied Mathematics Letters 2, 321 (1989)."""

    order: ClassVar[int] = 3

    def table(self) -> Table:
        """See `AdaptiveIntegrator.table`."""
        from scipy.integrate import RK23

        return _of_scipy(RK23, RK23.E)


class Dopri5Integrator(AdaptiveIntegrator):
    """Dormand and Prince's 5(4), Journal of Computational and Applied Mathematics 6, 19 (1980)."""

    order: ClassVar[int] = 5

    def table(self) -> Table:
        """See `AdaptiveIntegrator.table`."""
        from scipy.integrate import RK45

        return _of_scipy(RK45, RK45.E)


class Dopri8Integrator(AdaptiveIntegrator):
    """Dormand and Prince's method of eighth order with estimates of orders 5 and 3, as in DOP853 (Hairer et al., section II.5)."""

    order: ClassVar[int] = 8

    def table(self) -> Table:
        """See `AdaptiveIntegrator.table`."""
        from scipy.integrate import DOP853

        return _of_scipy(DOP853, DOP853.E5, DOP853.E3)
