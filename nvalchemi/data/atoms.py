"""One structure of atoms with its labels, checked once when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data import checks
from nvalchemi.data.fields import FIELDS, KNOWN_LEVELS, Level, cast_target
from nvalchemi.errors import DataError

if TYPE_CHECKING:
    import ase

RESERVED = frozenset(
    [
        "fields",
        "levels",
        "present",
        "field_names",
        "num_atoms",
        "num_nodes",
        "num_graphs",
        "num_edges",
        "num_nodes_per_graph",
        "num_edges_per_graph",
        "batch_idx",
        "atom_offsets",
        "edge_offsets",
        "sample_index",
        "dataset_index",
        "dataset_names",
        "neighbor_cutoff",
        "dtype",
        "device",
        "has",
        "replace",
        "to",
        "cast",
        "clone",
        "pin_memory",
        "index_select",
        "to_data_list",
        "from_data_list",
        "from_atoms",
        "to_atoms",
        "from_structure",
        "validate",
        "describe",
    ]
)
"""Names that mean something else on a structure or a batch, and so cannot name a field."""


class AtomicData:
    """One structure: positions, elements, and the labels that it has.

    Tensors, NumPy arrays and lists are taken; arrays and lists are copied, tensors are shared. All floating fields have
    the dtype of the positions (float32 or float64), but for the energy, which is always float64. An object is not
    changed after it is made: `replace` makes another.

    Parameters
    ----------
    positions
        (n, 3), Å.
    atomic_numbers
        (n,), 1 to 118.
    cell
        (3, 3), Å, lattice vectors as rows; left out for a molecule.
    pbc
        (3,) or one boolean: directions that repeat. With a cell and no ``pbc``, all three.
    energy
        Total energy, eV. In every label, NaN means "not labelled".
    forces
        (n, 3), eV/Å.
    stress
        (3, 3), eV/Å³, positive under tension (ASE's sign; a virial is ``-volume * stress``).
    charge
        Total charge, e.
    edge_index
        (2, e): row 0 the neighbour j, row 1 the centre i, sorted by i.
    edge_shift
        (e, 3): whole multiples of the lattice vectors; the vector of an edge is
        ``positions[j] - positions[i] + edge_shift @ cell``. Needed with edges where ``pbc`` is True.
    neighbor_cutoff
        Å. The radius within which the edges are complete; needed with edges.
    system, atom, edge
        Further fields by name, one value a structure, one row an atom, one row an edge. Known names are checked more
        closely: ``dipole`` (3,), ``magmoms`` (n,), ``charges`` (n,), ``masses`` (n,).

    Raises
    ------
    DataError
        Wrong shapes or dtypes, positions that are not finite, unknown elements, a periodic cell that spans nothing,
        infinite labels, or distances that only a wrong unit explains.

    Examples
    --------
    >>> h2 = AtomicData([[0.0, 0.0, 0.0], [0.0, 0.0, 0.74]], [1, 1], energy=-31.7)
    >>> h2.num_atoms, h2.energy.dtype
    (2, torch.float64)
    """

    __slots__ = ("_fields", "levels", "neighbor_cutoff")

    _fields: dict[str, Tensor]
    levels: Mapping[str, Level]
    neighbor_cutoff: float | None

    if TYPE_CHECKING:  # what __getattr__ answers, for type checkers and editors
        positions: Tensor
        atomic_numbers: Tensor
        cell: Tensor | None
        pbc: Tensor | None
        energy: Tensor | None
        forces: Tensor | None
        stress: Tensor | None
        charge: Tensor | None
        dipole: Tensor | None
        magmoms: Tensor | None
        charges: Tensor | None
        masses: Tensor | None
        edge_index: Tensor | None
        edge_shift: Tensor | None

    def __init__(
        self,
        positions: Any,
        atomic_numbers: Any,
        *,
        cell: Any = None,
        pbc: Any = None,
        energy: Any = None,
        forces: Any = None,
        stress: Any = None,
        charge: Any = None,
        edge_index: Any = None,
        edge_shift: Any = None,
        neighbor_cutoff: float | None = None,
        system: Mapping[str, Any] | None = None,
        atom: Mapping[str, Any] | None = None,
        edge: Mapping[str, Any] | None = None,
    ) -> None:
        x = checks.check_positions(positions)
        n = x.shape[0]
        fields: dict[str, Tensor] = {"positions": x, "atomic_numbers": checks.check_numbers(atomic_numbers, n, x.device)}
        levels = KNOWN_LEVELS
        periodic = False
        if cell is not None or pbc is not None:
            periodic = _add_cell(fields, cell, pbc)
        for name, value in (("energy", energy), ("forces", forces), ("stress", stress), ("charge", charge)):
            if value is not None:
                fields[name] = checks.check_field(name, value, KNOWN_LEVELS[name], x, None)
        n_edges = None
        if edge_index is not None or edge_shift is not None or neighbor_cutoff is not None:
            n_edges = _add_edges(fields, edge_index, edge_shift, neighbor_cutoff, periodic)
        if system or atom or edge:
            levels = {name: KNOWN_LEVELS[name] for name in fields}
            for level, mapping in ((Level.SYSTEM, system), (Level.ATOM, atom), (Level.EDGE, edge)):
                for name, value in (mapping or {}).items():
                    if name in fields:
                        raise DataError(f"{name} is given twice", fix="give it once, by its keyword or in one of the mappings")
                    checks.check_name(name, level, RESERVED)
                    fields[name] = checks.check_field(name, value, level, x, n_edges)
                    levels[name] = level
        checks.check_distances(x, periodic)
        _set(self, "_fields", fields)
        _set(self, "levels", levels)
        _set(self, "neighbor_cutoff", None if neighbor_cutoff is None else float(neighbor_cutoff))

    @classmethod
    def trusted(
        cls, fields: dict[str, Tensor], levels: Mapping[str, Level] = KNOWN_LEVELS, neighbor_cutoff: float | None = None
    ) -> AtomicData:
        """Make one from fields that were checked before (a store's, a batch's): no checks, no copies.

        Parameters
        ----------
        fields
            Every field by name, in its final shape and dtype.
        levels
            The level of each, which may name more than there are.
        neighbor_cutoff
            Å; with edges.
        """
        self = cls.__new__(cls)
        _set(self, "_fields", fields)
        _set(self, "levels", levels)
        _set(self, "neighbor_cutoff", neighbor_cutoff)
        return self

    # -- reading -----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._fields.get(name)
        if value is None and name not in FIELDS:
            raise AttributeError(f"no field {name!r}; there are {', '.join(self._fields)}")
        return value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an AtomicData is not changed after it is made; use data.replace({name}=...)")

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; there are {', '.join(self._fields)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the fields that this structure has."""
        return tuple(self._fields)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Every field that this structure has, by name."""
        return self._fields

    @property
    def num_atoms(self) -> int:
        """Number of atoms."""
        return self._fields["positions"].shape[0]

    num_nodes = num_atoms

    @property
    def num_edges(self) -> int:
        """Number of edges; 0 where there is no neighbour list."""
        edges = self._fields.get("edge_index")
        return 0 if edges is None else edges.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all floating fields but the energy."""
        return self._fields["positions"].dtype

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._fields["positions"].device

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{tuple(v.shape)}" for k, v in self._fields.items())
        cutoff = "" if self.neighbor_cutoff is None else f", neighbor_cutoff={self.neighbor_cutoff}"
        return f"AtomicData({shapes}; {self.dtype}, {self.device}{cutoff})"

    # -- making another ----------------------------------------------------------------------------------------------

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, *, non_blocking: bool = False
    ) -> AtomicData:
        """The same structure on ``device`` and with floating fields in ``dtype`` (energy stays float64)."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            raise DataError("structures are kept in float32 or float64", found=dtype)

        def move(name: str, t: Tensor) -> Tensor:
            target = cast_target(name, dtype) if dtype is not None and t.is_floating_point() else t.dtype
            return t.to(device=device, dtype=target, non_blocking=non_blocking)

        return self._map(move)

    def clone(self) -> AtomicData:
        """A copy that shares no memory."""
        return self._map(lambda _, t: t.clone())

    def replace(
        self, *, levels: Mapping[str, Level] | None = None, neighbor_cutoff: float | None = None, **fields: Any
    ) -> AtomicData:
        """Another structure with some fields changed, checked anew.

        Parameters
        ----------
        levels
            Level of each field that is new and not a known one.
        neighbor_cutoff
            Å; given with new edges.
        **fields
            Fields by name; None takes a field away. Edges are kept when positions change: new ones are the caller's to make.
        """
        new: dict[str, Any] = {**self._fields, **fields}
        known = {**self.levels, **(levels or {})}
        if fields.get("edge_index", ...) is None:  # without the edges, nothing that belongs to them stays
            new = {k: v for k, v in new.items() if k in ("edge_index",) or known.get(k) != Level.EDGE}
        elif "edge_index" in new and neighbor_cutoff is None:
            neighbor_cutoff = self.neighbor_cutoff
        named: dict[str, Any] = {}
        further: dict[str, dict[str, Any]] = {"system": {}, "atom": {}, "edge": {}}
        for name, value in new.items():
            if name in _KEYWORDS:
                named[name] = value
            elif value is not None:
                if name not in known:
                    raise DataError(
                        f"the level of the new field {name!r} is not given", fix=f"replace(..., levels={{{name!r}: Level.ATOM}})"
                    )
                further[known[name]][name] = value
        return AtomicData(**named, neighbor_cutoff=neighbor_cutoff, **further)

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> AtomicData:
        return AtomicData.trusted({k: function(k, v) for k, v in self._fields.items()}, self.levels, self.neighbor_cutoff)

    def __reduce__(self) -> tuple[Any, ...]:
        # A structure taken out of a batch is a view of all the batch's memory, which pickle would write in full.
        return AtomicData.trusted, ({k: compact(v) for k, v in self._fields.items()}, dict(self.levels), self.neighbor_cutoff)

    # -- other libraries' objects ------------------------------------------------------------------------------------

    @classmethod
    def from_atoms(cls, atoms: ase.Atoms, *, dtype: torch.dtype = torch.float64, **kwargs: Any) -> AtomicData:
        """Read an `ase.Atoms`; see `nvalchemi.data.ase_io.from_atoms`."""
        from nvalchemi.data.ase_io import from_atoms

        return from_atoms(atoms, dtype=dtype, **kwargs)

    def to_atoms(self) -> ase.Atoms:
        """Make an `ase.Atoms`; see `nvalchemi.data.ase_io.to_atoms`."""
        from nvalchemi.data.ase_io import to_atoms

        return to_atoms(self)

    @classmethod
    def from_structure(cls, structure: Any, *, dtype: torch.dtype = torch.float64) -> AtomicData:
        """Read a pymatgen ``Structure`` or ``Molecule``; see `nvalchemi.data.ase_io.from_structure`."""
        from nvalchemi.data.ase_io import from_structure

        return from_structure(structure, dtype=dtype)


_set = object.__setattr__
_KEYWORDS = frozenset(
    ["positions", "atomic_numbers", "cell", "pbc", "energy", "forces", "stress", "charge", "edge_index", "edge_shift"]
)


def compact(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of it where it is a part of a larger memory."""
    if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def _add_cell(fields: dict[str, Tensor], cell: Any, pbc: Any) -> bool:
    x = fields["positions"]
    if cell is not None:
        fields["cell"] = checks.check_field("cell", cell, Level.SYSTEM, x, None)
    if pbc is None:
        flags = torch.ones(3, dtype=torch.bool, device=x.device)
    elif isinstance(pbc, (bool, np.bool_)):
        flags = torch.full((3,), bool(pbc), device=x.device)
    else:
        flags = checks.check_field("pbc", pbc, Level.SYSTEM, x, None)
    fields["pbc"] = flags
    if cell is None:
        if flags.any():
            raise DataError(
                "pbc is True without a cell",
                found=f"pbc {flags.tolist()}",
                needed="cell (3, 3) in Å",
                fix="give cell, or leave pbc out",
            )
        return False
    checks.check_cell(fields["cell"], flags, x.shape[0])
    return bool(flags.any())


def _add_edges(fields: dict[str, Tensor], edge_index: Any, edge_shift: Any, cutoff: Any, periodic: bool) -> int:
    if edge_index is None or cutoff is None:
        missing, given = (
            ("edge_index", "edge_shift or neighbor_cutoff") if edge_index is None else ("neighbor_cutoff", "edge_index")
        )
        raise DataError(
            f"{given} is given without {missing}", fix="give both, or use nvalchemi.data.neighbors.neighbor_list_data"
        )
    if isinstance(cutoff, bool) or not isinstance(cutoff, (int, float)) or not (math.isfinite(cutoff) and cutoff > 0):
        raise DataError("neighbor_cutoff is no length", found=repr(cutoff), needed="a positive number of Å")
    x = fields["positions"]
    edges = fields["edge_index"] = checks.check_field("edge_index", edge_index, Level.EDGE, x, 0)
    if edge_shift is not None:
        if "cell" not in fields:
            raise DataError("edge_shift is given without a cell", fix="leave edge_shift out for a molecule, or give cell and pbc")
        fields["edge_shift"] = checks.check_field("edge_shift", edge_shift, Level.EDGE, x, edges.shape[1])
    checks.check_edges(edges, fields.get("edge_shift"), x.shape[0], periodic)
    return edges.shape[1]
