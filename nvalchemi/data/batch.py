"""Many structures of different sizes as one set of tensors, with the offsets at which each begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.data.atoms import AtomicData, compact
from nvalchemi.data.fields import KNOWN_LEVELS, Level, cast_target, row_axis
from nvalchemi.data.joining import common_edges, common_levels, filled, misfit
from nvalchemi.data.ragged import chosen_rows, ragged_rows
from nvalchemi.errors import DataError


class Batch:
    """Many structures: their atoms (and edges) one after the other, and the offsets.

    Usually made by `from_data_list`. The constructor itself trusts what it is given (`validate` checks), because readers
    and datasets make a batch a step.

    Parameters
    ----------
    fields
        Tensors by name: system fields (B, ...), atom fields (N, ...), edge fields (E, ...), ``edge_index`` (2, E) with
        atoms numbered through the whole batch.
    levels
        The level of every field.
    atom_offsets
        (B + 1,) int64: structure i has the atoms ``atom_offsets[i]`` to ``atom_offsets[i + 1]``.
    edge_offsets
        The same of the edges, where there are any.
    present
        For each field that some structures lack, (B,) booleans. Their rows hold NaN (0 in fields of integers, of booleans,
        and in ``cell``).
    sample_index, dataset_index
        (B,) int64: where each structure came from: its index in its data set, and which of ``dataset_names`` that is.
    neighbor_cutoff
        Å. The radius within which the edges are complete.

    Attributes
    ----------
    fields, levels, present
        As given. Every field is an attribute as well: ``batch.positions``.
    """

    __slots__ = (
        "_batch_idx",
        "atom_offsets",
        "dataset_index",
        "dataset_names",
        "edge_offsets",
        "fields",
        "levels",
        "neighbor_cutoff",
        "present",
        "sample_index",
    )

    if TYPE_CHECKING:  # what __getattr__ answers where the field is there
        positions: Tensor
        atomic_numbers: Tensor
        cell: Tensor
        pbc: Tensor
        energy: Tensor
        forces: Tensor
        stress: Tensor
        charge: Tensor
        edge_index: Tensor
        edge_shift: Tensor

    def __init__(
        self,
        fields: dict[str, Tensor],
        levels: Mapping[str, Level],
        atom_offsets: Tensor,
        edge_offsets: Tensor | None = None,
        present: dict[str, Tensor] | None = None,
        sample_index: Tensor | None = None,
        dataset_index: Tensor | None = None,
        dataset_names: tuple[str, ...] = (),
        neighbor_cutoff: float | None = None,
    ) -> None:
        self.fields = fields
        self.levels = levels
        self.atom_offsets = atom_offsets
        self.edge_offsets = edge_offsets
        self.present: dict[str, Tensor] = {} if present is None else present
        self.sample_index = sample_index
        self.dataset_index = dataset_index
        self.dataset_names = dataset_names
        self.neighbor_cutoff = neighbor_cutoff
        self._batch_idx: Tensor | None = None

    # -- from and to single structures -------------------------------------------------------------------------------

    @classmethod
    def from_data_list(cls, data: Iterable[AtomicData]) -> Batch:
        """Put structures together, in their order. A field that only some of them have is kept, see ``present``.

        Raises
        ------
        DataError
            No structures, or structures that do not fit together: dtypes, devices, shapes of rows or levels of a field,
            edges on only some of them, or edges of different cutoffs.
        """
        data = data if isinstance(data, list) else list(data)
        if not data:
            raise DataError("a batch needs at least one structure", found="an empty list")
        try:
            parts = [d._fields for d in data]
        except AttributeError:
            kinds = sorted({type(d).__name__ for d in data})
            raise DataError(
                "a batch is made of AtomicData", found=", ".join(kinds), fix="AtomicData.from_atoms reads ASE's"
            ) from None
        keys = parts[0].keys()
        names = list(keys)
        if any(p.keys() != keys for p in parts):
            names = list(dict.fromkeys(name for p in parts for name in p))
        levels = common_levels(data)
        counts = [p["positions"].shape[0] for p in parts]
        edge_counts, cutoff = None, None
        if "edge_index" in names:
            edge_counts, cutoff = common_edges(data)
        fields: dict[str, Tensor] = {}
        present: dict[str, Tensor] = {}
        device = parts[0]["positions"].device
        for name in names:
            level = levels[name]
            rows = counts if level == Level.ATOM else edge_counts if level == Level.EDGE else None
            tensors = [p.get(name) for p in parts]
            mask = None
            if any(t is None for t in tensors):  # `in` would compare tensors
                mask = [t is not None for t in tensors]
                tensors = filled(name, tensors, rows)
            try:
                joined = torch.stack(tensors) if rows is None else torch.cat(tensors, dim=row_axis(name))  # type: ignore[arg-type]
            except (RuntimeError, TypeError) as error:
                raise misfit(name, tensors) from error
            first = tensors[0].dtype  # type: ignore[union-attr]
            for t in tensors:
                if t.dtype is not first:  # type: ignore[union-attr]
                    raise misfit(name, tensors)
            fields[name] = joined
            if mask is not None:
                present[name] = torch.tensor(mask, device=device)
        offsets = torch.tensor([0, *accumulate(counts)], device=device)
        edge_offsets = None
        if edge_counts is not None:
            edge_offsets = torch.tensor([0, *accumulate(edge_counts)], device=device)
            shift = torch.repeat_interleave(offsets[:-1], edge_offsets.diff(), output_size=sum(edge_counts))
            fields["edge_index"] = fields["edge_index"] + shift
        return cls(fields, levels, offsets, edge_offsets, present, neighbor_cutoff=cutoff)

    def to_data_list(self) -> list[AtomicData]:
        """The structures one by one, each with the fields that it has. Their tensors are views of the batch's."""
        size = self.num_graphs
        rows: list[dict[str, Tensor]] = [{} for _ in range(size)]
        counts = self.atom_offsets.diff().tolist()
        edge_counts = None if self.edge_offsets is None else self.edge_offsets.diff().tolist()
        for name, tensor in self.fields.items():
            level = self.levels[name]
            pieces: Sequence[Tensor]
            if level == Level.SYSTEM:
                pieces = tensor.unbind(0)
            elif level == Level.ATOM:
                pieces = tensor.split(counts)
            elif name == "edge_index":
                pieces = self._local_edges().split(edge_counts, dim=1)
            else:
                pieces = tensor.split(edge_counts)
            mask = self.present.get(name)
            if mask is None:
                for row, piece in zip(rows, pieces, strict=True):
                    row[name] = piece
            else:
                for row, piece, there in zip(rows, pieces, mask.tolist(), strict=True):
                    if there:
                        row[name] = piece
        levels, cutoff, make = self.levels, self.neighbor_cutoff, AtomicData.trusted
        return [make(row, levels, cutoff) for row in rows]

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            try:
                return self.fields[key]
            except KeyError:
                raise KeyError(self._no_field(key)) from None
        size, i = self.num_graphs, int(key)
        if not -size <= i < size:
            raise IndexError(f"structure {i} of a batch of {size}")
        i %= size
        start, stop = self.atom_offsets[i : i + 2].tolist()
        first, last = (0, 0) if self.edge_offsets is None else self.edge_offsets[i : i + 2].tolist()
        row: dict[str, Tensor] = {}
        for name, tensor in self.fields.items():
            mask = self.present.get(name)
            if mask is not None and not mask[i]:
                continue
            level = self.levels[name]
            if level == Level.SYSTEM:
                row[name] = tensor[i]
            elif level == Level.ATOM:
                row[name] = tensor[start:stop]
            elif name == "edge_index":
                row[name] = tensor[:, first:last] - start
            else:
                row[name] = tensor[first:last]
        return AtomicData.trusted(row, self.levels, self.neighbor_cutoff)

    def __iter__(self) -> Iterator[AtomicData]:
        return iter(self.to_data_list())

    def index_select(self, index: Any) -> Batch:
        """The batch of the structures ``index``, in that order; repeats are allowed.

        Parameters
        ----------
        index
            Integers (negative ones count from the end), a (B,) boolean mask, or a slice.
        """
        idx = chosen_rows(index, self.num_graphs, self.device)
        atoms, offsets = ragged_rows(self.atom_offsets, idx)
        edges, edge_offsets = None, None
        if self.edge_offsets is not None:
            edges, edge_offsets = ragged_rows(self.edge_offsets, idx)
        fields: dict[str, Tensor] = {}
        for name, tensor in self.fields.items():
            level = self.levels[name]
            if level == Level.SYSTEM:
                fields[name] = tensor.index_select(0, idx)
            elif level == Level.ATOM:
                fields[name] = tensor.index_select(0, atoms)
            elif name == "edge_index":
                assert edges is not None and edge_offsets is not None
                shift = torch.repeat_interleave(
                    offsets[:-1] - self.atom_offsets[idx], edge_offsets.diff(), output_size=edges.shape[0]
                )
                fields[name] = tensor.index_select(1, edges) + shift
            else:
                assert edges is not None
                fields[name] = tensor.index_select(0, edges)
        return Batch(
            fields,
            self.levels,
            offsets,
            edge_offsets,
            {name: mask[idx] for name, mask in self.present.items()},
            None if self.sample_index is None else self.sample_index[idx],
            None if self.dataset_index is None else self.dataset_index[idx],
            self.dataset_names,
            self.neighbor_cutoff,
        )

    # -- reading -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in Batch.__slots__:
            raise AttributeError(name)
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(self._no_field(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def has(self, name: str) -> Tensor:
        """(B,) booleans: which structures have the field ``name``; all False for a name that is not there."""
        mask = self.present.get(name)
        if mask is not None:
            return mask
        return torch.full((self.num_graphs,), name in self.fields, device=self.device)

    def __len__(self) -> int:
        return self.atom_offsets.shape[0] - 1

    @property
    def num_graphs(self) -> int:
        """Number of structures."""
        return self.atom_offsets.shape[0] - 1

    @property
    def num_nodes(self) -> int:
        """Number of atoms of all structures."""
        numbers = self.fields.get("atomic_numbers")
        return int(self.atom_offsets[-1]) if numbers is None else numbers.shape[0]

    num_atoms = num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges of all structures; 0 where there is no neighbour list."""
        edges = self.fields.get("edge_index")
        return 0 if edges is None else edges.shape[1]

    @property
    def num_nodes_per_graph(self) -> Tensor:
        """(B,) int64: atoms of each structure."""
        return self.atom_offsets.diff()

    @property
    def num_edges_per_graph(self) -> Tensor:
        """(B,) int64: edges of each structure."""
        return torch.zeros_like(self.atom_offsets[1:]) if self.edge_offsets is None else self.edge_offsets.diff()

    @property
    def batch_idx(self) -> Tensor:
        """(N,) int64: the structure to which each atom belongs."""
        if self._batch_idx is None:
            ids = torch.arange(self.num_graphs, device=self.atom_offsets.device)
            self._batch_idx = torch.repeat_interleave(ids, self.atom_offsets.diff(), output_size=self.num_nodes)
        return self._batch_idx

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(self.fields)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all floating fields but the energy."""
        return self.fields["positions"].dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.atom_offsets.device

    def validate(self) -> Batch:
        """Check what the constructor trusted; see `nvalchemi.data.validation.validate_batch`. Returns the batch itself."""
        from nvalchemi.data.validation import validate_batch

        validate_batch(self)
        return self

    def describe(self, index: int) -> str:
        """Where structure ``index`` of this batch came from, in words, for an error message."""
        if self.sample_index is None:
            return f"structure {index} of the batch"
        text = f"sample {int(self.sample_index[index])}"
        if self.dataset_names:
            which = 0 if self.dataset_index is None else int(self.dataset_index[index])
            text += f" of {self.dataset_names[which]}"
        return text

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{tuple(v.shape)}{'?' if k in self.present else ''}" for k, v in self.fields.items())
        return f"Batch({self.num_graphs} structures, {self.num_nodes} atoms; {shapes}; {self.device})"

    # -- making another ----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``, everything in it moved."""
        return self._map(lambda _, t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which ``to(..., non_blocking=True)`` is truly asynchronous.

        Without an accelerator there is nothing to copy to, and the batch itself is returned.
        """
        if not torch.accelerator.is_available():
            return self
        return self._map(lambda _, t: t.pin_memory())

    def clone(self) -> Batch:
        """A copy that shares no memory."""
        return self._map(lambda _, t: t.clone())

    def cast(self, dtype: torch.dtype) -> Batch:
        """The same batch with floating fields in ``dtype``; the energy stays float64."""
        return self._map(lambda name, t: t.to(cast_target(name, dtype)) if t.is_floating_point() else t)

    def replace(
        self,
        *,
        levels: Mapping[str, Level] | None = None,
        present: Mapping[str, Tensor] | None = None,
        neighbor_cutoff: float | None = None,
        edge_offsets: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Batch:
        """Another batch with some fields changed, sharing the rest.

        Parameters
        ----------
        levels
            Level of each field that is new and not a known one.
        present
            Masks of fields that only some structures have; a changed field keeps the mask that it had.
        neighbor_cutoff, edge_offsets
            Of new edges.
        **fields
            Fields by name; None takes one away (``edge_index=None`` all edges). Edges are kept when positions change.
        """
        new = {**self.fields}
        known: dict[str, Level] = dict(self.levels)
        offsets, cutoff, masks = self.edge_offsets, self.neighbor_cutoff, self.present
        if "edge_index" in fields:  # nothing stays that belongs to the old edges
            new = {k: v for k, v in new.items() if known[k] != Level.EDGE}
            masks = {k: v for k, v in masks.items() if k in new}
            offsets, cutoff = edge_offsets, neighbor_cutoff
            if fields["edge_index"] is not None and (offsets is None or cutoff is None):
                raise DataError(
                    "new edges need edge_offsets and neighbor_cutoff", fix="or use nvalchemi.data.neighbors.neighbor_list"
                )
        for name, tensor in fields.items():
            if tensor is None:
                new.pop(name, None)
                continue
            level = (levels or {}).get(name) or known.get(name) or KNOWN_LEVELS.get(name)
            if level is None:
                raise DataError(
                    f"the level of the new field {name!r} is not given", fix=f"replace(..., levels={{{name!r}: Level.ATOM}})"
                )
            new[name], known[name] = tensor, level
        sizes = {Level.SYSTEM: self.num_graphs, Level.ATOM: self.num_nodes}
        if "edge_index" in new:
            sizes[Level.EDGE] = new["edge_index"].shape[1]
        for name, tensor in fields.items():
            rows = sizes.get(known[name]) if tensor is not None else None
            if tensor is not None and (tensor.dim() <= row_axis(name) or tensor.shape[row_axis(name)] != rows):
                raise DataError(
                    f"{name} does not fit the batch",
                    found=f"shape {tuple(tensor.shape)}",
                    needed=f"{rows} rows, one for each {known[name]}",
                )
        masks = {k: v for k, v in {**masks, **(present or {})}.items() if k in new}
        out = Batch(
            new, known, self.atom_offsets, offsets, masks, self.sample_index, self.dataset_index, self.dataset_names, cutoff
        )
        out._batch_idx = self._batch_idx
        return out

    def _map(self, function: Any) -> Batch:
        def optional(name: str, t: Tensor | None) -> Tensor | None:
            return None if t is None else function(name, t)

        out = Batch(
            {k: function(k, v) for k, v in self.fields.items()},
            self.levels,
            function("atom_offsets", self.atom_offsets),
            optional("edge_offsets", self.edge_offsets),
            {k: function(k, v) for k, v in self.present.items()},
            optional("sample_index", self.sample_index),
            optional("dataset_index", self.dataset_index),
            self.dataset_names,
            self.neighbor_cutoff,
        )
        out._batch_idx = optional("batch_idx", self._batch_idx)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        whole = self._map(lambda _, t: compact(t))
        return Batch, (
            whole.fields,
            dict(whole.levels),
            whole.atom_offsets,
            whole.edge_offsets,
            whole.present,
            whole.sample_index,
            whole.dataset_index,
            whole.dataset_names,
            whole.neighbor_cutoff,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _no_field(self, name: str) -> str:
        return f"no field {name!r} in this batch; there are {', '.join(self.fields)}"

    def _local_edges(self) -> Tensor:
        assert self.edge_offsets is not None
        shift = torch.repeat_interleave(self.atom_offsets[:-1], self.edge_offsets.diff(), output_size=self.num_edges)
        return self.fields["edge_index"] - shift
