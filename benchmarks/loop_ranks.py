"""What the strategy with DDPHook costs over a bare hand-written DDP loop, on two processes that talk through gloo.

    python benchmarks/loop_ranks.py [--rounds 9]

Starts its own two processes and prints one JSON line a figure. The two loops take turns, so that a machine whose speed drifts does not
favour one of them.

- ``ranks_overhead_us``: microseconds a step over the bare DDP loop, tiny MLP over ready batches;
- ``ranks_overhead_deciding_hook_us``: the same with a hook that may skip a step at GRADIENTS_READY for a reason of its rank alone;
- ``ranks_collectives``, ``ranks_collectives_deciding_hook``: collectives a step beside those of DDP;
- ``one_all_reduce_us``: what one all-reduce of eight numbers takes here, for comparison.
"""

from __future__ import annotations

import argparse
import gc
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nvalchemi.distributed import SingleProcess
from nvalchemi.training import Hook, OptimizerConfig, TrainingStage, TrainingStrategy, on
from nvalchemi.training.hooks import DDPHook

STEPS = 200


class Own:
    """A sampler that knows of ranks and gives a rank's own batches in order, so that nothing is divided."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas = rank, 2

    def set_epoch(self, epoch: int) -> None: ...

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter(range(STEPS))


class Stored(list[Any]):
    """Batches that are ready: reading one draws no random numbers."""

    draws_nothing = True


class Deciding(Hook):
    """Looks at the gradients, and could skip the step."""

    @on(TrainingStage.GRADIENTS_READY)
    def look(self, ctx: Any) -> None: ...


def paired(bare: Callable[[], None], ours: Callable[[], None], rounds: int) -> tuple[float, float, float]:
    """Seconds a step of both, as medians over the rounds, and the median difference."""
    bare(), ours()
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    for i in range(rounds):
        pair = {}
        for name, run in (("bare", bare), ("ours", ours)) if i % 2 else (("ours", ours), ("bare", bare)):
            dist.barrier()
            start = time.perf_counter()
            run()
            pair[name] = (time.perf_counter() - start) / STEPS
        times.append((pair["bare"], pair["ours"]))
    gc.enable()
    return (
        statistics.median(t[0] for t in times),
        statistics.median(t[1] for t in times),
        statistics.median(t[1] - t[0] for t in times),
    )


def counted(run: Callable[[], None]) -> float:
    """Collectives a step that are asked for in Python: DDP's own are not."""
    calls = 0
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
    before = {name: getattr(dist, name) for name in names}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    try:
        for name, function in before.items():
            setattr(dist, name, counting(function))
        run()
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    return round(calls / STEPS, 1)


def loops(manager: SingleProcess, hooks: list[Hook]) -> tuple[Callable[[], None], Callable[[], None]]:
    """The bare loop and the strategy, over the same batches."""
    torch.manual_seed(manager.rank)
    batches = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(STEPS)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    bare_model, our_model = DistributedDataParallel(make()), make()
    optimizer = torch.optim.SGD(bare_model.parameters(), lr=1e-3)

    def loader() -> Any:
        return DataLoader(Stored(batches), batch_size=1, sampler=Own(manager.rank), collate_fn=lambda items: items[0])  # type: ignore[arg-type]

    def bare() -> None:
        for x, y in loader():
            optimizer.zero_grad()
            loss = (bare_model(x) - y).square().mean()
            loss.backward()
            optimizer.step()

    strategy = TrainingStrategy(
        models=our_model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda prediction, batch: (prediction - batch[1]).square().mean(),
        num_steps=STEPS,
        distributed_manager=manager,
        hooks=[*hooks, DDPHook()],
    )
    return bare, lambda: strategy.run(loader()) and None


def report(name: str, value: float, unit: str, **more: float) -> None:
    """One JSON line."""
    print(
        json.dumps({"name": name, "value": round(value, 4), "unit": unit, **{k: round(v, 2) for k, v in more.items()}}),
        flush=True,
    )


def work(rank: int, meeting: str, rounds: int) -> None:
    """What each of the two processes does; the first reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    manager = SingleProcess(torch.device("cpu"), rank=rank, local_rank=rank, world_size=2, distributed=True)
    say = report if rank == 0 else lambda *args, **kwargs: None
    for suffix, hooks in (("", []), ("_deciding_hook", [Deciding()])):
        bare, ours = loops(manager, hooks)
        say(f"ranks_collectives{suffix}", counted(ours), "calls/step")
        first, second, difference = paired(bare, ours, rounds)
        say(f"ranks_overhead{suffix}_us", 1e6 * difference, "us/step", bare_us=1e6 * first, strategy_us=1e6 * second)
    small = torch.zeros(8, dtype=torch.float64)
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        dist.all_reduce(small)
        times.append(time.perf_counter() - start)
    say("one_all_reduce_us", 1e6 * statistics.median(times), "us")
    dist.destroy_process_group()


def main() -> None:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(rank, str(Path(folder) / "meeting"), rounds)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
