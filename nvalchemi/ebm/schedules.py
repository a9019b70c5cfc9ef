"""Settings that change on the way: pure functions of the step.

Every class is a function from the step (0, 1, 2, ...) to a number, without a state: the same step always gives the same number. Step
sizes, noise scales and temperatures of samplers take them, and any function of one's own as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nvalchemi.errors import ConfigError

Schedule = Callable[[int], float]


def _over(step: int, n_steps: int) -> float:
    """The share of the way that is over, from 0 to 1."""
    return min(max(step / n_steps, 0.0), 1.0)


def _at_least_one(n_steps: int) -> None:
    if n_steps < 1:
        raise ConfigError("a schedule needs at least one step", found=n_steps)


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """Always ``value``."""

    value: float

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.value


@dataclass(frozen=True, slots=True)
class ExponentialSchedule:
    """``start * rate ** step``, never below ``minimum``."""

    start: float
    rate: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0.0:
            raise ConfigError("rate is a positive factor a step", found=self.rate)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return max(self.start * self.rate**step, self.minimum)


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """From ``start`` to ``end`` along a line over ``n_steps``, then ``end``."""

    start: float
    end: float
    n_steps: int

    def __post_init__(self) -> None:
        _at_least_one(self.n_steps)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start + (self.end - self.start) * _over(step, self.n_steps)


@dataclass(frozen=True, slots=True)
class CosineSchedule:
    """From ``start`` to ``end`` along half a period of a cosine over ``n_steps``, then ``end``."""

    start: float
    end: float
    n_steps: int

    def __post_init__(self) -> None:
        _at_least_one(self.n_steps)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * _over(step, self.n_steps)))


@dataclass(frozen=True, slots=True)
class MultiStepSchedule:
    """``start``, multiplied by ``gamma`` at each of the steps ``milestones``."""

    start: float
    milestones: tuple[int, ...]
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * self.gamma ** sum(step >= milestone for milestone in self.milestones)


@dataclass(frozen=True, slots=True)
class WarmupSchedule:
    """Rises along a line from ``initial`` times to all of ``then``'s first value over ``n_steps``; then ``then``, counted from its 0."""

    then: Schedule
    n_steps: int
    initial: float = 0.0

    def __post_init__(self) -> None:
        _at_least_one(self.n_steps)

    def __call__(self, step: int) -> float:
        """The value at a step."""
        if step >= self.n_steps:
            return self.then(step - self.n_steps)
        return self.then(0) * (self.initial + (1.0 - self.initial) * _over(step, self.n_steps))


@dataclass(frozen=True, slots=True)
class TemperatureSchedule:
    """Cooling (or heating): from ``start`` to ``end`` by the same factor each of ``n_steps`` steps, then ``end``; both positive.

    The geometric ladder of simulated annealing: Kirkpatrick, Gelatt and Vecchi, Science 220, 671 (1983).
    """

    start: float
    end: float
    n_steps: int

    def __post_init__(self) -> None:
        _at_least_one(self.n_steps)
        if not (self.start > 0.0 and self.end > 0.0):
            raise ConfigError("temperatures are positive", found=f"{self.start} and {self.end}")

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.start * (self.end / self.start) ** _over(step, self.n_steps)
