"""What the ranks do in test_gathered.py; each function gives numbers that are the same on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed import unsharded
from nvalchemi.distributed.collectives import gather
from nvalchemi.models import EnergyModel, InteratomicPotential, PaiNN

WIDTH = 6


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Any]:
        """Keywords, a dict, a tensor handed through and something that is no tensor: whatever a block of a real network may give."""
        y = x + self.down(self.dropout(nn.functional.silu(self.up(x))))
        return {"x": y if shift is None else y + shift, "as it came": x, "name": "residual"}


class Net(nn.Module):
    """Blocks that are sharded by themselves, layers and a parameter that belong to the root."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale
        for block in self.blocks:
            x = block(x, shift=x.mean(-1, keepdim=True))["x"]
        return self.head(x)


class Energy(EnergyModel):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = Net(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


def shard(net: nn.Module, how: str, **options: Any) -> None:
    """``"blocks"`` and the rest around them, ``"whole"`` at once, or the ``"layers only"``."""
    if how != "whole":
        for block in net.layers if isinstance(net, PaiNN) else net.blocks:
            fully_shard(block, **options)
    if how != "layers only":
        fully_shard(net, **options)


def score(model: EnergyModel, x: Tensor) -> Tensor:
    return model.gradient(x, create_graph=True).square().sum(-1).mean()


def with_energy(model: EnergyModel, x: Tensor) -> Tensor:
    energy, gradient = model.energy_and_gradient(x, create_graph=True)
    return (energy.square() + gradient.square().sum(-1)).mean()


def own_call(model: EnergyModel, x: Tensor) -> Tensor:
    """A user's own call of torch, which knows of nothing."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum(-1).mean()


def trace(model: EnergyModel, x: Tensor) -> Tensor:
    """Third order in the end."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(gradient[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(WIDTH)]
    return (0.5 * gradient.square().sum(-1) + sum(rows)).mean()


def two_phases(model: EnergyModel, x: Tensor) -> Tensor:
    """A term of second order, then one of first order, and one backward for both."""
    return score(model, x) + model(x).mean() - 0.5 * model(x + 1.0).mean()


def two_phases_turned(model: EnergyModel, x: Tensor) -> Tensor:
    first = model(x).mean() - 0.5 * model(x + 1.0).mean()
    return first + score(model, x)


LOSSES: dict[str, Callable[[EnergyModel, Tensor], Tensor]] = {
    f.__name__: f for f in (score, with_energy, own_call, trace, two_phases, two_phases_turned)
}


def gradients_agree(manager: Any, loss: str, how: str, accumulate: int, two_dimensions: bool) -> float:
    """The largest error of a gradient of the sharded model, relative to the largest entry of the unsharded one's."""
    torch.manual_seed(0)
    whole = Energy().double()
    model = copy.deepcopy(whole)
    options = (
        {"mesh": init_device_mesh("cpu", (2, manager.world_size // 2), mesh_dim_names=("replicate", "shard"))}
        if two_dimensions
        else {}
    )
    shard(model.net, how, **options)
    x = torch.randn(4 * manager.world_size * accumulate, WIDTH, dtype=torch.float64)
    LOSSES[loss](whole, x).backward()
    for part in x.chunk(manager.world_size)[manager.rank].chunk(accumulate):
        (LOSSES[loss](model, part) / accumulate).backward()
    for unit in model.net.modules():
        if hasattr(unit, "reshard"):
            unit.reshard()
    return worst(whole, model)


def worst(whole: nn.Module, sharded: nn.Module) -> float:
    errors = []
    for (name, p), q in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        found = None if q.grad is None else (q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad)
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        if found is None:
            assert not expected.any(), f"{name} got no gradient"
            continue
        assert found.shape == expected.shape, name
        errors.append(((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item())
    return max(errors)


def training_agrees(manager: Any, loss: str) -> float:
    """Twenty steps of Adam."""
    torch.manual_seed(0)
    whole = Energy().double()
    model = copy.deepcopy(whole)
    shard(model.net, "blocks")
    steps = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (whole, model)]
    for _ in range(20):
        x = torch.randn(4 * manager.world_size, WIDTH, dtype=torch.float64)
        for m, own, optimizer in ((whole, x, steps[0]), (model, x.chunk(manager.world_size)[manager.rank], steps[1])):
            optimizer.zero_grad()
            LOSSES[loss](m, own).backward()
            optimizer.step()
    return max(
        ((q.full_tensor() - p).abs().max() / p.abs().max()).item()
        for p, q in zip(whole.parameters(), model.parameters(), strict=True)
    )


def structures() -> list[AtomicData]:
    generator = torch.Generator().manual_seed(2)
    return [
        AtomicData(
            atomic_numbers=torch.tensor(([1, 8, 6] * 3)[:n]),
            positions=torch.randn(n, 3, generator=generator, dtype=torch.float64) * 1.5,
        )
        for n in (3, 5, 4, 6)
    ]


def potential_agrees(manager: Any, how: str) -> float:
    """Energies and forces of PaiNN: a loss of both, on ranks with unlike numbers of atoms."""
    torch.manual_seed(0)
    whole = InteratomicPotential(PaiNN(elements=[1, 6, 8], n_features=8, n_interactions=2, n_rbf=6).double())
    model = copy.deepcopy(whole)
    shard(model.net, how)

    def loss(potential: InteratomicPotential, batch: Batch) -> Tensor:
        found = potential.predict(batch, ("energy", "forces"))
        return found["energy"].square().sum() + 3.0 * found["forces"].square().sum()

    data = structures()
    loss(whole, Batch.from_data_list(data)).backward()
    size = len(data) // manager.world_size
    own = data[manager.rank * size : (manager.rank + 1) * size]
    (loss(model, Batch.from_data_list(own)) * manager.world_size).backward()
    return worst(whole, model)


def sampling(manager: Any) -> dict[str, Any]:
    """What `unsharded` gives, communicates and leaves behind."""
    torch.manual_seed(0)
    whole = Energy().double()
    model = copy.deepcopy(whole)
    shard(model.net, "blocks")
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    before = [type(p).__name__ for p in model.parameters()]
    with unsharded(model):
        # one rank alone calls it more often: nothing may wait for the other
        for _ in range(1 + 3 * manager.rank):
            gradient = model.gradient(x)
    expected = whole.gradient(x)
    after = [type(p).__name__ for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).mean().backward()
    optimizer.step()
    whole(x).mean().backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    with unsharded(model.net):
        later = model(x)
    return {
        "gradient": (gradient - expected).abs().max().item(),
        "kinds": before == after,
        "later": (later - whole(x)).abs().max().item(),
        "constants": not later.requires_grad,
    }


def dropout(manager: Any) -> list[float]:
    """The masks of the forward are those of everything that is computed again, and differ from call to call."""
    torch.manual_seed(5)
    whole = Energy(dropout=0.5).double()
    model = copy.deepcopy(whole)
    shard(model.net, "blocks")
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    found = []
    for seed in (1, 2):
        for m in (whole, model):
            m.zero_grad()
            torch.manual_seed(seed)
            score(m, x).backward()
        found.append(worst(whole, model))
        found.append(model.net.blocks[0].up.weight.grad.full_tensor().norm().item())
    return found


def short(manager: Any) -> dict[str, Any]:
    """bf16 weights in the blocks, float32 gradients."""
    torch.manual_seed(0)
    whole = Energy()
    model = copy.deepcopy(whole)
    shard(model.net, "blocks", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x = torch.randn(8, WIDTH)
    score(whole, x).backward()
    score(model, x).backward()
    angles = []
    for p, q in zip(whole.parameters(), model.parameters(), strict=True):
        if p.grad is not None and p.grad.any():
            angles.append(nn.functional.cosine_similarity(p.grad.flatten(), q.grad.full_tensor().flatten(), dim=0).item())
    return {"dtypes": sorted({str(q.grad.dtype) for q in model.parameters()}), "angle": min(angles)}


def parameters_twice(manager: Any) -> str:
    """A gradient of parameters that is to be differentiated again."""
    model = Energy()
    shard(model.net, "blocks")
    x = torch.randn(4, WIDTH, requires_grad=True)
    try:
        model(x).sum().backward(create_graph=True)
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return "no error"


def held(manager: Any) -> list[dict[str, float]]:
    """Bytes of weights that are alive at once in a step of second order, over all weights, as counted from what is gathered."""
    from nvalchemi.distributed import gathered as module

    torch.manual_seed(0)
    model = Energy()
    shard(model.net, "blocks")
    alive, most = [0], [0]
    plain = module.gather

    class Counted:
        """Goes with a weight, and says when it is gone."""

        def __init__(self, size: int) -> None:
            self.size = size
            alive[0] += size
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= self.size

    def counting(places: Any, parts: Any) -> list[Tensor]:
        whole = plain(places, parts)
        for tensor in whole:
            tensor.counted = Counted(tensor.numel())  # type: ignore[attr-defined]
        return whole

    module.gather = counting
    try:
        score(model, torch.randn(4, WIDTH)).backward()
    finally:
        module.gather = plain
    total = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.net.blocks[0].parameters())
    return gather({"most": most[0], "left": alive[0], "total": total, "block": block}, manager)
