"""Shapes of a learning rate over a run: pure functions of how much of the run is over.

One shape serves runs that end after a number of steps and runs that end after a time; only the meaning of "over" differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from nvalchemi.errors import ConfigError

Kind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A factor on the learning rate: warm up, hold, then fall.

    Parameters
    ----------
    kind
        How it falls: ``"constant"`` not at all, ``"linear"``, or ``"cosine"`` (half a period).
    hold
        Share of the run (0 to 1) before the fall begins.
    final
        The factor at the end.
    warmup_steps
        Optimizer steps over which the factor rises from nearly 0 to 1; a warm-up is about the optimizer's state, so it is counted
        in steps even where the run is measured in time.
    """

    kind: Kind = "constant"
    hold: float = 0.0
    final: float = 0.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(
                "unknown shape of a learning rate", found=repr(self.kind), needed=f"one of {', '.join(get_args(Kind))}"
            )
        if not 0.0 <= self.hold < 1.0:
            raise ConfigError("hold is a share of the run", found=self.hold, needed="at least 0 and less than 1")
        if not 0.0 <= self.final <= 1.0:
            raise ConfigError("final is a factor on the learning rate", found=self.final, needed="between 0 and 1")
        if self.warmup_steps < 0:
            raise ConfigError("warmup_steps is negative", found=self.warmup_steps)

    def __call__(self, fraction: float, step: int) -> float:
        """The factor for the step after ``step`` others, when ``fraction`` of the run is over."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.kind == "constant":
            return warm
        fallen = min(max((fraction - self.hold) / (1.0 - self.hold), 0.0), 1.0)
        left = 1.0 - fallen if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * fallen))
        return warm * (self.final + (1.0 - self.final) * left)

    def over_steps(self, total: int) -> Callable[[int], float]:
        """The factor as a function of the steps taken, of a run of ``total`` steps: what ``torch``'s ``LambdaLR`` takes."""
        if total < 1:
            raise ConfigError("a schedule needs at least one step", found=total)
        return lambda step: self(step / total, step)
