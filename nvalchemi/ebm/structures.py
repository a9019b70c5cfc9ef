"""Structures as Markov chains: the atoms of a batch move, and each structure is a chain of its own.

Atoms of a periodic structure may leave its cell; they are not wrapped back, so that a trajectory shows how far they went. The energy is
that of all their images, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from nvalchemi.data import Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.data.ragged import ragged_rows
from nvalchemi.ebm.chains import Chains
from nvalchemi.ebm.conditions import check_rows, rows_of
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, InteratomicPotential
from nvalchemi.models.gradient import all_plain, check_energy, plain

SKIN = 1.0
"""Å by which a neighbour list reaches farther than needed: it holds until an atom has moved half of it."""

FAR = 1e7
"""Å. A structure with an atom beyond has left, as if its positions were not finite: float32 cannot tell bonds there."""

LABELS = ("energy", "forces", "stress")
"""What was true of a structure before it moved."""


class AtomChains(Chains):
    """Chains whose positions are those of a batch, (N, 3): every structure is a chain.

    Parameters
    ----------
    batch
        Where the chains begin. Structures may differ in size and in periodicity. Their labels are left behind; a neighbour list comes
        back, with the cutoff that it has, made for the new positions.
    reach
        Å. The cutoff of the energy where it is known; neighbours within it are kept at hand from step to step.

    Notes
    -----
    A structure whose positions are no longer finite has the energy NaN, and no other structure is touched by it.
    """

    def __init__(self, batch: Batch, reach: float | None = None) -> None:
        listed = batch.neighbor_cutoff if "edge_index" in batch else None
        self._listed = listed
        self._reach = max((r for r in (listed, reach) if r is not None), default=None)
        self._batch = batch.replace(edge_index=None, positions=plain(batch.positions).detach(), **dict.fromkeys(LABELS))
        self.start = self._batch.positions.clone()
        self.size = len(batch)
        self._owner = plain(batch.batch_idx)
        self._neighbors: Batch | None = None

    @classmethod
    def of(cls, batch: Batch, model: Any) -> AtomChains:
        """The chains that begin at a batch and move in the energy of a model."""
        return cls(batch, model.cutoff if isinstance(model, InteratomicPotential) else None)

    # -- one number a chain ------------------------------------------------------------------------------------------

    def spread(self, values: Tensor) -> Tensor:
        """See `Chains.spread`."""
        return values.index_select(0, self._owner).unsqueeze(1)

    def coordinates(self, values: Tensor) -> Tensor:
        """One value an atom, (N,), of all structures."""
        if values.shape != self.start.shape[:1]:
            raise ConfigError("one value an atom is needed", found=f"shape {tuple(values.shape)}", needed=f"({len(self.start)},)")
        return values.to(self.start).unsqueeze(1)

    def masses(self, name: str) -> Tensor:
        """The masses (N, 1) of the elements, in u."""
        if name != "atomic":
            return super().masses(name)
        from ase.data import atomic_masses

        return torch.as_tensor(atomic_masses).to(self.start)[self._batch.atomic_numbers].unsqueeze(1)

    def total(self, values: Tensor) -> Tensor:
        """See `Chains.total`."""
        atoms = values.flatten(1).sum(1) if values.ndim > 1 else values
        return atoms.new_zeros(self.size).index_add(0, self._owner, atoms)

    def moments(self, x: Tensor) -> dict[str, Tensor]:
        """Nothing: coordinates of different structures have no mean."""
        return {}

    def unlike_pair(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Two atoms of unlike species in each structure, drawn evenly from all such ordered pairs.

        Parameters
        ----------
        first, second
            Numbers (size,), uniform in [0, 1).

        Returns
        -------
        tuple
            Indices of the atoms, (size,) int64 each, and which structures have such a pair; elsewhere both are the first atom.
        """
        numbers, owner = plain(self._batch.atomic_numbers), self._owner
        begins = plain(self._batch.atom_offsets)[:-1]
        kinds, kind = torch.unique(numbers, return_inverse=True)
        counts = torch.zeros(self.size, len(kinds), dtype=torch.long, device=owner.device)
        counts.index_put_((owner, kind), torch.ones_like(owner), accumulate=True)
        # an atom comes first as often as there are others that are unlike it
        others = plain(self._batch.num_nodes_per_graph).index_select(0, owner) - counts[owner, kind]
        one, pairs = self._weighted(others, begins, first)
        there = pairs > 0
        unlike = (kind != kind.index_select(0, one).index_select(0, owner)).long()
        two, _ = self._weighted(unlike, begins, second)
        return torch.where(there, one, begins), torch.where(there, two, begins), there

    def _weighted(self, weights: Tensor, begins: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """One atom of each structure by whole weights (N,), and the sums of these, (size,)."""
        ends = weights.cumsum(0)
        totals = torch.zeros_like(begins).index_add(0, self._owner, weights)
        before = ends.index_select(0, begins) - weights.index_select(0, begins)
        # never the total itself, to which a number near 1 might be rounded
        ranks = torch.minimum((draws.double() * totals).long(), (totals - 1).clamp(min=0))
        return torch.searchsorted(ends, before + ranks, right=True).clamp(max=len(weights) - 1), totals

    # -- some of the chains ------------------------------------------------------------------------------------------

    def subset(self, index: Tensor) -> AtomChains:
        """See `Chains.subset`."""
        return AtomChains(self._batch.replace(positions=self.start).index_select(index), self._reach).told(
            self.conditions_of(index)
        )

    def narrowed(self, values: Tensor, index: Tensor) -> Tensor:
        """See `Chains.narrowed`."""
        return self.take(values, index)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """See `Chains.take`."""
        return x.index_select(0, self._rows(index))

    def put_(self, x: Tensor, index: Tensor, values: Tensor) -> None:
        """See `Chains.put_`."""
        x.index_copy_(0, self._rows(index), values)

    def _rows(self, index: Tensor) -> Tensor:
        return ragged_rows(self._batch.atom_offsets, index)[0]

    def told(self, conditions: Mapping[str, Any]) -> Self:
        """See `Chains.told`; a row for each atom, (N, ...), will do as well."""
        check_rows(conditions, self.size, len(self.start))
        self.conditions = all_plain(conditions)
        return self

    def conditions_of(self, index: Tensor) -> dict[str, Any]:
        """See `Chains.conditions_of`."""
        atoms = {
            name: self.take(value, index.to(value.device))
            for name, value in self.conditions.items()
            if isinstance(value, Tensor) and value.ndim and len(value) != self.size
        }
        others = {name: value for name, value in self.conditions.items() if name not in atoms}
        return {**rows_of(others, index), **atoms}

    # -- structures --------------------------------------------------------------------------------------------------

    def inputs(self, x: Tensor) -> Batch:
        """The batch with its atoms at ``x``."""
        batch = self._batch.replace(positions=x)
        return batch if self._listed is None else neighbor_list(batch, self._listed)

    def trajectory(self, kept: Tensor) -> list[Batch]:
        """One batch for each state kept."""
        return [self.inputs(x) for x in kept]

    def energy(self, model: EnergyModel, x: Tensor) -> Tensor:
        """See `Chains.energy`."""
        batch, there = self._placed(x)
        return _only(there, check_energy(model(batch, **self.conditions), self.size))

    def gradient(self, model: EnergyModel, x: Tensor) -> Tensor:
        """See `Chains.gradient`."""
        return self.energy_and_gradient(model, x)[1]

    def energy_and_gradient(self, model: EnergyModel, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Chains.energy_and_gradient`."""
        batch, there = self._placed(x)
        if "forces" in model.outputs and not self.conditions:  # a network may have a faster way to them than differentiation
            found = model.predict(batch, outputs=("energy", "forces"))
            energy, gradient = found["energy"], found["forces"].to(x.dtype).neg_()
        else:
            energy, gradient = model.energy_and_gradient(batch, **self.conditions)
        if there is None:
            return energy, gradient
        return _only(there, energy), _only(self.spread(there), gradient)

    def _placed(self, x: Tensor) -> tuple[Batch, Tensor | None]:
        """The batch with its atoms at ``x``, and its neighbours; and which structures are there, None if all.

        Structures that left the numbers are at their beginning instead: no neighbours could be found for them.
        """
        finite = x.abs() < FAR
        there = None
        if not finite.all():
            there = self.total((~finite).to(x.dtype)) == 0
            x = self.choose(there, x, self._batch.positions)
        if self._reach is None:
            return self._batch.replace(positions=x), there
        known = self._neighbors
        if known is None or float((x - known.positions).square().sum(1).amax()) > (SKIN / 2) ** 2:
            known = self._neighbors = neighbor_list(self._batch.replace(positions=x.clone()), self._reach + SKIN)
        return near(known.replace(positions=x), self._reach), there


def near(batch: Batch, cutoff: float) -> Batch:
    """A batch with only those edges of its neighbour list that are shorter than ``cutoff`` Å."""
    index, owner = batch.edge_index, plain(batch.batch_idx).index_select(0, batch.edge_index[1])
    vectors = batch.positions.index_select(0, index[0]) - batch.positions.index_select(0, index[1])
    if "edge_shift" in batch:
        cells = batch.cell.index_select(0, owner)
        vectors = vectors + (batch.edge_shift.unsqueeze(2) * cells).sum(1)
    kept = (vectors.square().sum(1) < cutoff**2).nonzero().squeeze(1)
    counts = torch.bincount(owner.index_select(0, kept), minlength=len(batch))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    fields = {"edge_index": index.index_select(1, kept)}
    present = {}
    if "edge_shift" in batch:
        fields["edge_shift"] = batch.edge_shift.index_select(0, kept)
        if "edge_shift" in batch.present:
            present["edge_shift"] = batch.present["edge_shift"]
    return batch.replace(levels=None, present=present, edge_offsets=offsets, neighbor_cutoff=float(cutoff), **fields)


def _only(there: Tensor | None, values: Tensor) -> Tensor:
    """The values where structures are there, NaN elsewhere."""
    return values if there is None else torch.where(there, values, torch.full_like(values, torch.nan))
