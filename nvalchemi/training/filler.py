"""Batches that count for nothing: a rank with fewer than the others goes through one where these wait for its call of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import all_reduce


@dataclass(frozen=True, slots=True)
class Filler:
    """A batch that is computed so that no other rank waits, and that does not count."""

    batch: Any


def filled(group: list[Any], manager: Manager) -> list[Any]:
    """The micro-batches of a step with fillers behind them, up to the number of the rank that has most. All ranks must call."""
    most = int(all_reduce(torch.tensor(len(group), device=manager.device), manager, "max"))
    return group + [Filler(group[-1])] * (most - len(group))
