"""Train, be killed at a given instant, and go on: run as ``python kill_script.py FOLDER``, prints one JSON object.

Each run is a forked child, so that all of them share one import of torch.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

from nvalchemi.training import Every, TrainingStage, ValidationConfig, checkpoint, on, storage
from nvalchemi.training.hooks import CheckpointHook, EMAHook, GradientClipHook, MetricsHook, SpikeHook
from nvalchemi.training.hooks import metrics as metrics_module
from tests.training.hooks.runs import batches, network, strategy

STEPS = 14
INSTANTS = [
    *(("step", n) for n in (1, 3, 7, 13)),
    *(("file written", n) for n in (1, 6)),
    *(("before the rename", n) for n in (1, 3)),
    ("after the rename", 2),
    *(("validation", n) for n in (1, 3)),
    *(("half a record", n) for n in (1, 5)),
]


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Kill at the n-th call."""

    def __init__(self, number):
        self.left = number

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            kill()


def arm(instant):
    """Set the trap; gives the hooks and the validation callback that it needs."""
    where, number = instant
    count = Countdown(number)
    if where == "step":
        return [on(TrainingStage.STEP_END)(lambda ctx: count())], None
    if where == "validation":
        return [], count
    if where == "file written":
        sync = storage.sync
        storage.sync = lambda path: (sync(path), count())
    if where in ("before the rename", "after the rename"):
        rename = os.rename

        def renamed(source, target):
            if where == "before the rename":
                count()
            rename(source, target)
            if where == "after the rename":
                count()

        storage.os.rename = renamed
    if where == "half a record":
        write = metrics_module.RecordFiles.write

        def torn(self, record):
            if count.left == 1:
                self._lines.write(json.dumps(record)[:20])
                self._lines.flush()
            count()
            write(self, record)

        metrics_module.RecordFiles.write = torn
    return [], None


def train(folder, instant=None):
    torch.manual_seed(0)
    random.seed(0)  # Python seeds it anew in a fork
    extra, callback = ([], None) if instant is None else arm(instant)
    config = ValidationConfig(validation_data=batches(2, seed=7), every_n_steps=4, batch_callback=callback)
    hooks = [
        CheckpointHook(folder / "checkpoints", Every(steps=3), keep_last=2),
        EMAHook(0.9),
        GradientClipHook(1.0),
        SpikeHook(factor=1.5, window=6),
        MetricsHook(folder, Every(steps=2)),
        *extra,
    ]
    ctx = strategy(network(), hooks, validation_config=config, num_steps=STEPS, resume_from="latest").run(batches(5))
    shared, own = checkpoint.gather(ctx)
    torch.save({"shared": shared, "generators": own["generators"]}, folder / "end.pt")


def forked(folder, instant=None):
    """The exit status of a run in a child."""
    child = os.fork()
    if child == 0:
        try:
            train(folder, instant)
        except BaseException:  # noqa: BLE001 - a child must not go on with the parent's work
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def import_everything():
    """What torch imports when it is first used takes seconds: once here, not in every child."""
    from torch.distributed.checkpoint import state_dict  # noqa: F401

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros(1)
    optimizer.step()


def main():
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    import_everything()
    status = {"whole": [forked(root / "whole")]}
    for where, number in INSTANTS:
        name = f"{where} {number}"
        status[name] = [forked(root / name, (where, number)), forked(root / name)]
    print(json.dumps(status))


if __name__ == "__main__":
    main()
