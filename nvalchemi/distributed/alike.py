"""What no wrapper looks after is the same on all ranks from the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed.collectives import broadcast, gather
from nvalchemi.distributed.ranks import Manager
from nvalchemi.distributed.tensors import is_sharded_tensor
from nvalchemi.errors import ConfigError


@torch.no_grad()
def give_to_all(tensors: Iterable[Tensor], manager: Manager) -> None:
    """Give every rank rank 0's values, in place; all must call with as many tensors of the same forms."""
    for tensor in tensors:
        tensor.copy_(broadcast(tensor, manager))


def make_alike(models: Mapping[str, nn.Module], parts: Iterable[nn.Module], manager: Manager) -> None:
    """Give every rank rank 0's models but for the ``parts`` that a wrapper looks after; all must call.

    That is buffers and frozen parameters beside them, and models that are not trained.

    Raises
    ------
    ConfigError
        Where the ranks' models are not of one form.
    """
    inside = {id(tensor) for part in parts for tensor in _tensors(part).values()}
    rest: dict[str, Any] = {
        f"{model}.{name}": tensor
        for model, module in models.items()
        for name, tensor in _tensors(module).items()
        if id(tensor) not in inside and not tensor.is_meta and not is_sharded_tensor(tensor)
    }
    forms = gather({name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in rest.items()}, manager)
    for rank, form in enumerate(forms):
        unlike = [name for name in forms[0].keys() | form.keys() if forms[0].get(name) != form.get(name)]
        if unlike:
            first = min(unlike)
            raise ConfigError(
                "the ranks have unlike models",
                found=f"{first}: {forms[0].get(first, 'nothing')} on rank 0, {form.get(first, 'nothing')} on rank {rank}",
                fix="make the models in the same way on every rank",
            )
    give_to_all(rest.values(), manager)


def _tensors(module: nn.Module) -> dict[str, Any]:
    return dict(chain(module.named_parameters(), module.named_buffers()))
