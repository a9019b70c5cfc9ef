"""What the strategy costs over a bare hand-written loop doing the same, in one run.

    python benchmarks/loop.py [--rounds 7]

Prints one JSON line a figure. The two loops take turns, so that a machine whose speed drifts does not favour one of them.

- ``mlp_overhead_us``: microseconds a step over the bare loop, tiny MLP over ready batches, without hooks;
- ``mlp_overhead_ten_hooks_us``: the same with ten idle hooks;
- ``potential_ratio_ten_hooks``: time of the strategy with ten idle hooks over the bare loop's, small PaiNN, energy and forces.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.transforms import NeighborList
from nvalchemi.models import InteratomicPotential, PaiNN
from nvalchemi.training import (
    EnergyMSELoss,
    ForceMSELoss,
    Hook,
    OptimizerConfig,
    TrainingSpan,
    TrainingStage,
    TrainingStrategy,
    around,
    on,
)


def idle_hooks(count: int) -> list[Hook]:
    """Hooks that listen at the stages of every step, and at one span, and do nothing."""

    class Idle(Hook):
        @on(TrainingStage.STEP_START)
        def start(self, ctx) -> None:
            pass

        @on(TrainingStage.GRADIENTS_READY)
        def gradients(self, ctx) -> None:
            pass

        @on(TrainingStage.STEP_END)
        def end(self, ctx) -> None:
            pass

    class IdleSpan(Idle):
        @around(TrainingSpan.FORWARD)
        def forward(self, ctx):
            yield

    hooks: list[Hook] = []
    for i in range(count):
        hook = IdleSpan() if i == 0 else Idle()
        hook.name = f"idle_{i}"
        hooks.append(hook)
    return hooks


def paired(bare: Callable[[], None], ours: Callable[[], None], steps: int, rounds: int) -> tuple[float, float, float]:
    """Seconds a step of both, as medians over the rounds, and the median of the rounds' ratios."""
    bare(), ours()
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    for i in range(rounds):
        pair = {}
        for name, run in (("bare", bare), ("ours", ours)) if i % 2 else (("ours", ours), ("bare", bare)):
            start = time.perf_counter()
            run()
            pair[name] = (time.perf_counter() - start) / steps
        times.append((pair["bare"], pair["ours"]))
    gc.enable()
    return (
        statistics.median(t[0] for t in times),
        statistics.median(t[1] for t in times),
        statistics.median(t[1] / t[0] for t in times),
    )


def mlp(rounds: int, steps: int, hooks: int) -> tuple[float, float, float]:
    """A tiny MLP over ready batches."""
    batches = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(steps)]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    bare_model, our_model = make(), make()
    optimizer = torch.optim.SGD(bare_model.parameters(), lr=1e-3)

    def bare() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss = (bare_model(x) - y).square().mean()
            loss.backward()
            optimizer.step()

    strategy = TrainingStrategy(
        models=our_model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda prediction, batch: (prediction - batch[1]).square().mean(),
        num_steps=steps,
        hooks=idle_hooks(hooks),
    )
    return paired(bare, lambda: strategy.run(batches), steps, rounds)


def potential(rounds: int, steps: int, hooks: int) -> tuple[float, float, float]:
    """A small PaiNN on energies and forces, batches of 5 molecules of 9 atoms."""
    generator = torch.Generator().manual_seed(0)

    def molecule() -> AtomicData:
        grid = torch.stack(torch.meshgrid(*[torch.arange(3.0)] * 3, indexing="ij"), -1).reshape(-1, 3)[:9] * 1.3
        return AtomicData(
            positions=grid + 0.1 * torch.randn(9, 3, generator=generator),
            atomic_numbers=torch.tensor([6, 6, 8, 1, 1, 1, 1, 1, 1]),
            energy=torch.randn((), generator=generator, dtype=torch.float64),
            forces=torch.randn(9, 3, generator=generator),
        )

    neighbours = NeighborList(5.0)
    batches = [neighbours(Batch.from_data_list([molecule() for _ in range(5)])) for _ in range(steps)]

    def make() -> InteratomicPotential:
        torch.manual_seed(0)
        return InteratomicPotential(PaiNN(n_features=32, n_interactions=2), cutoff=5.0)

    bare_model, our_model = make().train(), make()
    optimizer = torch.optim.AdamW(bare_model.parameters(), lr=1e-3)

    def bare() -> None:
        for batch in batches:
            optimizer.zero_grad()
            out = bare_model.predict(batch, outputs=("energy", "forces"))
            energy = ((out["energy"] - batch.energy) / batch.num_nodes_per_graph).square().mean()
            loss = energy + 10.0 * (out["forces"] - batch.forces).square().mean()
            loss.backward()
            optimizer.step()

    strategy = TrainingStrategy(
        models=our_model,
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 1e-3}),
        loss_fn=EnergyMSELoss(per_atom=True) + 10.0 * ForceMSELoss(),
        num_steps=steps,
        hooks=idle_hooks(hooks),
    )
    return paired(bare, lambda: strategy.run(batches), steps, rounds)


def report(name: str, value: float, unit: str, **more: float) -> None:
    """One JSON line."""
    print(
        json.dumps({"name": name, "value": round(value, 4), "unit": unit, **{k: round(v, 2) for k, v in more.items()}}),
        flush=True,
    )


def main() -> None:
    """Run every figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, hooks in (("mlp_overhead_us", 0), ("mlp_overhead_ten_hooks_us", 10)):
        bare, ours, _ = mlp(rounds, 2000, hooks)
        report(name, 1e6 * (ours - bare), "us/step", bare_us=1e6 * bare, strategy_us=1e6 * ours)
    bare, ours, ratio = potential(rounds, 40, 10)
    report("potential_ratio_ten_hooks", ratio, "ratio", bare_us=1e6 * bare, strategy_us=1e6 * ours)


if __name__ == "__main__":
    main()
