"""What a checkpoint costs the loop, and the disk.

    python benchmarks/checkpoint.py [--megabytes 64] [--layers 24] [--rounds 7] [--folder DIR]

Trains a network of so many megabytes with AdamW and an average, so that the state is four times as large, and saves it. Prints one JSON
line a figure. The ways take turns, and each has the minimum of its rounds: a machine that others use is never faster than it is.

- ``copy_s``: one copy of all tensors of the state, from memory to memory that is there already;
- ``async_stall_s``, ``async_stall_ratio``: how long ``CheckpointHook(async_save=True)`` holds up the loop, and that over ``copy_s``;
  nothing is being written meanwhile;
- ``async_stall_cpu_ratio``: the same of the CPU time of the loop's thread, which does not count what other programs take of a busy machine;
- ``async_written_s``: until such a checkpoint is on the disk;
- ``sync_stall_s``: how long a save that waits for the disk holds up the loop;
- ``bytes_ratio``, ``bytes_ratio_async``: bytes on the disk over the bytes of the state's tensors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainContext, TrainingStage, TrainingStrategy, checkpoint, layout, on
from nvalchemi.training.hooks import CheckpointHook, EMAHook
from nvalchemi.training.shards import tensors_of


def network(megabytes: int, layers: int) -> nn.Module:
    """So many linear layers of equal size."""
    width = int((megabytes * 1e6 / 4 / layers) ** 0.5)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def elapsed(action: Any) -> tuple[float, float]:
    """Seconds that it takes, and seconds of this thread's CPU time."""
    begun, cpu = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - begun, time.thread_time() - cpu


def measure(ctx: TrainContext, folder: Path, rounds: int) -> dict[str, float]:
    """The figures, of the state of a run."""
    shared, own = checkpoint.gather(ctx)
    tensors = {t.data_ptr(): t for state in (shared, own) for _, t in tensors_of(state)}
    size = sum(t.nbytes for t in tensors.values())
    space = [torch.empty_like(t) for t in tensors.values()]
    waiting, behind = (
        CheckpointHook(folder / "waiting", keep_last=1),
        CheckpointHook(folder / "behind", keep_last=1, async_save=True),
    )
    times: dict[str, list[float]] = {"copy_s": [], "async_stall_s": [], "async_written_s": [], "sync_stall_s": []}
    cpu: dict[str, list[float]] = {"copy_s": [], "async_stall_s": []}
    for _ in range(rounds + 1):  # the first round makes the space for the copies
        for name, action in (
            ("copy_s", lambda: [a.copy_(b) for a, b in zip(space, tensors.values(), strict=True)]),
            ("async_stall_s", lambda: behind.act(ctx)),
        ):
            took, of_thread = elapsed(action)
            times[name].append(took)
            cpu[name].append(of_thread)
        times["async_written_s"].append(times["async_stall_s"][-1] + elapsed(behind.settle)[0])
        times["sync_stall_s"].append(elapsed(lambda: waiting.act(ctx))[0])
    found = {name: min(values[1:]) for name, values in times.items()}
    found["async_stall_ratio"] = found["async_stall_s"] / found["copy_s"]
    found["async_stall_cpu_ratio"] = min(cpu["async_stall_s"][1:]) / min(cpu["copy_s"][1:])
    for name, hook in (("bytes_ratio", waiting), ("bytes_ratio_async", behind)):
        assert hook.checkpoint_dir is not None
        saved = layout.latest(hook.checkpoint_dir)
        assert saved is not None
        found[name] = sum(path.stat().st_size for path in saved.path.iterdir()) / size
    return {"state_megabytes": size / 1e6, **found}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures: dict[str, float] = {}

        @on(TrainingStage.TRAINING_END)
        def look(ctx: TrainContext) -> None:
            figures.update(measure(ctx, Path(folder), options.rounds))

        model = network(options.megabytes, options.layers)
        width = model[0].in_features  # type: ignore[index]
        TrainingStrategy(
            models=model,
            optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 1e-4}),
            loss_fn=lambda prediction, batch: prediction.square().mean(),
            training_fn=lambda m, batch: m(batch),
            num_steps=2,
            hooks=[EMAHook(0.9), look],
        ).run([torch.randn(2, width) for _ in range(2)])
    for name, value in figures.items():
        print(json.dumps({"figure": name, "value": round(value, 6)}))


if __name__ == "__main__":
    main()
