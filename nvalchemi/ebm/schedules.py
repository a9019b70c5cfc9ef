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


def heat(t: float, epsilon_max: float, tau_star: float) -> float:
    """The temperature ε(t) of energy matching: 0 up to ``tau_star``, rising along a line to ``epsilon_max`` at t = 1, and so from there on."""
    return epsilon_max * min(max((t - tau_star) / (1 - tau_star), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class HeatingSchedule:
    """The noise scale √ε(t) of a way down an energy that ends at the temperature ``epsilon_max``: samples of energy matching.

    ε is 0 up to t = ``tau_star``, where the energy only carries noise to the data, rises along a line to ``epsilon_max`` at t = 1, and stays
    there; t goes from ``t_start`` to ``t_end`` over ``n_steps``, and beyond 1 for chains that are to settle. It is the ``noise_scale`` of
    `nvalchemi.ebm.samplers.LangevinDynamics`; with ``sqrt=False`` it is ε itself, for its ``temperature``. Balcerak et al., NeurIPS 2025.
    """

    epsilon_max: float
    tau_star: float = 0.8
    n_steps: int = 200
    t_start: float = 0.0
    t_end: float = 1.0
    sqrt: bool = True

    def __post_init__(self) -> None:
        _at_least_one(self.n_steps)
        if not (self.epsilon_max >= 0.0 and 0.0 <= self.tau_star < 1.0 and self.t_start <= self.t_end):
            raise ConfigError(
                "no such way from cold to hot",
                found=f"epsilon_max={self.epsilon_max}, tau_star={self.tau_star}, t from {self.t_start} to {self.t_end}",
                needed="epsilon_max at least 0, tau_star at least 0 and less than 1, t rising",
            )

    def __call__(self, step: int) -> float:
        """The value at a step."""
        epsilon = heat(self.t_start + (self.t_end - self.t_start) * _over(step, self.n_steps), self.epsilon_max, self.tau_star)
        return math.sqrt(epsilon) if self.sqrt else epsilon
