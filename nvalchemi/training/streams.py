"""The random streams of a rank: its own, kept in its file of a checkpoint, taken back, or begun for a rank that is new."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nvalchemi.distributed import Manager
from nvalchemi.training.hook import Hook, on
from nvalchemi.training.seeds import derive_seed
from nvalchemi.training.stages import Order, TrainingStage

if TYPE_CHECKING:
    from nvalchemi.training.context import TrainContext


def streams(ctx: TrainContext) -> dict[str, Any]:
    """Every random stream of this rank: the run's, torch's (CPU and device), numpy's and python's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the user's global stream is what is kept
    version, words, spare = random.getstate()
    states: dict[str, Any] = {
        "run": ctx.generator.get_state(),
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), spare],
    }
    if ctx.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ctx.device)
    return states


def load_streams(ctx: TrainContext, states: Mapping[str, Any]) -> None:
    """Take back what :func:`streams` gave."""
    ctx.generator.set_state(states["run"])
    torch.set_rng_state(states["torch"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, words, spare = states["python"]
    random.setstate((version, tuple(words), spare))
    if "cuda" in states and ctx.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], ctx.device)


def begin_streams(ctx: TrainContext) -> None:
    """New random streams for a rank that the run that was saved did not have: from the seed, the rank and the step."""

    def seed(stream: str) -> int:
        return derive_seed(ctx.cursor.seed, "new rank", stream, ctx.manager.rank, ctx.progress.step)

    ctx.generator.manual_seed(seed("run"))
    torch.manual_seed(seed("torch"))
    np.random.seed(seed("numpy") % 2**32)  # noqa: NPY002
    random.seed(seed("python"))


class OwnStreams(Hook):
    """Part of every run on many processes: ranks above 0 seed torch's global stream, which dropout draws from, anew.

    A script seeds all ranks alike, for equal weights, or none of them, which torch seeds alike as well; dropout would draw the same
    everywhere. It is done after models are made and wrapped, and before a checkpoint is loaded, which has the streams of each rank.
    """

    order = Order.SAVE
    agreed = True

    def is_active(self, manager: Manager) -> bool:
        return manager.distributed

    @on(TrainingStage.BUILT)
    def part(self, ctx: TrainContext) -> None:
        """Seed from the seed so far and the rank; rank 0 goes on with its own, as one process does."""
        if ctx.manager.rank > 0:
            torch.manual_seed(derive_seed(torch.initial_seed(), "rank", ctx.manager.rank))
