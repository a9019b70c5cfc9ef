"""Processes: who am I, how many are we, and the few collectives that the package uses."""

from __future__ import annotations

from nvalchemi.distributed.collectives import agree, all_reduce, any_rank, barrier, broadcast, gather
from nvalchemi.distributed.manager import DistributedManager, Manager, SingleProcess, single_process

__all__ = [
    "DistributedManager",
    "Manager",
    "SingleProcess",
    "agree",
    "all_reduce",
    "any_rank",
    "barrier",
    "broadcast",
    "gather",
    "single_process",
]
