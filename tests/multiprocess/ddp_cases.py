"""What the ranks do in test_ddp.py; each function is also called in one process for the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from nvalchemi.data import AtomicData, Batch
from nvalchemi.distributed.replicate import Replicas
from nvalchemi.distributed.tensors import full
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    Hook,
    OptimizerConfig,
    StressMSELoss,
    TrainingStage,
    TrainingStrategy,
    on,
)
from nvalchemi.training.hooks import DDPHook, FSDP2Hook


class Aware:
    """A sampler that knows of ranks and gives a rank's own batches in order."""

    def __init__(self, length: int, rank: int, num_replicas: int) -> None:
        self.length, self.rank, self.num_replicas = length, rank, num_replicas

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(range(self.length))


class Stored(list[Any]):
    draws_nothing = True


def own(batches: Any, manager: Any) -> DataLoader[Any]:
    """A loader of a rank's own batches, which is therefore divided already."""
    sampler = Aware(len(batches), manager.rank, manager.world_size)
    batches = Stored(batches) if type(batches) is list else batches
    return DataLoader(batches, batch_size=1, sampler=sampler, collate_fn=lambda items: items[0])


class Keep(Hook):
    """Every step's gradients, loss and counters."""

    agreed = True

    def __init__(self) -> None:
        self.gradients: list[list[torch.Tensor]] = []
        self.losses: list[float] = []
        self.samples: list[int] = []

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx) -> None:
        self.gradients.append([full(p.grad).clone() for p in ctx.model.parameters()])
        self.losses.append(ctx.loss.total.item())

    @on(TrainingStage.STEP_END)
    def counters(self, ctx) -> None:
        self.samples.append(ctx.progress.samples)


def structures(sizes: list[int]) -> list[AtomicData]:
    """Molecules of the given sizes, every third without an energy."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for number, n in enumerate(sizes):
        positions = 1.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
        energy = float("nan") if number % 3 == 2 else float(n)
        forces = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        numbers = torch.randint(1, 3, (n,), generator=generator) * 5 + 1
        result.append(AtomicData(positions, numbers, energy=energy, forces=forces))
    return result


def crystals(sizes: list[int]) -> list[AtomicData]:
    """Periodic structures with stresses, every third without one."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for number, data in enumerate(structures(sizes)):
        stress = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        stress = torch.full((3, 3), float("nan")).double() if number % 3 == 1 else 0.1 * (stress + stress.mT)
        cell = torch.eye(3, dtype=torch.float64) * (6.0 + 0.1 * number)
        n = len(data.positions)
        result.append(
            AtomicData(
                3.0 * torch.rand(n, 3, generator=generator, dtype=torch.float64), data.atomic_numbers,
                energy=float(n), forces=torch.randn(n, 3, generator=generator, dtype=torch.float64), stress=stress, cell=cell, pbc=True,
            )
        )  # fmt: skip
    return result


class Plain(nn.Module):
    """A PaiNN that does not say that it has its own gradient: autograd differentiates it."""

    def __init__(self, inner: PaiNN) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, numbers, vectors, pairs):
        return self.inner(numbers, vectors, pairs)


def potential(autograd: bool) -> InteratomicPotential:
    torch.manual_seed(1)
    net = PaiNN(["C", "Na"], n_features=8, n_interactions=2, cutoff=4.0, n_rbf=5).double()
    return InteratomicPotential(Plain(net) if autograd else net, cutoff=4.0)


def train(manager, shares, *, autograd=False, accumulate=1, epochs=2, hooks=(), stress=False, kind=DDPHook, **options):
    """Train on the rank's share of ``shares[rank][batch] = list of structures``; returns what :class:`Keep` saw and the weights."""
    model = potential(autograd)
    net = model.net
    batches = [Batch.from_data_list(part) for part in shares[manager.rank]]
    loss_fn = EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss()
    keep = Keep()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}),
        loss_fn=loss_fn + 5.0 * StressMSELoss() if stress else loss_fn,
        num_epochs=epochs,
        accumulate=accumulate,
        distributed_manager=manager,
        hooks=[keep, *hooks, kind(**options)],
    )
    strategy.run(own(batches, manager))
    assert model.net is net  # unwrapped
    return {
        "gradients": keep.gradients,
        "losses": keep.losses,
        "samples": keep.samples,
        "weights": [full(p).detach() for p in model.parameters()],
    }


def gradients(manager, shares, autograd, accumulate, options):
    return train(manager, shares, autograd=autograd, accumulate=accumulate, **options)


def sharded(manager, shares, autograd, accumulate, options, stress=False):
    return train(manager, shares, autograd=autograd, accumulate=accumulate, kind=FSDP2Hook, stress=stress, **options)


def counted(manager, shares, accumulate):
    """How many all-reduces of gradients a step takes, and that weights are the same on all ranks after each."""
    calls = []

    def hook(state, bucket):
        calls.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] / manager.world_size)

    spread: list[float] = []
    per_step: list[int] = []

    class Same(Hook):
        @on(TrainingStage.STEP_END)
        def look(self, ctx):
            per_step.append(len(calls))
            calls.clear()
            flat = torch.cat([p.detach().flatten() for p in ctx.model.parameters()])
            highest, lowest = flat.clone(), flat.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            spread.append(float((highest - lowest).max()))

    seen = train(manager, shares, accumulate=accumulate, hooks=[Same()], comm_hook=hook)
    return seen | {"per_step": per_step, "spread": spread}


def layouts(manager: Any) -> list[bool]:
    """Whether the gradient of a weight of one row, by second derivatives, has the strides of the weight: among replicas, and after them."""
    models: dict[str, nn.Module] = {"main": nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))}
    plain = models["main"]
    weight = plain[2].weight  # type: ignore[index]
    replicas = Replicas(models, ["main"])
    found = []
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        energy = models["main"](x).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        (energy.square() + slope.square().sum()).backward()
        found.append(weight.grad.stride() == weight.stride())
        plain.zero_grad()
        replicas.close()
    return found
