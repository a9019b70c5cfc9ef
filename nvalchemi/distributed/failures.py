"""Why a run ended on another rank: said through the store of the process group, where no collective can be agreed on any more."""

from __future__ import annotations

import time

import torch.distributed as dist

from nvalchemi.distributed.manager import Manager
from nvalchemi.errors import TrainingError

GRACE = 2.0  # seconds in which ranks that fail together hear of each other


def tell(error: BaseException, run: int, manager: Manager) -> None:
    """Say to the other ranks that this one leaves the run with ``error``, and why; then see to it that none of them waits for ever.

    Where every rank fails, as after a decision that all took together, the process group stays usable. Otherwise some rank may be
    waiting in a collective that this one will never enter, so this rank leaves the group.

    Parameters
    ----------
    error
        What ended the run here.
    run
        Number of the run, the same on all ranks.
    manager
        Who the ranks are.

    Raises
    ------
    TrainingError
        Where ``error`` is but a broken connection: naming the rank that broke it and its error.
    """
    if not manager.distributed:
        return
    try:
        store = dist.distributed_c10d._get_default_store()
        keys = [f"nvalchemi/failure/{run}/{rank}" for rank in range(manager.world_size)]
        earlier = [rank for rank, key in enumerate(keys) if rank != manager.rank and store.check([key])]
        texts = {rank: store.get(keys[rank]).decode() for rank in earlier}
        store.set(keys[manager.rank], f"{type(error).__name__}: {error}"[:2000])
        end = time.monotonic() + GRACE
        while not (together := store.check(keys)) and time.monotonic() < end:
            time.sleep(0.02)
    except (RuntimeError, ValueError):  # the store went away with the rank that held it
        texts, together = {}, False
    if not together and dist.is_initialized():
        dist.destroy_process_group()
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        if said or "closed by peer" in str(error):
            raise TrainingError("another rank ended the run", found=said or "its process is gone") from error
