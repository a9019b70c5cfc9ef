"""Shapes of a learning rate over a run: pure functions of how much of the run is over, and two schedulers made of them.

One shape serves runs that end after a number of steps and runs that end after a time; only the meaning of "over" differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

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


def warmup(optimizer: torch.optim.Optimizer, warmup_steps: int) -> LambdaLR:
    """Raise the rate over the first steps, then hold it: for ``OptimizerConfig(scheduler_cls=warmup, scheduler_kwargs=...)``.

    Parameters
    ----------
    optimizer
        Whose rates to move.
    warmup_steps
        Optimizer steps over which the factor rises evenly from ``1 / (warmup_steps + 1)`` to 1. A rate that was scaled for many processes
        needs it most (Goyal et al. 2017, arXiv:1706.02677, section 2.2).
    """
    shape = Shape(warmup_steps=warmup_steps)
    return LambdaLR(optimizer, lambda step: shape(0.0, step))


def warmup_cosine(optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> LambdaLR:
    """Raise the rate over the first steps, then let it fall along half a cosine: for ``OptimizerConfig(scheduler_cls=warmup_cosine, ...)``.

    Parameters
    ----------
    optimizer
        Whose rates to move.
    total_steps
        Optimizer steps of the whole run. A run that ends by epochs has fewer of them on more processes.
    warmup_steps
        As in :func:`warmup`; the cosine begins after them.
    final
        The factor at the end (Loshchilov and Hutter 2017, arXiv:1608.03983).

    Raises
    ------
    ConfigError
        For a warm-up as long as the run.
    """
    if not warmup_steps < total_steps:
        raise ConfigError(
            "the warm-up is as long as the run", found=f"{warmup_steps} of {total_steps} steps", needed="fewer warmup_steps"
        )
    shape = Shape("cosine", hold=max(warmup_steps, 0) / total_steps, final=final, warmup_steps=warmup_steps)
    return LambdaLR(optimizer, shape.over_steps(total_steps))
