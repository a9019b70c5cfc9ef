"""The whole state of a sharded model: on one rank's host, one tensor after the other; and what is said where it is loaded as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.distributed.blocks import is_redirected, is_sharded, reshard
from nvalchemi.distributed.ranks import Manager
from nvalchemi.distributed.tensors import full, is_sharded_tensor
from nvalchemi.errors import ConfigError


@torch.no_grad()
def full_state(model: nn.Module, manager: Manager) -> dict[str, Tensor]:
    """Gather the state dict of ``model`` in rank 0's host memory; all ranks must call.

    Each tensor is whole on a device only until it is copied, so no device needs room for more than the largest one.

    Parameters
    ----------
    model
        Sharded, or not.
    manager
        Who the ranks are.

    Returns
    -------
    dict
        By the names of ``model.state_dict()``, which a plain model of the same kind loads; empty on the other ranks.
    """
    reshard(model)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = full(tensor)
        if manager.rank == 0:
            state[name] = whole.detach().to("cpu", copy=True)
    return state


def check_division(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not divided as the model is that is to load it.

    Raises
    ------
    ConfigError
        For whole weights and a sharded model, for shards and a whole model, and inside ``unsharded``, where weights are not the model's own.
    """
    if is_sharded(model):
        if any(map(is_redirected, model.modules())):
            raise ConfigError(
                "weights are loaded inside unsharded(...), where the model's own are put aside",
                fix="leave the with block before load_state_dict",
            )
        reshard(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = state.get(name)
        if isinstance(value, Tensor) and is_sharded_tensor(value) != is_sharded_tensor(parameter):
            if is_sharded_tensor(value):
                raise ConfigError(
                    "weights of a sharded model are loaded into one that is not",
                    found=f"'{name}', of which this rank has a part",
                    fix="full_state(model, manager) of nvalchemi.distributed gathers them whole on rank 0",
                )
            raise ConfigError(
                "whole weights are loaded into a sharded model",
                found=f"'{name}', of which this rank has room for a part",
                needed="shards, as in the state dict of a model that is sharded alike",
                fix="load before sharding; or set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, "
                "broadcast_from_rank0=True)) of torch.distributed.checkpoint.state_dict, with rank 0's state and {} elsewhere",
            )
