"""Whether an optimizer can step on shards, tried on small tensors before the first step of a run."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed.tensors import full, is_sharded_tensor
from nvalchemi.errors import ConfigError

_OF_SHARDS = re.compile(r"DTensor|placement|sharding (strategy|propagation)", re.IGNORECASE)


def check_steps(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Let copies of ``optimizer`` take a step on small tensors, whole and sharded like its parameters; all ranks must call.

    Optimizers that look at one entry at a time work on shards. Those that look at a whole matrix (Muon, Adafactor) do where torch knows how,
    which depends on its shape.

    Raises
    ------
    ConfigError
        Where torch refuses, and where the step on shards is another one. Any other error of the copy says nothing about the optimizer and
        is left to the first step.
    """
    for group in optimizer.param_groups:
        models = {_small(p): p for p in group["params"] if is_sharded_tensor(p) and p.numel()}
        if not models:
            continue
        kind = type(optimizer).__name__
        try:
            shards = _stepped(optimizer, group, [_sharded_like(p, shape) for shape, p in models.items()])
            whole, again = (_stepped(optimizer, group, [_whole_like(p, shape) for shape, p in models.items()]) for _ in range(2))
        except Exception as error:
            if _OF_SHARDS.search(str(error)) is None:
                return
            raise _refused(name, f"{kind}: {str(error).splitlines()[0][:200]}") from error
        random = not all(map(torch.equal, whole, again))  # its steps on shards are others and right
        if not random and not all(map(_close, map(full, shards), whole)):
            raise _refused(
                name, f"{kind}, whose step on the shards of a tensor is not that on the tensor, by torch {torch.__version__}"
            )


def _refused(name: str, found: str) -> ConfigError:
    return ConfigError(
        f"optimizer '{name}' cannot step on sharded parameters",
        found=found,
        needed="one that looks at each entry by itself, such as torch.optim.AdamW",
        fix="take another optimizer, or DDPHook() where the model fits on each device",
    )


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]) -> list[Tensor]:
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": parameters}]
    twin.step()
    return [p.detach() for p in parameters]


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=64 * torch.finfo(a.dtype).eps * float(b.abs().max()))


def _small(parameter: Any) -> tuple[int, ...]:
    """A shape like that of ``parameter``: the same dimensions are the longer ones, and rows divide between the ranks or do not."""
    ranks, sizes = parameter.device_mesh.size(), sorted(set(parameter.shape))
    return tuple(n if n <= 4 * ranks else 4 * ranks * (1 + sizes.index(n)) + n % ranks for n in parameter.shape)


def _whole_like(parameter: Any, shape: tuple[int, ...]) -> nn.Parameter:
    made = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=parameter.to_local().device))
    steep = torch.logspace(-2, 1, made.numel(), device=made.device)  # a mean over one rank's part is not that over all
    made.grad = steep.view(shape).to(made.dtype)
    return made


def _sharded_like(parameter: Any, shape: tuple[int, ...]) -> nn.Parameter:
    from torch.distributed.tensor import distribute_tensor

    whole = _whole_like(parameter, shape)
    assert whole.grad is not None
    mesh, placements = parameter.device_mesh, parameter.placements
    made = nn.Parameter(distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None))
    made.grad = distribute_tensor(whole.grad, mesh, placements, src_data_rank=None)
    return made
