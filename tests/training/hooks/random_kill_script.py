"""Train, be killed at a random instant, and go on: run as ``python random_kill_script.py FOLDER KIND COUNT``, prints one JSON object.

Each process is a forked child, so that all of them share one import of torch. Of two ranks one is killed and the other ends by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nvalchemi.data.datapipes import DataLoader, InMemoryDataset
from nvalchemi.distributed import SingleProcess
from nvalchemi.distributed.tensors import full
from nvalchemi.training import Every, OptimizerConfig, TrainingStrategy, ValidationConfig, checkpoint
from nvalchemi.training.hooks import CheckpointHook, DDPHook, EMAHook, FSDP2Hook, GradientClipHook, MetricsHook, SpikeHook
from tests.multiprocess import bucket  # noqa: F401 - the kind of address
from tests.training.hooks.kill_script import import_everything

KINDS = {"one": (1, None), "ddp": (2, DDPHook), "fsdp2": (2, FSDP2Hook), "in a store": (2, DDPHook)}
STEPS = 30
LIMIT = 60.0  # seconds after which a rank that is left alone is said to hang


def data(rows, seed):
    return InMemoryDataset(torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)))


def whole(state):
    if isinstance(state, torch.Tensor):
        return full(state).detach().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, (list, tuple)) else state


def train(folder, kind, behind, rank):
    """A run that goes on from what is in the folder."""
    ranks, parallel = KINDS[kind]
    torch.manual_seed(0)
    random.seed(0)
    manager = SingleProcess(torch.device("cpu"), rank, rank, ranks, ranks > 1)
    hooks = [
        CheckpointHook(
            f"bucket://{folder}/checkpoints" if kind == "in a store" else folder / "checkpoints",
            Every(steps=2),
            keep_last=2,
            async_save=behind,
        ),
        EMAHook(0.9),
        GradientClipHook(1.0),
        SpikeHook(factor=3.0, window=6),
        MetricsHook(folder, Every(steps=3)),
        *([] if parallel is None else [parallel()]),
    ]
    ctx = TrainingStrategy(
        models=nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)),
        optimizer_configs=OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2}, torch.optim.lr_scheduler.StepLR, {"step_size": 7}),
        loss_fn=lambda prediction, batch: (prediction - batch[:, 3:]).square().mean(),
        training_fn=lambda model, batch: model(batch[:, :3]),
        validation_config=ValidationConfig(validation_data=DataLoader(data(12, 7), batch_size=4), every_n_steps=5),
        num_steps=STEPS,
        distributed_manager=manager,
        resume_from="latest",
        hooks=hooks,
    ).run(DataLoader(data(28, 5), batch_size=4, shuffle=True, seed=3))
    shared, own = checkpoint.gather(ctx)
    torch.save({"shared": whole(shared), "generators": own["generators"]}, folder / f"end-{rank}.pt")


def store(meeting, ranks, wait):
    """Where the ranks find each other."""
    found = dist.FileStore(str(meeting), ranks)
    found.set_timeout(wait)
    return found


def begin(folder, kind, behind, meeting):
    """Fork the ranks of a run; gives their process ids."""
    ranks = KINDS[kind][0]
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            with (folder / f"errors-{rank}.txt").open("a") as errors:
                try:
                    if ranks > 1:
                        wait = timedelta(seconds=10)  # for a rank that was killed before they have met
                        dist.init_process_group(
                            "gloo", None, wait, rank=rank, world_size=ranks, store=store(meeting, ranks, wait)
                        )
                    train(folder, kind, behind, rank)
                except BaseException:  # noqa: BLE001 - a child must not go on with the parent's work
                    traceback.print_exc(file=errors)
                    errors.flush()
                    os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def ends(children):
    """The exit statuses; of a rank that hangs, none."""
    found, until = [], time.monotonic() + LIMIT
    for child in children:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                found.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                found.append(None)
                break
            time.sleep(0.005)
    return found


def main():
    root, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    import_everything()
    for module in ("torch.distributed.fsdp",) * (kind == "fsdp2") + ("torch.distributed.checkpoint",) * (kind != "one"):
        importlib.import_module(module)
    draw = random.Random(kind)
    meetings = iter(range(10**6))

    def run(name, behind):
        return begin(root / name, kind, behind, root / f"meeting-{next(meetings)}")

    status = {"whole": ends(run("whole", False))}  # the first use of everything takes longer
    begun = time.monotonic()
    status["again"] = ends(run("again", False))
    takes = time.monotonic() - begun
    for number in range(count):
        name, behind = f"killed {number}", number % 2 == 1
        children = run(name, behind)
        time.sleep(draw.uniform(0.0, takes))
        try:
            os.kill(draw.choice(children), signal.SIGKILL)
        except ProcessLookupError:
            pass
        status[name] = [ends(children), ends(run(name, behind))]
    print(json.dumps({"takes": takes, "status": status}))


if __name__ == "__main__":
    main()
