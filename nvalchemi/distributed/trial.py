"""Whether an optimizer can step on shards, tried on small tensors before the first step of a run."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from nvalchemi.distributed.tensors import is_sharded_tensor
from nvalchemi.errors import ConfigError

_OF_SHARDS = re.compile(r"DTensor|placement|sharding (strategy|propagation)", re.IGNORECASE)


def check_steps(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Let a copy of ``optimizer`` take a step on small tensors that are sharded like its parameters; all ranks must call.

    Optimizers that look at one entry at a time work on shards. Those that look at a whole matrix (Muon, Adafactor) do where torch knows how,
    which depends on its shape.

    Raises
    ------
    ConfigError
        Where torch refuses. Any other error of the copy says nothing about the optimizer and is left to the first step.
    """
    for group in optimizer.param_groups:
        models = {_small(p): p for p in group["params"] if is_sharded_tensor(p)}
        if not models:
            continue
        try:
            twin = copy.copy(optimizer)
            twin.state = defaultdict(dict)
            twin.param_groups = [{**group, "params": [_like(p, shape) for shape, p in models.items()]}]
            twin.step()
        except Exception as error:
            if _OF_SHARDS.search(str(error)) is None:
                return
            raise ConfigError(
                f"optimizer '{name}' cannot step on sharded parameters",
                found=f"{type(optimizer).__name__}: {str(error).splitlines()[0][:200]}",
                needed="one that looks at each entry by itself, such as torch.optim.AdamW",
                fix="take another optimizer, or DDPHook() where the model fits on each device",
            ) from error


def _small(parameter: Any) -> tuple[int, ...]:
    """A shape like that of ``parameter``: the same dimensions are the longer ones, and rows divide between the ranks or do not."""
    ranks, sizes = parameter.device_mesh.size(), sorted(set(parameter.shape))
    return tuple(n if n <= 4 * ranks else 4 * ranks * (1 + sizes.index(n)) + n % ranks for n in parameter.shape)


def _like(parameter: Any, shape: tuple[int, ...]) -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    whole = torch.ones(shape, dtype=parameter.dtype, device=parameter.to_local().device)
    made = nn.Parameter(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
    made.grad = torch.ones_like(made)
    return made
