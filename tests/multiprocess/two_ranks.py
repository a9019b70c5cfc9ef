"""Run under torchrun by test_two_ranks.py: joins, talks, and writes what it saw to a file of its rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from nvalchemi.distributed import DistributedManager, all_reduce, any_rank, barrier, broadcast, gather


def main(folder: str) -> None:
    """Use every collective once and report."""
    before = dict(os.environ)
    DistributedManager.initialize()
    manager = DistributedManager()
    rank = manager.rank
    kept = torch.tensor([1.0 + rank], dtype=torch.float64)
    report = {
        "rank": rank,
        "world_size": manager.world_size,
        "local_rank": manager.local_rank,
        "distributed": manager.distributed,
        "device": str(manager.device),
        "method": manager._initialization_method,
        "sum": all_reduce(kept, manager).item(),
        "max": all_reduce(kept, manager, "max").item(),
        "min": all_reduce(kept, manager, "min").item(),
        "kept": kept.item(),
        "ragged": [part.tolist() for part in gather(torch.full((rank + 1, 2), rank), manager)],
        "scalars": [part.item() for part in gather(torch.tensor(rank), manager)],
        "flags": [part.tolist() for part in gather(torch.tensor([rank == 1]), manager)],
        "objects": gather({"from": rank}, manager),
        "sent": broadcast(torch.tensor([rank]), manager, source=1).item(),
        "said": broadcast(f"rank {rank}", manager),
        "any": [any_rank(rank == 1, manager), any_rank(False, manager)],
        "environment": dict(os.environ) == before,
    }
    barrier(manager)
    DistributedManager.cleanup()
    report["left"] = not torch.distributed.is_initialized() and not DistributedManager.is_initialized()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
