"""Interatomic potentials: energies, forces and stress of batches of atoms, from a network that sees the vectors between neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nvalchemi.data import Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.distributed.blocks import follow_gradients, is_sharded_in_blocks, is_unit
from nvalchemi.distributed.recompute import is_recomputed
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models.derivatives import per_volume
from nvalchemi.models.energy import EnergyModel, parameter_dtype
from nvalchemi.models.gradient import differentiable, input_gradient, leaf, plain
from nvalchemi.models.references import (
    MAX_Z,
    ReferenceFit,
    by_number,
    fit_reference_energies,
    force_rms,
    refuse_shifted,
    symbol,
)


class PotentialNet(nn.Module, ABC):
    """What stands inside an `InteratomicPotential`: per-atom energies from the vectors to the neighbours.

    It sees positions only through these vectors, so energies cannot change with a translation, and forces and stress both follow from
    the gradient with respect to the vectors. Contributions must fade smoothly to nothing at the cutoff; longer vectors may be given and
    must contribute nothing.

    Attributes
    ----------
    elements
        Atomic numbers that the network knows, None for all.
    cutoff
        Å; 0 for a network that leaves it to the potential.
    gives_gradient
        Whether ``forward(..., gradient=True)`` gives ``(energies, gradient)``, the gradient of their sum with respect to the vectors,
        (E, 3), whose own dependence on the parameters can be differentiated once. A network without this is differentiated by autograd.
    """

    elements: tuple[int, ...] | None = None
    cutoff: float = 0.0
    gives_gradient: ClassVar[bool] = False

    @abstractmethod
    def forward(self, atomic_numbers: Tensor, vectors: Tensor, edge_index: Tensor) -> Tensor:
        """Per-atom energies (N,), in eV before the potential's ``energy_scale``.

        Parameters
        ----------
        atomic_numbers
            (N,) int64.
        vectors
            (E, 3) Å, from the centre of an edge to its neighbour.
        edge_index
            (2, E) int64: row 0 the neighbour, row 1 the centre, sorted by centre.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain data from which `nvalchemi.models.build_net` makes the same network: ``{"net": name, ...}``."""


class Edges(NamedTuple):
    """Neighbours of a batch: ``pairs`` (2, E) and ``vectors`` (E, 3) Å in the dtype of the network."""

    pairs: Tensor
    vectors: Tensor


class InteratomicPotential(EnergyModel):
    """Energies of atoms: reference energies of the elements plus what a network says of the surroundings.

    The energy of a structure, float64, is the sum over its atoms of ``reference[Z] + energy_scale * net(...)``. Forces are minus its
    gradient and the stress its derivative with strain over the volume, so both are conservative, in training and evaluation.

    Parameters
    ----------
    net
        A `PotentialNet`, or another module with the same ``forward``.
    cutoff
        Å. Neighbours within this distance are handed to the network. Taken from a `PotentialNet` where not given.
    reference_energies
        eV by symbol or atomic number; None for none. With them, an element that is not among them is an error.
    energy_scale
        Factor of the network's energy, for example the root mean square of the forces in eV/Å (`fit_energy_scale`).

    Raises
    ------
    ConfigError
        No positive cutoff or scale.
    DataError
        Reference energies of no elements.
    """

    outputs = ("energy", "forces", "stress")
    reference: Tensor
    known: Tensor
    scale: Tensor

    def __init__(
        self,
        net: nn.Module,
        *,
        cutoff: float | None = None,
        reference_energies: Mapping[Any, float] | None = None,
        energy_scale: float = 1.0,
    ) -> None:
        super().__init__()
        inside = net.cutoff if isinstance(net, PotentialNet) and net.cutoff else None
        cutoff = inside if cutoff is None else cutoff
        if cutoff is None or not 0 < cutoff < float("inf"):
            raise ConfigError("a potential needs a cutoff", found=cutoff, needed="a positive length in Å", fix="give cutoff=5.0")
        if inside is not None and cutoff < inside:
            raise ConfigError(
                "the potential would hide neighbours from its network",
                found=f"cutoff={cutoff} Å and a network with {inside} Å",
                fix="give both the same cutoff",
            )
        self.net = net
        self.cutoff = float(cutoff)
        # Asked once: a wrapper that later takes the place of `net` has none of these.
        self._describe = net.config if isinstance(net, PotentialNet) else None
        self._elements = net.elements if isinstance(net, PotentialNet) else None
        self._gives_gradient = isinstance(net, PotentialNet) and net.gives_gradient
        self.has_references = False
        self.register_buffer("reference", torch.zeros(MAX_Z + 1, dtype=torch.float64))
        self.register_buffer("known", torch.zeros(MAX_Z + 1, dtype=torch.bool))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.set_reference_energies(reference_energies)
        self.set_energy_scale(energy_scale)

    # -- references and scale ----------------------------------------------------------------------------------------

    @property
    def reference_energies(self) -> dict[str, float] | None:
        """Reference energies in eV by symbol, None where there are none."""
        if not self.has_references:
            return None
        return {symbol(z): float(self.reference[z]) for z in self.known.nonzero().flatten().tolist()}

    def set_reference_energies(self, energies: Mapping[Any, float] | None) -> None:
        """Replace the reference energies; see the class."""
        elements = range(1, MAX_Z + 1) if self._elements is None else self._elements
        given = {} if energies is None else by_number(energies)
        self.reference.zero_()
        self.known.zero_()
        for z in elements:
            if energies is None or z in given:
                self.known[z] = True
                self.reference[z] = given.get(z, 0.0)
        self.has_references = energies is not None

    def set_energy_scale(self, scale: float) -> None:
        """Replace the factor of the network's energy."""
        if not 0 < scale < float("inf"):
            raise ConfigError("no scale of energies", found=scale, needed="a positive number")
        self.scale.fill_(scale)

    def fit_reference_energies(self, source: Any) -> ReferenceFit:
        """Take reference energies from a training set by least squares; see `nvalchemi.models.references.ReferenceFit`."""
        fit = fit_reference_energies(source)
        self.set_reference_energies(fit.energies)
        return fit

    def fit_energy_scale(self, source: Any) -> float:
        """Take the root mean square of the forces of a training set, eV/Å, as ``energy_scale`` (eV, lengths being of 1 Å)."""
        scale = force_rms(source)
        self.set_energy_scale(scale)
        return scale

    # -- energies and their derivatives ------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Tensor:
        """Energies (B,) float64 in eV. Differentiable to any order, with respect to ``batch.positions`` if these require a gradient.

        Raises
        ------
        DataError
            An element that the model does not know, or labels whose reference energies were taken off already.
        """
        if not isinstance(batch, Batch):
            raise DataError(
                "a potential has the energy of structures", found=type(batch).__name__, needed="a nvalchemi.data.Batch"
            )
        self._check(batch)
        edges = self._edges(batch)
        return self._total(batch, self.net(batch.atomic_numbers, edges.vectors, edges.pairs))

    def predict(self, x: Batch, outputs: Sequence[str] = ("energy", "forces")) -> dict[str, Tensor]:
        """Predict what is asked for, and compute nothing else.

        Parameters
        ----------
        x
            A batch. Its neighbour list is used where it reaches as far as the cutoff, and made otherwise.
        outputs
            Some of ``"energy"`` (B,) float64 eV, ``"forces"`` (N, 3) eV/Å and ``"stress"`` (B, 3, 3) eV/Å³ with tension positive, the
            latter two in the network's dtype. The stress of a structure that repeats nowhere is NaN.

        Returns
        -------
        dict
            By name. With a graph, ready for one backward pass to the parameters, where the model is in training mode and gradients are
            enabled; without one otherwise, also under ``torch.no_grad`` and ``torch.inference_mode``.
        """
        self.check_outputs(outputs)
        self._check(x)
        graph = self.training and torch.is_grad_enabled()
        forces, stress = "forces" in outputs, "stress" in outputs
        result: dict[str, Tensor] = {}
        if not (forces or stress):
            with torch.set_grad_enabled(graph):
                return {"energy": self(x)} if "energy" in outputs else {}
        with self._gradient_precision(x.positions.device):
            energy, gradient, edges = self._energy_and_gradient(x, graph)
        if "energy" in outputs:
            result["energy"] = energy
        if forces:
            senders, receivers = edges.pairs
            result["forces"] = (
                gradient.new_zeros(x.num_nodes, 3).index_add(0, receivers, gradient).index_add(0, senders, gradient, alpha=-1)
            )
        if stress:
            result["stress"] = self._stress(x, edges, gradient)
        return result

    def _energy_and_gradient(self, batch: Batch, graph: bool) -> tuple[Tensor, Tensor, Edges]:
        """Energies (B,), their gradient with respect to the edges' vectors (E, 3), and the edges."""
        if is_unit(self):
            raise ConfigError(
                "fully_shard was called on the potential, whose forces are computed from its net",
                fix="call fully_shard(model.net), and on the layers in it",
            )
        follows = graph and batch.positions.requires_grad
        follow_gradients(self.net)
        # A derivative written by hand has one precision, and needs all weights and activations at once: under autocast, and where blocks
        # of the net are sharded each for itself or computed again, the net's own operations are differentiated.
        by_hand = self._gives_gradient and not torch.is_autocast_enabled(batch.positions.device.type)
        if by_hand and not follows and not is_sharded_in_blocks(self.net) and not (graph and is_recomputed(self.net)):
            with torch.set_grad_enabled(graph):
                edges = self._edges(batch)
                atomic, gradient = self.net(batch.atomic_numbers, edges.vectors, edges.pairs, gradient=True)
                return self._total(batch, atomic), gradient * self.scale.to(gradient.dtype), edges
        with differentiable():
            edges = self._edges(batch)
            edges = Edges(plain(edges.pairs), edges.vectors if follows else leaf(edges.vectors))
            energy = self._total(batch, self.net(plain(batch.atomic_numbers), edges.vectors, edges.pairs))
            gradient = input_gradient(energy, edges.vectors, create_graph=graph)
        if not graph:
            energy, edges = energy.detach(), Edges(edges.pairs, edges.vectors.detach())
        return energy, gradient, edges

    def _total(self, batch: Batch, atomic: Tensor) -> Tensor:
        """Energies of the structures from the network's energies of the atoms, summed in float64."""
        per_atom = atomic.double() * self.scale
        if self.has_references:
            per_atom = per_atom + self.reference.index_select(0, plain(batch.atomic_numbers))
        return per_atom.new_zeros(batch.num_graphs).index_add(0, plain(batch.batch_idx), per_atom)

    def _stress(self, batch: Batch, edges: Edges, gradient: Tensor) -> Tensor:
        """Derivative of the energy with a symmetric strain, over the volume."""
        outer = edges.vectors.unsqueeze(2) * gradient.unsqueeze(1)
        owner = plain(batch.batch_idx).index_select(0, edges.pairs[1])
        virial = gradient.new_zeros(batch.num_graphs, 3, 3).index_add(0, owner, outer)
        return per_volume(0.5 * (virial + virial.mT), batch)

    def _edges(self, batch: Batch) -> Edges:
        """The edges within the cutoff, their vectors in the dtype of the network."""
        reach = batch.neighbor_cutoff
        if "edge_index" not in batch or reach is None or reach < self.cutoff * (1 - 1e-9):
            batch = neighbor_list(batch, self.cutoff)
            reach = self.cutoff
        index = batch.edge_index
        positions = batch.positions
        # Differences before the cast: two coordinates of a large cell lose in float32 what their difference keeps.
        vectors = positions.index_select(0, index[0]) - positions.index_select(0, index[1])
        if "edge_shift" in batch:
            cells = batch.cell.index_select(0, batch.batch_idx.index_select(0, index[1]))
            vectors = vectors + (batch.edge_shift.unsqueeze(2) * cells).sum(1)
        if reach > self.cutoff * (1 + 1e-6):
            near = (vectors.detach().square().sum(1) < self.cutoff**2).nonzero().squeeze(1)
            index, vectors = index.index_select(1, near), vectors.index_select(0, near)
        dtype = parameter_dtype(self.net)
        return Edges(index, vectors if dtype is None else vectors.to(dtype))

    def _check(self, batch: Batch) -> None:
        numbers = batch.atomic_numbers
        if not bool(self.known.index_select(0, numbers).all()):
            missing = sorted(set(numbers.unique().tolist()) - set(self.known.nonzero().flatten().tolist()))
            raise DataError(
                "elements that the model does not know",
                found=", ".join(symbol(z) for z in missing),
                needed="some of " + ", ".join(symbol(z) for z in self.known.nonzero().flatten().tolist()),
                fix="train with structures that have them, or give reference_energies for them"
                if self.has_references
                else "make the network with these elements",
            )
        if self.has_references:
            refuse_shifted(batch)

    # -- being moved and rebuilt -------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """See `EnergyModel.config`.

        Raises
        ------
        ConfigError
            The network is no `PotentialNet`.
        """
        if self._describe is None:
            raise ConfigError("a network that cannot say how it is rebuilt", needed="a PotentialNet with config()")
        return {
            "model": "potential",
            "net": self._describe(),
            "cutoff": self.cutoff,
            "reference_energies": self.reference_energies,
            "energy_scale": float(self.scale),
        }

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.has_references |= bool((self.reference != 0).any())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A cast to float32 is for the network; reference energies of 1e4 eV would lose 1 meV.
        exact = {name: buffer for name, buffer in self._buffers.items() if buffer is not None and buffer.dtype == torch.float64}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            self._buffers[name] = moved if moved.dtype == torch.float64 else buffer.to(moved.device)
        return self
