"""Notes that ranks leave each other in the store of the process group, where they meet in no collective."""

from __future__ import annotations

import torch.distributed as dist

from nvalchemi.distributed.ranks import Manager


def store() -> dist.Store:
    """The store through which the ranks found each other."""
    return dist.distributed_c10d._get_default_store()


def post(name: str, manager: Manager) -> None:
    """Leave a note for all ranks; nobody waits for it."""
    if manager.distributed:
        store().set(f"nvalchemi/notice/{name}", "1")


def posted(name: str, manager: Manager) -> bool:
    """Whether some rank has left the note so far: a question to the store, so ask it seldom."""
    return manager.distributed and store().check([f"nvalchemi/notice/{name}"])
