"""Contrastive divergence, plain and with persistent chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.distributed import Manager
from nvalchemi.ebm.buffer import ReplayBuffer
from nvalchemi.ebm.conditions import repeated
from nvalchemi.ebm.losses.base import ScalarEnergyLoss
from nvalchemi.ebm.samplers import Sampler
from nvalchemi.ebm.samples import positions
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models.energy import EnergyModel
from nvalchemi.models.gradient import check_energy
from nvalchemi.objective import Terms


class ContrastiveDivergence(ScalarEnergyLoss):
    """Contrastive divergence.

    ::

        L = E_data E(x) - E_chains E(x') + w (E_data E(x)² + E_chains E(x')²)

    The x' are where chains of the sampler are after ``k_steps``; no gradient goes through them, so that dL/dθ is the gradient of minus the
    log-likelihood where the chains draw from exp(-E). The chains begin at the data (Hinton, Neural Comput. 14, 1771 (2002)) or, where
    ``persistent``, go on from where they were (Tieleman, ICML 2008), some of them anew each time (Du and Mordatch, NeurIPS 2019, whose
    penalty of weight w keeps energies near zero: only differences of energies are learned otherwise).

    A call gives ``(loss, negatives)``. Conditions, such as labels y, are told to the energy with the data and all along the chains that begin at
    them. A persistent chain has conditions of its own: those of a sample of the batch at hand, from when it begins until it begins anew.

    Parameters
    ----------
    model
        The energy, in units of kT unless the sampler has a temperature; of vectors (batch, ...) or of a `nvalchemi.data.Batch`.
    sampler
        A sampler of the same energy.
    k_steps
        Its steps at each call; 0 leaves the chains where they begin.
    persistent
        Keep the chains in `replay_buffer`.
    buffer_size
        Persistent chains on each rank.
    new_sample_ratio
        Of the chains drawn from the buffer, the part that begins anew: each with this chance.
    init_steps
        Steps of the sampler when the buffer is filled.
    energy_reg_weight
        w.
    device
        Where the buffer lies; by default where the samples are.

    Notes
    -----
    New chains of vectors begin at standard normal noise, new chains of structures at structures of the batch at hand.
    """

    parts = ("contrastive", "regularization")

    def __init__(
        self,
        model: EnergyModel,
        sampler: Sampler,
        k_steps: int = 10,
        persistent: bool = False,
        buffer_size: int = 10_000,
        new_sample_ratio: float = 0.05,
        init_steps: int = 100,
        energy_reg_weight: float = 0.001,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model)
        given: Any = sampler
        if not isinstance(given, Sampler) or given.model is not model:
            raise ConfigError(
                "the sampler does not sample the energy that is trained",
                found=type(given).__name__,
                needed="a sampler of nvalchemi.ebm.samplers that holds the same model",
            )
        if k_steps < 0 or init_steps < 0 or energy_reg_weight < 0 or not 0 <= new_sample_ratio <= 1:
            raise ConfigError(
                "contrastive divergence cannot be like this",
                found=f"k_steps={k_steps}, init_steps={init_steps}, energy_reg_weight={energy_reg_weight}, "
                f"new_sample_ratio={new_sample_ratio}",
                needed="none below 0, and a ratio of at most 1",
            )
        self.sampler, self.k_steps, self.persistent = sampler, k_steps, persistent
        self.buffer_size, self.new_sample_ratio, self.init_steps = buffer_size, new_sample_ratio, init_steps
        self.energy_reg_weight = energy_reg_weight
        self.replay_buffer = ReplayBuffer(buffer_size, device) if persistent else None
        self.rank_local = persistent

    def terms(
        self, model: Any, x: Any, *, generator: torch.Generator | None, step: int | None, conditions: Mapping[str, Any]
    ) -> Terms:
        negatives, told = self._moved(x, generator, conditions)
        data, chains = both_energies(model, x, negatives, conditions, told)
        weight = self.energy_reg_weight
        penalty = weight * (data.square() + chains.square()) if weight else None
        return Terms({"contrastive": data - chains, "regularization": penalty}, negatives)

    def negatives(self, x: Any, generator: torch.Generator | None = None, conditions: Mapping[str, Any] | None = None) -> Any:
        """Give as many samples as ``x`` has, from chains that begin at it or go on; persistent chains are moved."""
        return self._moved(x, generator, conditions or {})[0]

    def _moved(self, x: Any, generator: torch.Generator | None, conditions: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """As many ends of chains as ``x`` has samples, and the conditions of these chains."""
        buffer = self.replay_buffer
        if buffer is None:
            return self.sampler.sample(x=x, n_steps=self.k_steps, generator=generator, **conditions), conditions
        if not buffer.is_initialized:
            self.initialize_buffer(x, generator, conditions)
        slots, start = buffer.draw(len(x), generator)
        told: dict[str, Any] = dict(buffer.conditions(slots))
        if told.keys() != conditions.keys():
            raise ConfigError(
                "persistent chains began with other conditions than those of the batch",
                found=", ".join(conditions) or "none",
                needed=", ".join(told) or "none",
                fix="give the same conditions in each call, or begin the chains anew with initialize_buffer(x, generator, conditions)",
            )
        if self.new_sample_ratio:
            start, told = self._renewed(start, told, x, conditions, generator)
        ends = self.sampler.sample(x=start, n_steps=self.k_steps, generator=generator, **told)
        buffer.write(slots, ends, told)
        return ends, told

    def initialize_buffer(
        self, x: Any, generator: torch.Generator | None = None, conditions: Mapping[str, Any] | None = None
    ) -> None:
        """Begin all persistent chains anew, and move each ``init_steps`` steps.

        Parameters
        ----------
        x
            A batch of data, which says what a sample is: (batch, ...), or structures, at which the chains then begin, each as often as any
            other or once more.
        generator
            Where noise comes from.
        conditions
            Those of the batch, by name, (batch, ...) each: chain i has those of row i, counted round and round.

        Raises
        ------
        ConfigError
            For anything else, such as a shape.
        """
        buffer = self._buffer()
        if not isinstance(x, Tensor | Batch):
            raise ConfigError(
                "persistent chains begin like a batch of data",
                found=repr(x),
                needed="a tensor (batch, ...), or structures",
                fix="initialize_buffer(torch.empty(1, *shape)) where only the shape of a sample is known; the first call does it by itself",
            )
        which = torch.arange(buffer.size) % max(len(x), 1)
        told: dict[str, Any] = {
            name: value[which.to(value.device)] for name, value in repeated(conditions or {}, len(x), 1).items()
        }
        if isinstance(x, Batch):
            start: Any = x.index_select(which)
        else:
            start = torch.empty(buffer.size, *x.shape[1:], dtype=x.dtype, device=x.device).normal_(generator=generator)
        if self.init_steps:
            start = self.sampler.sample(x=start, n_steps=self.init_steps, generator=generator, **told)
        buffer.initialize(start, told)

    def mix_buffer_across_ranks(self, group: Any | Manager | None = None, generator: torch.Generator | None = None) -> None:
        """Deal the persistent chains of all ranks out anew, in one collective that every rank calls; see `ReplayBuffer.mix_across_ranks`."""
        self._buffer().mix_across_ranks(group, generator)

    def state_dict(self) -> dict[str, Any]:
        """The persistent chains of this rank."""
        return {} if self.replay_buffer is None else {"replay_buffer": self.replay_buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the chains back, whether the buffer was filled or not.

        Raises
        ------
        CheckpointError
            Where there are chains and should be none, or none and should be some.
        """
        if ("replay_buffer" in state) != self.persistent:
            raise CheckpointError(
                "persistent chains were saved, and this loss has none" if state else "no persistent chains were saved",
                fix=f"declare ContrastiveDivergence(persistent={bool(state)}), or take the weights alone with init_from",
            )
        if self.replay_buffer is not None:
            self.replay_buffer.load_state_dict(state["replay_buffer"])

    @property
    def chains(self) -> ReplayBuffer | None:
        return self.replay_buffer

    def divide_anew(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any] | None:
        """The chains of all ranks, dealt out to another number of them: none is lost, and none is on two ranks."""
        if self.replay_buffer is None:
            return {}
        return {"replay_buffer": ReplayBuffer.dealt([state["replay_buffer"] for state in states], rank, world_size)}

    def _buffer(self) -> ReplayBuffer:
        if self.replay_buffer is None:
            raise ConfigError("these chains are not kept", fix="give ContrastiveDivergence(persistent=True)")
        return self.replay_buffer

    def _renewed(
        self, start: Any, told: dict[str, Any], x: Any, conditions: Mapping[str, Tensor], generator: torch.Generator | None
    ) -> tuple[Any, dict[str, Any]]:
        """The drawn chains and their conditions, some of them at a new beginning, with the conditions of the batch's row."""
        at = positions(x)
        anew = torch.empty(len(x), device=at.device).uniform_(generator=generator) < self.new_sample_ratio
        told = {name: chosen(anew, value, told[name]) for name, value in repeated(conditions, len(x), 1).items()}
        if isinstance(x, Batch):
            old, new = start.to_data_list(), x.to_data_list()
            return Batch.from_data_list([b if flag else a for a, b, flag in zip(old, new, anew.tolist(), strict=True)]), told
        return chosen(anew, torch.empty_like(start).normal_(generator=generator), start), told


def chosen(which: Tensor, these: Tensor, others: Tensor) -> Tensor:
    """Rows of ``these`` (n, ...) where ``which`` (n,) is true, of ``others`` elsewhere, where and as these are."""
    return torch.where(which.to(others.device).reshape(-1, *[1] * (others.ndim - 1)), these.to(others), others)


def both_energies(
    model: Any, data: Any, samples: Any, conditions: Mapping[str, Any] | None = None, others: Mapping[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Energies of data and of samples, by one call where they are rows of a tensor.

    There may be several sets of samples, one after the other; each has the conditions of the data, unless ``others`` says the samples' own.
    """
    told = conditions or {}
    if isinstance(data, Batch):
        own = told if others is None else others
        return _wide(check_energy(model(data, **told), len(data))), _wide(check_energy(model(samples, **own), len(samples)))
    if others is None or others is conditions:
        told = repeated(told, len(data), 1 + len(samples) // max(len(data), 1))
    else:
        told = {name: torch.cat([value, others[name].to(value)]) for name, value in repeated(told, len(data), 1).items()}
    energies = check_energy(model(torch.cat([data, samples]), **told), len(data) + len(samples))
    ours, theirs = _wide(energies).split([len(data), len(samples)])
    return ours, theirs


def _wide(energies: Tensor) -> Tensor:
    """Energies in at least float32: of those that autocast made, the loss is a small difference."""
    return energies.to(torch.promote_types(energies.dtype, torch.float32))
