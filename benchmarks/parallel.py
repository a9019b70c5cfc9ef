"""What replicated and sharded training cost on several processes, over hand-written loops that do the same.

    python benchmarks/parallel.py [--rounds 7] [--ranks 2] [--width 512] [--only ddp fsdp2 second memory large]

Starts its own processes (gloo, one thread each) and prints one JSON line a figure. Loops take turns, so that a machine whose speed drifts
does not favour one of them.

- ``ddp_step``: seconds a step of DDPHook over a loop around DistributedDataParallel; ``ratio`` is what counts. What several processes ask each other
  costs about a millisecond a step on two cores, whatever the size (``--width``) of the network;
- ``fsdp2_step``: the same of FSDP2Hook over a loop around ``fully_shard``, a loss of first order;
- ``fsdp2_second_order_step``: the same with denoising score matching. The hand-written loop is the one that torch allows: nothing is freed
  between the two backward passes, so it holds the whole model, which FSDP2Hook does not;
- ``fsdp2_held``: parameters, gradients, optimizer state and average of a rank over those of one process, times the number of ranks;
- ``fsdp2_peak_first_order``, ``fsdp2_peak_second_order``, ``replicated_peak``: most memory of a step over what is held, in units of all
  parameters, sixteen layers of 100 MB together;
- ``large_cd_step``, ``large_dsm_step`` (with ``--only large``): seconds a step of contrastive divergence and denoising score matching of an
  energy of 100 million parameters, sharded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nvalchemi.distributed import SingleProcess
from nvalchemi.distributed.shard import Sharding, Shards
from nvalchemi.distributed.tensors import local
from nvalchemi.ebm.losses import ContrastiveDivergence, DenoisingScoreMatching
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.models import EnergyModel
from nvalchemi.training import Hook, OptimizerConfig, Order, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import DDPHook, EMAHook, FSDP2Hook

STEPS, BATCH = 20, 64
PARTS = ("ddp", "fsdp2", "second", "memory")


class Net(EnergyModel):
    """Layers of one size."""

    def __init__(self, width: int, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.SiLU())))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum(-1)


class Own:
    """A sampler that knows of ranks and gives a rank's own batches in order, so that nothing is divided."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.num_replicas = rank, ranks

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter(range(STEPS))


class Stored(list[Any]):
    """Batches that are ready: reading one draws no random numbers."""

    draws_nothing = True


def report(name: str, value: float, unit: str, **more: float) -> None:
    """One JSON line."""
    print(
        json.dumps({"name": name, "value": round(value, 4), "unit": unit, **{k: round(v, 4) for k, v in more.items()}}),
        flush=True,
    )


class Clock(Hook):
    """Seconds of a run's steps, without what comes before the first."""

    order = Order.SAVE
    agreed = True

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    @on(TrainingStage.TRAINING_START)
    def begin(self, ctx: Any) -> None:
        dist.barrier()
        self.began = time.perf_counter()

    @on(TrainingStage.TRAINING_END)
    def end(self, ctx: Any) -> None:
        self.seconds = time.perf_counter() - self.began


def paired(bare: Callable[[], float], ours: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Seconds a step of ours, and the median of its ratios to the bare loop's."""
    bare(), ours()
    seconds, ratios = [], []
    gc.collect()
    gc.disable()
    for i in range(rounds):
        took = {}
        for name, run in (("bare", bare), ("ours", ours)) if i % 2 else (("ours", ours), ("bare", bare)):
            took[name] = run() / STEPS
        seconds.append(took["ours"])
        ratios.append(took["ours"] / took["bare"])
    gc.enable()
    return statistics.median(seconds), statistics.median(ratios)


def first_order(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def loops(manager: SingleProcess, width: int, kind: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """The loop by hand and the strategy, over the same batches."""
    torch.manual_seed(manager.rank)
    batches = [torch.randn(BATCH, width) for _ in range(STEPS)]
    hand, model = Net(width), Net(width)
    plain = hand.net
    if kind != "ddp":
        for layer in plain:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(plain)
    noise = torch.Generator().manual_seed(0)
    units = [m for m in hand.net.modules() if hasattr(m, "reshard")]
    if kind == "second":
        hand.net.set_reshard_after_forward(False)
        hand.net.set_reshard_after_backward(False)

    def loss_of(x: Tensor) -> Tensor:
        if kind != "second":
            return hand.net(x).square().sum(-1).square().mean()
        z = torch.randn(x.shape, generator=noise)
        noisy = (x + 0.3 * z).requires_grad_()
        # past the facade, whose calls would go through our own operations
        energy = hand.net(noisy).square().sum(-1).sum()
        (gradient,) = torch.autograd.grad(energy, noisy, create_graph=True)
        return 0.5 * (gradient - z / 0.3).square().sum(-1).mean()

    def bare() -> float:
        # as a run of the strategy begins: buckets and the optimizer's state come to be in its first steps
        if kind == "ddp":
            hand.net = DistributedDataParallel(plain)
        optimizer = torch.optim.Adam(hand.parameters(), lr=1e-4)
        dist.barrier()
        start = time.perf_counter()
        for index in DataLoader(
            range(STEPS), batch_size=1, sampler=Own(manager.rank, manager.world_size), collate_fn=lambda i: i[0]
        ):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss_of(batches[index]).backward()
            for unit in units if kind == "second" else ():
                unit.reshard()
            optimizer.step()
        return time.perf_counter() - start

    clock = Clock()
    objective: dict[str, Any] = {"loss_fn": DenoisingScoreMatching(model, 0.3)}
    if kind != "second":
        objective = {"training_fn": lambda m, x: m(x), "loss_fn": lambda energies, x: energies.square().mean()}
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-4}),
        num_steps=STEPS,
        distributed_manager=manager,
        hooks=[clock, DDPHook() if kind == "ddp" else FSDP2Hook(wrap=nn.Linear)],
        **objective,
    )

    def ours() -> float:
        sampler = Own(manager.rank, manager.world_size)
        strategy.run(DataLoader(Stored(batches), batch_size=1, sampler=sampler, collate_fn=lambda items: items[0]))  # type: ignore[arg-type]
        return clock.seconds

    return bare, ours


class Held(Hook):
    """Bytes behind a rank's parts after a step."""

    def __init__(self) -> None:
        self.share = 0.0

    @on(TrainingStage.STEP_END)
    def look(self, ctx: Any) -> None:
        parameters = list(ctx.model.parameters())
        states = [v for s in ctx.optimizers["model"].state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        average = [
            a
            for average in next(h for h in ctx.hooks if h.name == "ema").state_dict()["models"].values()
            for a in average.values()
        ]
        tensors = [*parameters, *(p.grad for p in parameters), *states, *average]
        storages = {(s := local(t).untyped_storage()).data_ptr(): s.nbytes() for t in tensors}
        self.share = sum(storages.values()) / (5 * sum(p.numel() * p.element_size() for p in parameters))


def held(manager: SingleProcess) -> float:
    """An energy of 50 million parameters with Adam and an average."""
    look = Held()
    TrainingStrategy(
        models=Net(1760, 16),
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-4}),
        training_fn=lambda m, x: m(x),
        loss_fn=lambda energies, x: energies.square().mean(),
        num_steps=1,
        distributed_manager=manager,
        hooks=[EMAHook(0.9), look, FSDP2Hook()],
    ).run(DataLoader(torch.randn(8, 1760), batch_size=2))
    return look.share * manager.world_size


def peak(manager: SingleProcess, order: str) -> float:
    """Most memory of a step over what is held before it, in units of all parameters."""
    model = Net(1250, 16)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if order != "replicated":
        Shards({"model": model}, ["model"], Sharding(), manager, 0)
    loss = DenoisingScoreMatching(model, 0.1)
    x = torch.randn(8, 1250)

    def step() -> None:
        (first_order(model, x) if order == "first" else loss(x)).backward()

    step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # begins the high-water mark anew

    def of(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1]) * 1024

    before = of("VmRSS")
    step()
    return (of("VmHWM") - before) / total


def large(manager: SingleProcess, kind: str) -> float:
    """Seconds a step of an energy of 100 million parameters."""
    model = Net(2500, 16)
    loss: Any = DenoisingScoreMatching(model, 0.3)
    if kind == "cd":
        loss = ContrastiveDivergence(model, LangevinDynamics(model, 0.01), k_steps=5)
    times: list[float] = []

    @on(TrainingStage.STEP_END)
    def note(ctx: Any) -> None:
        times.append(time.perf_counter())

    TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.Adam, {"lr": 1e-4}),
        loss_fn=loss,
        num_steps=4,
        distributed_manager=manager,
        hooks=[note, FSDP2Hook()],
    ).run(DataLoader(torch.randn(64, 2500), batch_size=8))
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def work(rank: int, meeting: str, options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks)
    manager = SingleProcess(torch.device("cpu"), rank=rank, local_rank=rank, world_size=options.ranks, distributed=True)

    def tell(name: str, value: float, unit: str, **more: float) -> None:
        if rank == 0:
            report(name, value, unit, ranks=options.ranks, **more)

    for part, name in (("ddp", "ddp_step"), ("fsdp2", "fsdp2_step"), ("second", "fsdp2_second_order_step")):
        if part in options.only:
            seconds, ratio = paired(*loops(manager, options.width, part), options.rounds)
            tell(name, seconds, "s", ratio=ratio)
    if "memory" in options.only:
        # Memory goes back to the system as soon as it is free, so that the high-water mark is that of what is used. Steps take half as long again.
        ctypes.CDLL(None).mallopt(-3, 65536)
        tell("fsdp2_held", held(manager), "of 1/ranks")
        tell("fsdp2_peak_first_order", peak(manager, "first"), "of all parameters")
        tell("fsdp2_peak_second_order", peak(manager, "second"), "of all parameters")
        tell("replicated_peak", peak(manager, "replicated"), "of all parameters")
    if "large" in options.only:
        for kind in ("cd", "dsm"):
            tell(f"large_{kind}_step", large(manager, kind), "s")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=[*PARTS, "large"], default=list(PARTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=work, args=(r, str(Path(folder) / "meeting"), options)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
