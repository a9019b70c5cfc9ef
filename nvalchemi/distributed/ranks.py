"""Who the processes of a run are, in words that the whole package uses; and stand-ins where there is one, or for those of one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from nvalchemi.errors import ConfigError


class Manager(Protocol):
    """What the package needs to know about its processes; :class:`~nvalchemi.distributed.DistributedManager` and the classes here have it."""

    @property
    def rank(self) -> int:
        """Number of this process among all of the run."""

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""

    @property
    def world_size(self) -> int:
        """How many processes the run has."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""

    @property
    def distributed(self) -> bool:
        """Whether there is a process group to talk through."""

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """The process group of a name; without one, that of all ranks, where none is torch's word for everybody."""


@dataclass(frozen=True)
class SingleProcess:
    """A manager for one process: rank 0 of 1, nobody to talk to. It reads no environment and starts nothing."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    distributed: bool = False

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    def group(self, name: str | None = None) -> None:
        """The process group of a name: none here, which torch reads as everybody."""


def single_process(device: str | torch.device | None = None) -> SingleProcess:
    """Stand in for a manager where there is one process.

    Parameters
    ----------
    device
        Where to compute; none means the first GPU where there is one, the CPU otherwise.
    """
    return SingleProcess(torch.device(device if device is not None else "cuda:0" if torch.cuda.is_available() else "cpu"))


@dataclass(frozen=True)
class GroupMember:
    """A manager for the ranks of one process group, numbered within it; made by :func:`members`."""

    process_group: dist.ProcessGroup
    rank: int
    world_size: int
    device: torch.device
    distributed: bool = True

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, as its device tells."""
        return self.device.index or 0

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"

    def group(self, name: str | None = None) -> dist.ProcessGroup:
        """The process group that the ranks talk through."""
        return self.process_group


def members(group: dist.ProcessGroup | Manager | None = None) -> Manager:
    """Who takes part in a collective: a torch process group, a manager's ranks, or everybody.

    Parameters
    ----------
    group
        A process group, whose ranks are then counted within it; a manager, which is given back; none for all processes of the run,
        which is this one alone where torch knows no process group.

    Raises
    ------
    ConfigError
        For a process group that this process is no part of.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return single_process()
        everybody = dist.group.WORLD
        assert everybody is not None
        group = everybody
    if isinstance(group, dist.ProcessGroup):
        accelerator = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        device = torch.device("cuda", torch.cuda.current_device()) if accelerator else torch.device("cpu")
        return GroupMember(group, dist.get_rank(group), dist.get_world_size(group), device)
    if isinstance(group, int):  # what torch.distributed.new_group gives to the ranks that are left out
        raise ConfigError("this process is no part of the process group", found=group, fix="give it a group that it is in")
    return group
