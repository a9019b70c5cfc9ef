"""The replay buffer: persistent chains by slot, drawn, moved by a sampler, and written back to where they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi.distributed import Manager, members
from nvalchemi.ebm.slots import Chains, Samples, batch_from_plain, chains_of
from nvalchemi.errors import CheckpointError, ConfigError, DataError


class ReplayBuffer:
    """A fixed number of chains, each in a slot of its own, on this rank alone.

    Draw slots, run a sampler from their samples, and write the ends back to the same slots: then every slot holds one Markov chain, as
    persistent contrastive divergence needs it (T. Tieleman, ICML 2008). Slots are drawn in random orders of all of them, cut into pieces,
    so that all chains are moved about equally often.

    Parameters
    ----------
    size
        Number of slots.
    device
        Where the chains lie; none leaves them where the samples are with which they start.

    Notes
    -----
    Chains are rows of a tensor (size, ...) or the structures of a `nvalchemi.data.Batch`, of unequal sizes if need be. They keep the
    dtype with which they start.
    """

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        if size < 1:
            raise ConfigError("a replay buffer needs at least one slot", found=size)
        self.size = size
        self.device = None if device is None else torch.device(device)
        self._chains: Chains | None = None
        self._order: Tensor | None = None  # the slots in the order in which they are drawn next
        self._position = 0

    def __len__(self) -> int:
        return self.size

    @property
    def is_initialized(self) -> bool:
        """Whether the chains have a start."""
        return self._chains is not None

    @property
    def samples(self) -> Any:
        """Copies of all chains, in the order of their slots: a tensor (size, ...) or a batch."""
        return self._ready().read(torch.arange(self.size, device=self.device))

    def initialize(self, samples: Samples) -> None:
        """Start the chains anew.

        Parameters
        ----------
        samples
            (size, ...), or a batch of as many structures: sample i goes to slot i. They are copied.

        Raises
        ------
        DataError
            For another number of samples.
        """
        if len(samples) != self.size:
            raise DataError("the chains of a buffer start from one sample a slot", found=len(samples), needed=self.size)
        if self.device is None:
            self.device = samples.device
        self._chains, self._order, self._position = chains_of(samples.to(self.device)), None, 0

    def draw(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Any]:
        """Slots, and copies of what is in them.

        Parameters
        ----------
        n
            How many. Up to ``size``, no slot comes twice; beyond, each comes as often as any other, or once more.
        generator
            Where the random order comes from; none is torch's own.

        Returns
        -------
        slots : Tensor
            (n,) int64, for `write`.
        samples : Tensor or Batch
            (n, ...), or n structures.

        Raises
        ------
        ConfigError
            Before `initialize`.
        """
        chains = self._ready()
        pieces: list[Tensor] = []
        left = n
        while left > 0 or not pieces:
            take = min(left, self.size)
            if self._order is None or self._position + take > self.size:
                where = self.device if generator is None else generator.device
                self._order, self._position = torch.randperm(self.size, generator=generator, device=where).to(self.device), 0
            pieces.append(self._order[self._position : self._position + take])
            self._position += take
            left -= take
        slots = pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
        return slots, chains.read(slots)

    def write(self, slots: Tensor, samples: Samples) -> None:
        """Put the ends of chains back.

        Parameters
        ----------
        slots
            (n,), as `draw` gave them.
        samples
            (n, ...) or n structures, in the order of ``slots``; copied, without their graph, in the chains' dtype and on their device.

        Raises
        ------
        ConfigError
            Before `initialize`.
        DataError
            Another number of samples than of slots, or another shape than the chains'.
        """
        chains = self._ready()
        if len(samples) != len(slots):
            raise DataError("one sample is written to each slot", found=f"{len(samples)} samples, {len(slots)} slots")
        chains.write(slots.to(self.device), samples)

    def mix_across_ranks(
        self, group: dist.ProcessGroup | Manager | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Deal the chains of all ranks out anew, in one collective: every rank gets an equal part of every other's, none twice, none lost.

        Parameters
        ----------
        group
            The ranks, which must all call: a process group or a manager; none means all processes of the run. Nothing happens in one.
        generator
            Which of the chains go where; may differ from rank to rank. None is torch's own.

        Notes
        -----
        All ranks must have the same number of slots and chains in them. Vectors travel in one all-to-all, structures in one gather.
        """
        chains = self._ready()
        manager = members(group)
        if not manager.distributed:
            return
        where = self.device if generator is None else generator.device
        order = torch.randperm(self.size, generator=generator, device=where).to(self.device)
        share, rest = divmod(self.size, manager.world_size)
        # what is left over goes round: row sums and column sums of this table are both the number of slots
        counts = [share + ((to - manager.rank) % manager.world_size < rest) for to in range(manager.world_size)]
        back = [share + ((manager.rank - origin) % manager.world_size < rest) for origin in range(manager.world_size)]
        self._chains = chains.exchanged(order, counts, back, manager)

    def state_dict(self) -> dict[str, Any]:
        """The chains and the order in which they are drawn, in tensors and plain containers; whole also before `initialize`."""
        return {
            "size": self.size,
            "samples": None if self._chains is None else self._chains.plain(),
            "order": None if self._order is None else self._order.clone(),
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, whether or not the chains have been started here.

        Raises
        ------
        CheckpointError
            For another number of slots.
        """
        if state["size"] != self.size:
            raise CheckpointError(
                "the saved chains are of another number",
                found=state["size"],
                needed=self.size,
                fix="declare the buffer as it was",
            )
        saved = state["samples"]
        if saved is None:
            self._chains, self._order, self._position = None, None, 0
            return
        samples: Samples = batch_from_plain(saved) if isinstance(saved, Mapping) else saved
        if self.device is None:
            self.device = samples.device
        self._chains = chains_of(samples.to(self.device))
        self._order = None if state["order"] is None else state["order"].to(self.device, copy=True)
        self._position = int(state["position"])

    def __repr__(self) -> str:
        return f"ReplayBuffer({self.size} slots, {'started' if self.is_initialized else 'not started'}, {self.device})"

    def _ready(self) -> Chains:
        if self._chains is None:
            raise ConfigError("the chains of a replay buffer have no start", fix="call initialize(samples) first")
        return self._chains
