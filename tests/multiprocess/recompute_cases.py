"""What the ranks do in test_recompute_ranks.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from nvalchemi.distributed import unsharded
from nvalchemi.distributed.recompute import is_recomputed, recompute
from nvalchemi.models import InteratomicPotential
from nvalchemi.training.hooks import ActivationCheckpointHook
from tests.multiprocess.ddp_cases import train
from tests.multiprocess.gathered_cases import LOSSES, WIDTH, Energy, Net, Residual, shard, worst

PARTS = {
    "the blocks": lambda net: [m for m in net.modules() if isinstance(m, Residual)],
    "within the blocks": lambda net: [m.up for m in net.modules() if isinstance(m, Residual)],
    "around the blocks": lambda net: [net],
    "beside the blocks": lambda net: [net.inner, net.head],
}


def sharded(manager: Any, loss: str, how: str, parts: str, first: bool) -> float:
    """The largest error of a gradient: two micro-batches of a network that is sharded and recomputed, one ``first``."""
    torch.manual_seed(0)
    whole = Energy().double()
    model = copy.deepcopy(whole)
    chosen = PARTS[parts](model.net)
    if first:
        for module in chosen:
            recompute(module)
    shard(model.net, how)
    for module in chosen:
        recompute(module)
    x = torch.randn(8 * manager.world_size, WIDTH, dtype=torch.float64)
    function = LOSSES.get(loss, lambda m, x: m(x).square().mean())
    function(whole, x).backward()
    for part in x.chunk(manager.world_size)[manager.rank].chunk(2):
        (function(model, part) / 2).backward()
    for unit in model.net.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()
    found = worst(whole, model)
    with unsharded(model):
        gradient = model.gradient(x)
    assert torch.allclose(gradient, whole.gradient(x), rtol=1e-12, atol=1e-14)
    return found


def plain_sharded(manager: Any, parts: str) -> float:
    """Not inside an energy: through the hooks of ``fully_shard``, a loss of first order, dropout and a running mean."""
    torch.manual_seed(0)

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = Net(dropout=0.4), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.norm(x))

    whole = Tower().double()
    model = copy.deepcopy(whole)
    for module in PARTS[parts](model.net):
        recompute(module)
    for block in model.net.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.randn(8, WIDTH, dtype=torch.float64)  # the same on all ranks, for the running means
    for m in (whole, model):
        torch.manual_seed(7)
        m(x).square().mean().backward()
    assert model.norm.num_batches_tracked.item() == 1
    assert torch.equal(model.norm.running_mean, whole.norm.running_mean)
    return worst(whole, model)


def replicated(manager: Any, shares: Any, accumulate: int, autograd: bool) -> dict[str, Any]:
    """A potential's training under DDPHook with its layers recomputed."""
    seen: list[bool] = []

    class Look(ActivationCheckpointHook):
        def start(self, ctx: Any) -> None:
            super().start(ctx)
            assert isinstance(ctx.model, InteratomicPotential)
            seen.append(is_recomputed(ctx.model.net))

    result = train(manager, shares, autograd=autograd, accumulate=accumulate, hooks=[Look()])
    assert seen == [True]
    return result


def under_fsdp2(manager: Any, loss: str, accumulate: int, hooks: str) -> dict[str, Any]:
    """Ten steps under FSDP2Hook, with averages, of a network whose blocks are recomputed, or compiled."""
    from nvalchemi.training.hooks import CompileHook, EMAHook
    from tests.multiprocess import fsdp_cases

    ema = EMAHook(0.5)
    chosen: Any = {"recomputed": ActivationCheckpointHook(nn.Sequential), "compiled": CompileHook(backend="eager"), "": None}[
        hooks
    ]
    found = fsdp_cases.run(manager, hooks=[ema, *([chosen] if chosen else [])], loss=loss, accumulate=accumulate)
    assert not is_recomputed(found["model"])
    return fsdp_cases.plain(found)
