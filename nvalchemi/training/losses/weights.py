"""Weights of loss terms: numbers, or functions of the number of optimizer steps taken.

A weight remembers nothing, so a resumed run goes on with the right one without any saved state. Any callable from a step to a
number serves as well.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nvalchemi.errors import ConfigError

Weight = float | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class ConstantWeight:
    """The same weight at every step."""

    value: float

    def __post_init__(self) -> None:
        _check(self, self.value)

    def __call__(self, step: int) -> float:
        """The weight after ``step`` optimizer steps."""
        return self.value


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """From ``start`` at step 0 in a straight line to ``end`` at step ``num_steps``, and ``end`` ever after."""

    start: float
    end: float
    num_steps: int

    def __post_init__(self) -> None:
        _check(self, self.start, self.end, steps=self.num_steps)

    def __call__(self, step: int) -> float:
        """The weight after ``step`` optimizer steps."""
        return self.start + (self.end - self.start) * min(max(step / self.num_steps, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class CosineWeight:
    """From ``start`` at step 0 along half a cosine to ``end`` at step ``num_steps``, and ``end`` ever after."""

    start: float
    end: float
    num_steps: int

    def __post_init__(self) -> None:
        _check(self, self.start, self.end, steps=self.num_steps)

    def __call__(self, step: int) -> float:
        """The weight after ``step`` optimizer steps."""
        done = min(max(step / self.num_steps, 0.0), 1.0)
        return self.start + (self.end - self.start) * 0.5 * (1.0 - math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class PiecewiseWeight:
    """``values[i]`` from step ``boundaries[i - 1]`` on, up to but not at ``boundaries[i]``.

    Parameters
    ----------
    boundaries
        Steps at which the weight changes, rising.
    values
        The weights, one more than boundaries.
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(self.values))
        _check(self, *self.values)
        if len(self.values) != len(self.boundaries) + 1:
            raise ConfigError(
                "PiecewiseWeight needs one value more than boundaries",
                found=f"{len(self.values)} values and {len(self.boundaries)} boundaries",
            )
        if any(b >= c for b, c in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ConfigError("PiecewiseWeight needs rising boundaries", found=list(self.boundaries))

    def __call__(self, step: int) -> float:
        """The weight after ``step`` optimizer steps."""
        return self.values[bisect_right(self.boundaries, step)]


@dataclass(frozen=True, slots=True)
class ProductWeight:
    """The product of two weights; ``2.0 * (w * loss)`` makes one where ``w`` is a function."""

    first: Weight
    second: Weight

    def __call__(self, step: int) -> float:
        """The weight after ``step`` optimizer steps."""
        return weight_at(self.first, step) * weight_at(self.second, step)


def weight_at(weight: Weight, step: int) -> float:
    """The number that ``weight`` stands for after ``step`` optimizer steps."""
    return weight(step) if callable(weight) else weight


def product(first: Weight, second: Weight) -> Weight:
    """The product of two weights, a number where both are numbers."""
    if callable(first) or callable(second):
        return ProductWeight(first, second)
    return first * second


def checked(weight: object) -> Weight:
    """``weight`` itself where it is a finite number or a callable.

    Raises
    ------
    ConfigError
        For anything else.
    """
    if callable(weight):
        return weight
    if isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight):
        return float(weight)
    raise ConfigError(
        "a loss cannot have this weight", found=repr(weight), needed="a finite number, or a function of the step that gives one"
    )


def _check(weight: object, *values: object, steps: object = 1) -> None:
    name = type(weight).__name__
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{name} needs finite numbers", found=repr(value))
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"{name} needs num_steps of at least 1", found=repr(steps))
