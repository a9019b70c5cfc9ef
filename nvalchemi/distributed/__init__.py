"""Processes: who am I, how many are we, and the few collectives that the package uses."""

from __future__ import annotations

from nvalchemi.distributed.blocks import unsharded
from nvalchemi.distributed.collectives import agree, all_reduce, any_rank, barrier, broadcast, exchange, gather
from nvalchemi.distributed.manager import DistributedManager, join, launched_as, launched_by, started_together
from nvalchemi.distributed.ranks import Manager, SingleProcess, members, single_process
from nvalchemi.distributed.state import full_state

__all__ = [
    "DistributedManager",
    "Manager",
    "SingleProcess",
    "agree",
    "all_reduce",
    "any_rank",
    "barrier",
    "broadcast",
    "exchange",
    "full_state",
    "gather",
    "join",
    "launched_as",
    "launched_by",
    "members",
    "single_process",
    "started_together",
    "unsharded",
]
