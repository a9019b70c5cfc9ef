"""Learning rates that follow the number of processes, since the batch of a step grows with it.

Two rules are in use. For plain SGD the rate grows with the global batch (Goyal et al. 2017, arXiv:1706.02677). Where gradient noise is
what limits a step it grows with the square root (Krizhevsky 2014, arXiv:1404.5997), which for Adam and its kin follows from their
stochastic differential equation (Malladi et al. 2022, arXiv:2205.10287; their rule also moves the betas and epsilon, this one the rate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from nvalchemi.errors import ConfigError

Rule = Literal["linear", "sqrt"]

_POWERS: dict[str, float] = {"linear": 1.0, "sqrt": 0.5}
_WORDS = {"linear": "linear in the world size", "sqrt": "square root of the world size"}
KEY = "lr_factor"  # in a parameter group and in a scheduler's state: what the rates there are scaled by; absent means 1


@dataclass(frozen=True, slots=True)
class ScaledRates:
    """What was done to the rates of an optimizer; as text, one line that says it.

    Attributes
    ----------
    optimizer
        The optimizer's class.
    rule
        ``"linear"`` or ``"sqrt"``.
    world_size
        Number of processes.
    declared
        The rate of each parameter group as it was declared.
    factor
        What each was multiplied by.
    """

    optimizer: str
    rule: Rule
    world_size: int
    declared: tuple[float, ...]
    factor: float

    @property
    def scaled(self) -> tuple[float, ...]:
        """The rate of each parameter group as it is used."""
        return tuple(rate * self.factor for rate in self.declared)

    def __str__(self) -> str:
        before, after = (", ".join(dict.fromkeys(f"{rate:g}" for rate in rates)) for rates in (self.declared, self.scaled))
        return f"{self.optimizer}: lr {before} × {self.factor:g} ({_WORDS[self.rule]}, {self.world_size}) = {after}"


def check_rule(rule: Any) -> None:
    """Refuse a rule that is none."""
    if rule is not None and rule not in _POWERS:
        raise ConfigError("unknown lr_scaling", found=repr(rule), needed=f"{' or '.join(map(repr, _POWERS))}, or None")


def lr_factor(rule: Rule | None, world_size: int) -> float:
    """What the rates are multiplied by on so many processes."""
    return 1.0 if rule is None else float(world_size) ** _POWERS[rule]


def scale_rates(optimizer: torch.optim.Optimizer, rule: Rule | None, world_size: int) -> ScaledRates | None:
    """Scale the rates of a new optimizer, and of whatever state it loads later; ``None`` where the factor is 1.

    A state says what its rates were scaled by, so a run that goes on with another rule or on another number of processes has the rates
    of the present ones; what a scheduler has made of them is kept.
    """
    groups = optimizer.param_groups
    if rule is not None and any("lr" not in group for group in groups):
        raise ConfigError(f"{type(optimizer).__name__} has no learning rate to scale", fix="leave lr_scaling out")
    factor = lr_factor(rule, world_size)
    declared = tuple(float(group["lr"]) for group in groups) if rule is not None else ()
    _follow(optimizer, factor)
    optimizer.register_load_state_dict_post_hook(partial(_follow, factor=factor))
    return None if rule is None or factor == 1.0 else ScaledRates(type(optimizer).__name__, rule, world_size, declared, factor)


def rescaled(state: Any, ratio: float, key: str = "") -> Any:
    """A scheduler's state, also one that holds those of others, with its rates multiplied."""
    if isinstance(state, Mapping):
        return {name: rescaled(value, ratio, str(name)) for name, value in state.items()}
    if isinstance(state, list):
        return [rescaled(value, ratio, key) for value in state]
    return state * ratio if key in ("base_lrs", "_last_lr") else state


def _follow(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Bring the rates to ``factor`` times the declared, from what the groups say that they are scaled by."""
    for group in optimizer.param_groups:
        ratio = factor / group.pop(KEY, 1.0)
        if ratio != 1.0:  # a rate that needs no change keeps its every bit
            group |= {name: group[name] * ratio for name in ("lr", "initial_lr") if name in group}
        if factor != 1.0:
            group[KEY] = factor
