"""Why a run ended on another rank: said through the store of the process group, where no collective can be agreed on any more."""

from __future__ import annotations

import gc
import re
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from nvalchemi.distributed.notices import store
from nvalchemi.distributed.ranks import Manager
from nvalchemi.errors import TrainingError

GRACE = 2.0  # seconds in which ranks that fail together hear of each other
LIMIT = 3.0  # seconds beyond that for a store that does not answer: the process that holds it may hang

_BROKEN = re.compile(
    r"gloo/|NCCL|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|Timed out waiting|Application timeout|[Pp]rocess group"
    r"|Detected mismatch between collectives"  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
)
_CUT = re.compile(r"Timed out waiting|Application timeout|[Cc]onnection (was )?closed|Detected mismatch between collectives")


@dataclass
class _Heard:
    """What the ranks have said: by rank, the errors told before this rank's; and the ranks that had said anything in the end."""

    causes: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


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
        Where ``error`` is but a broken connection: naming the rank that broke it and its error, or the ranks that say nothing any more;
        and where all ranks ran out of time.
    """
    if not manager.distributed:
        return
    broken = (type(error) is RuntimeError or isinstance(error, dist.DistError)) and _BROKEN.search(str(error)) is not None
    # a consequence is no cause: others shall name the rank that failed first
    text = "" if broken else f"{type(error).__name__}: {error}"[:2000]
    heard = _Heard()
    talk = threading.Thread(target=_exchange, args=(text, run, manager, heard), daemon=True)
    talk.start()
    talk.join(GRACE + LIMIT)
    silent = [rank for rank in range(manager.world_size) if rank not in heard.ranks | {manager.rank}]
    if silent and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # gloo closes its connections when nothing holds the group any more
    if broken and (heard.causes or silent):
        if heard.causes:
            found = "; ".join(f"rank {rank}: {cause}" for rank, cause in heard.causes.items())
            raise TrainingError("another rank ended the run", found=found, fix="see that rank's own error") from error
        raise TrainingError(
            "another rank is lost",
            found=f"no word from rank {', '.join(map(str, silent))}: its process is gone, or hangs",
            fix='start again with resume_from="latest"; torchrun --max-restarts does so by itself',
        ) from error
    if broken and _CUT.search(str(error)):
        raise TrainingError(
            "the ranks waited in vain for each other, each in a collective that the others did not enter",
            needed="as many calls of the models on each rank, in the same order, where they are sharded or replicated",
            fix="look for calls that depend on a rank's data, in training_fn, loss or hooks; unsharded(model) is for those. "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment ends the run at the first such call, with its place in the code",
        ) from error


def _exchange(text: str, run: int, manager: Manager, heard: _Heard) -> None:
    try:
        notes = store()
        keys = {rank: f"nvalchemi/failure/{run}/{rank}" for rank in range(manager.world_size)}
        for rank, key in keys.items():
            if rank != manager.rank and notes.check([key]) and (cause := notes.get(key).decode()):
                heard.causes[rank] = cause
        notes.set(keys[manager.rank], text)
        end = time.monotonic() + GRACE
        while len(heard.ranks) < manager.world_size and time.monotonic() < end:
            heard.ranks |= {rank for rank, key in keys.items() if rank not in heard.ranks and notes.check([key])}
            time.sleep(0.02)
    except (RuntimeError, ValueError):  # the store went away with the rank that held it
        pass
