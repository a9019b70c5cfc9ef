"""The whole state of a sharded model on one rank's host, one tensor after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvalchemi.distributed.blocks import reshard
from nvalchemi.distributed.ranks import Manager
from nvalchemi.distributed.tensors import full


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
