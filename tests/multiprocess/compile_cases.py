"""What the ranks do in test_compile_ranks.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from nvalchemi.distributed.blocks import lowest_units
from nvalchemi.training.hooks import CompileHook
from nvalchemi.training.hooks.compile import Compiled
from tests.multiprocess.ddp_cases import train
from tests.multiprocess.gathered_cases import WIDTH, Energy, score, worst


def replicated(manager: Any, shares: Any) -> dict[str, Any]:
    """Training under DDPHook with the net compiled."""
    return train(manager, shares, autograd=False, hooks=[CompileHook(strict=True, backend="eager")])


def sharded(manager: Any) -> tuple[float, float, list[int]]:
    """Blocks of a sharded net compiled: errors of a loss of first order and of one of second, and calls that were compiled in each."""
    torch.manual_seed(0)
    whole = Energy().double()
    model = copy.deepcopy(whole)
    for block in model.net.blocks:
        fully_shard(block)
    fully_shard(model.net)
    parts = [Compiled(unit, {"backend": "aot_eager"}, always=True) for unit in lowest_units(model.net)]
    x = torch.randn(4 * manager.world_size, WIDTH, dtype=torch.float64)
    errors, calls = [], []
    for loss in (lambda m, x: m(x).square().mean(), score):
        for m, own in ((whole, x), (model, x.chunk(manager.world_size)[manager.rank])):
            m.zero_grad()
            loss(m, own).backward()
        errors.append(worst(whole, model))
        calls.append(sum(part.calls for part in parts))
    return *errors, calls
