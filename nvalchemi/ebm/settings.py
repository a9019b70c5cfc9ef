"""Settings of a sampler: a number, one number a chain, or a function of the step that gives either."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.errors import ConfigError

Value: TypeAlias = float | Tensor
Setting: TypeAlias = float | Tensor | Callable[[int], float | Tensor]


def checked(name: str, setting: Setting, positive: bool = False) -> Setting:
    """The setting; numbers that are below zero or not finite are refused when they are declared, and zero too where it must be ``positive``.

    Raises
    ------
    ConfigError
        For these, and for what is no setting.
    """
    if isinstance(setting, Tensor):
        good = bool((torch.isfinite(setting) & (setting > 0 if positive else setting >= 0)).all())
        found: object = setting.flatten()[:8].tolist()
    elif isinstance(setting, (int, float)) and not isinstance(setting, bool):
        good, found = (setting > 0.0 if positive else setting >= 0.0) and setting < math.inf, setting
    elif callable(setting):
        return setting
    else:
        raise ConfigError(
            f"{name} cannot be that", found=repr(setting), needed="a number, a tensor (batch,) or a function of the step"
        )
    if not good:
        kind = "a finite number above 0" if positive else "a finite number, at least 0"
        raise ConfigError(f"{name} cannot be that", found=found, needed=kind)
    return setting


def changes(*settings: Setting) -> bool:
    """Whether any of them is a function of the step."""
    return any(not isinstance(setting, Tensor) and callable(setting) for setting in settings)


def value(name: str, setting: Setting, step: int, chains: Chains, positive: bool = False) -> Value:
    """What a setting is at a step (from 0): a number, or a tensor of no dimension or (size,); see `spread`.

    Raises
    ------
    ConfigError
        A tensor that has not one number a chain, or a number that is negative or not finite.
    """
    found = setting(step) if not isinstance(setting, Tensor) and callable(setting) else setting
    if not isinstance(found, Tensor):
        return float(found) if found is setting else float(checked(f"{name} at step {step}", found, positive))  # type: ignore[arg-type]
    if found.ndim and found.shape != (chains.size,):
        raise ConfigError(
            f"{name} does not fit the samples",
            found=f"shape {tuple(found.shape)} for {chains.size} samples",
            needed=f"a number, or one a sample: ({chains.size},)",
        )
    return found.to(chains.start)


def spread(number: Value, chains: Chains) -> Value:
    """A value in the form in which it multiplies positions."""
    return chains.spread(number) if isinstance(number, Tensor) and number.ndim else number


def root(number: Value) -> Value:
    """The square root of either kind of value."""
    return math.sqrt(number) if isinstance(number, float) else torch.sqrt(number)


def add_(x: Tensor, factor: Value, y: Tensor, times: float = 1.0) -> Tensor:
    """Add ``times`` ``factor`` times ``y`` to ``x`` in place."""
    return x.add_(y, alpha=times * factor) if isinstance(factor, float) else x.addcmul_(y, factor, value=times)
