"""The replay buffer: persistent chains by slot, drawn, moved by a sampler, and written back to where they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvalchemi.distributed import Manager, members
from nvalchemi.ebm.slots import Chains, Rows, Samples, batch_from_plain, chains_of, pooled
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
    dtype with which they start. A chain may have conditions, such as a label, which are in its slot and go wherever it goes.
    """

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        if size < 1:
            raise ConfigError("a replay buffer needs at least one slot", found=size)
        self.size = self._declared = size
        self.device = None if device is None else torch.device(device)
        self._chains: Chains | None = None
        self._told: dict[str, Rows] = {}  # the conditions of the chains, by name
        self._order: Tensor | None = None  # the slots in the order in which they are drawn next
        self._position = 0
        self._common = 0  # slots that every rank has, where they were dealt out to another number of ranks

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

    # Here and below: chains that were kept in inference mode could not be written outside of it.
    @torch.inference_mode(False)
    def initialize(self, samples: Samples, conditions: Mapping[str, Tensor] | None = None) -> None:
        """Start the chains anew.

        Parameters
        ----------
        samples
            (size, ...), or a batch of as many structures: sample i goes to slot i. They are copied.
        conditions
            What belongs to the chains, by name: (size, ...) each. The chains have these conditions from now on, and no others.

        Raises
        ------
        DataError
            For another number of samples or conditions.
        """
        if len(samples) != self.size:
            raise DataError("the chains of a buffer start from one sample a slot", found=len(samples), needed=self.size)
        given: Mapping[str, Any] = conditions or {}
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != self.size:
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise DataError(f"the condition {name!r} of chains is not one a slot", found=found, needed=f"({self.size}, ...)")
        if self.device is None:
            self.device = samples.device
        self._chains, self._order, self._position = chains_of(samples.to(self.device)), None, 0
        self._told = {name: Rows.of(value.to(self.device)) for name, value in given.items()}

    def clear(self) -> None:
        """Let go of all chains; there are as many slots as were declared."""
        self.size, self._chains, self._order, self._position = self._declared, None, None, 0
        self._common, self._told = 0, {}

    @torch.inference_mode(False)
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

    def conditions(self, slots: Tensor) -> dict[str, Tensor]:
        """Copies of the conditions of the chains in ``slots`` (n,), by name, (n, ...) each; none where they have none."""
        return {name: rows.read(slots.to(self.device)) for name, rows in self._told.items()}

    @torch.inference_mode(False)
    def write(self, slots: Tensor, samples: Samples, conditions: Mapping[str, Tensor] | None = None) -> None:
        """Put the ends of chains back.

        Parameters
        ----------
        slots
            (n,), as `draw` gave them.
        samples
            (n, ...) or n structures, in the order of ``slots``; copied, without their graph, in the chains' dtype and on their device.
        conditions
            New conditions of these chains, of the names that they have, (n, ...) each; what is not given stays.

        Raises
        ------
        ConfigError
            Before `initialize`.
        DataError
            Another number of samples than of slots, or another shape than the chains', or conditions that the chains do not have.
        """
        chains, conditions = self._ready(), conditions or {}
        if len(samples) != len(slots) or any(len(value) != len(slots) for value in conditions.values()):
            raise DataError("one sample is written to each slot", found=f"{len(samples)} samples, {len(slots)} slots")
        if not conditions.keys() <= self._told.keys():
            raise DataError(
                "chains have the conditions with which they start",
                found=", ".join(conditions),
                needed=", ".join(self._told) or "none",
            )
        slots = slots.to(self.device)
        chains.write(slots, samples)
        for name, value in conditions.items():
            self._told[name].write(slots, value)

    @torch.inference_mode(False)
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
        All ranks must have chains. Vectors travel in one all-to-all, structures in one gather, and each condition in an all-to-all of its
        own. Where chains were dealt out to another number
        of ranks and some have one more than others, each of these keeps one of its own, drawn anew each time.
        """
        chains = self._ready()
        manager = members(group)
        if not manager.distributed:
            return
        where = self.device if generator is None else generator.device
        order = torch.randperm(self.size, generator=generator, device=where).to(self.device)
        common = self._common or self.size
        share, rest = divmod(common, manager.world_size)
        # what is left over goes round: row sums and column sums of this table are both the number of slots that all have
        counts = [share + ((to - manager.rank) % manager.world_size < rest) for to in range(manager.world_size)]
        back = [share + ((manager.rank - origin) % manager.world_size < rest) for origin in range(manager.world_size)]

        def dealt_out(old: Chains) -> Any:
            new = old.exchanged(order[:common], counts, back, manager)
            return new if common == self.size else new.joined(old.read(order[common:]))

        self._chains = dealt_out(chains)
        self._told = {name: dealt_out(rows) for name, rows in self._told.items()}

    def state_dict(self) -> dict[str, Any]:
        """The chains and the order in which they are drawn, in tensors and plain containers; whole also before `initialize`."""
        return {
            "size": self.size,
            "declared": self._declared,
            "common": self._common,
            "samples": None if self._chains is None else self._chains.plain(),
            "conditions": {name: rows.plain() for name, rows in self._told.items()},
            "order": None if self._order is None else self._order.clone(),
            "position": self._position,
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` or `dealt` gave, whether or not the chains have been started here.

        Raises
        ------
        CheckpointError
            For another number of slots than is declared.
        """
        declared = state.get("declared", state["size"])
        if declared != self._declared:
            raise CheckpointError(
                "the saved chains are of another number",
                found=declared,
                needed=self._declared,
                fix="declare the buffer as it was",
            )
        self.size, self._common = int(state["size"]), int(state.get("common", 0))
        saved = state["samples"]
        if saved is None:
            self._chains, self._told, self._order, self._position = None, {}, None, 0
            return
        samples: Samples = batch_from_plain(saved) if isinstance(saved, Mapping) else saved
        if self.device is None:
            self.device = samples.device
        self._chains = chains_of(samples.to(self.device))
        self._told = {name: Rows.of(value.to(self.device)) for name, value in state.get("conditions", {}).items()}
        self._order = None if state["order"] is None else state["order"].to(self.device, copy=True)
        self._position = int(state["position"])

    @staticmethod
    def dealt(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The state of one of ``world_size`` buffers among which the chains of other buffers are dealt out in turn.

        Parameters
        ----------
        states
            What `state_dict` gave of each of them.
        rank, world_size
            Which of how many.

        Returns
        -------
        dict
            For `load_state_dict`. Every chain is in just one of them, and they differ by one chain at most. The buffer then has as many
            slots as it has chains, whatever was declared.

        Raises
        ------
        CheckpointError
            Where there are fewer chains than buffers.
        """
        declared = states[0].get("declared", states[0]["size"])
        started = [state for state in states if state["samples"] is not None]
        state = {"size": declared, "declared": declared, "common": 0, "samples": None, "order": None, "position": 0}
        if not started:
            return state
        total = sum(int(state["size"]) for state in started)
        if total < world_size:
            raise CheckpointError("there are fewer chains than ranks", found=f"{total} chains", needed=f"{world_size} or more")
        mine = range(rank, total, world_size)
        told = {name: pooled([state["conditions"][name] for state in started], mine) for name in started[0].get("conditions", {})}
        samples = pooled([state["samples"] for state in started], mine)
        return {**state, "size": len(mine), "common": total // world_size, "samples": samples, "conditions": told}

    def __repr__(self) -> str:
        return f"ReplayBuffer({self.size} slots, {'started' if self.is_initialized else 'not started'}, {self.device})"

    def _ready(self) -> Chains:
        if self._chains is None:
            raise ConfigError("the chains of a replay buffer have no start", fix="call initialize(samples) first")
        return self._chains
