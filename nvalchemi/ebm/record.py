"""What is kept of a sampler's way: thinning, trajectory, diagnostics, progress and the watch for values that are not finite.

Written once for all samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nvalchemi.ebm.chains import Chains
from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.models import EnergyModel

Progress = Callable[[int, int], None]

CHECK_EVERY = 50
"""Steps between two looks at the chains: each waits for the device, which one look a step would stall."""


class Record:
    """Keeps every ``thin``-th state.

    Parameters
    ----------
    chains, model
        What is sampled.
    n_steps, thin
        How many steps there are, and which of them are kept: ``n_steps // thin`` states.
    trajectory, diagnostics
        What is kept of them: the positions, or numbers about them.
    """

    def __init__(
        self, chains: Chains, model: EnergyModel | None, n_steps: int, thin: int, trajectory: bool, diagnostics: bool
    ) -> None:
        if n_steps < 0 or thin < 1:
            raise ConfigError(
                "no such number of steps", found=f"n_steps={n_steps}, thin={thin}", needed="n_steps at least 0, thin at least 1"
            )
        self._chains, self._model, self._thin = chains, model, thin
        self._kept = n_steps // thin
        self._path = chains.start.new_empty(self._kept, *chains.start.shape) if trajectory else None
        self._numbers: dict[str, Tensor] | None = {} if diagnostics else None
        self.needed = trajectory or diagnostics

    def keep(self, step: int, x: Tensor, extra: Mapping[str, Tensor]) -> None:
        """Note the state after step ``step`` (from 0), where it is one of those kept."""
        index, rest = divmod(step + 1, self._thin)
        if rest:
            return
        if self._path is not None:
            self._path[index - 1] = x
        if self._numbers is not None:
            found = {**self._chains.moments(x), **extra}
            if self._model is not None and "energy" not in found:
                found["energy"] = self._chains.energy(self._model, x).mean()
            for name, value in found.items():
                if name not in self._numbers:
                    self._numbers[name] = value.new_empty(self._kept, *value.shape)
                self._numbers[name][index - 1] = value

    def result(self, x: Tensor) -> Any:
        """What ``sample()`` gives back: the last state or the trajectory, and the diagnostics if they were asked for."""
        out = self._chains.inputs(x) if self._path is None else self._chains.trajectory(self._path)
        return out if self._numbers is None else (out, self._numbers)


def check_finite(chains: Chains, x: Tensor, sampler: str, since: int, step: int, step_size: object) -> None:
    """Refuse chains that are no longer finite.

    Parameters
    ----------
    since, step
        Steps taken when they were last seen to be finite, and by now.
    step_size
        As it was declared, or of this step.

    Raises
    ------
    TrainingError
        Naming the steps, the step size and how many chains it were.
    """
    # One pass: a sum is finite only where every number is. What is finite and overflows the sum is looked at one by one.
    if math.isfinite(x.sum()):
        return
    finite = torch.isfinite(x)
    if finite.all():
        return
    lost = int((chains.total((~finite).to(x.dtype)) > 0).sum())
    where = f"at step {step}" if step - since <= 1 else f"between step {since + 1} and step {step}"
    raise TrainingError(
        f"chains of {sampler} left the finite numbers {where}",
        found=f"{lost} of {chains.size} chains with NaN or infinite positions; step size {step_size}",
        fix="take a smaller step_size, or bound the positions with clamp",
    )


@contextmanager
def shown(progress: bool | Progress, title: str) -> Iterator[Progress | None]:
    """Give what to call with (steps done, steps in all): the user's own function, a bar in the terminal, or nothing."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    else:
        from rich.progress import Progress as Bar

        with Bar(transient=True) as bar:
            task = bar.add_task(title)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def quiet(model: Any) -> Iterator[None]:
    """Sample without graphs, with the model in evaluation mode; modes are as they were afterwards, also after an error.

    Chains made under ``torch.inference_mode`` could enter no graph later, so sampling leaves it.
    """
    training = [module for module in model.modules() if module.training] if isinstance(model, torch.nn.Module) else []
    for module in training:
        module.training = False
    try:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                yield
        else:
            with torch.no_grad():
                yield
    finally:
        for module in training:
            module.training = True
