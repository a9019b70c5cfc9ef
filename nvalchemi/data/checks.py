"""The checks at the door of `AtomicData`: what comes in is right, or a `DataError` says what is wrong and what to do.

They run for every structure that is made, so they are written for small arrays: NumPy views and plain numbers, no more
than one pass over the positions, and the slow look only where the quick one found something odd.
"""

from __future__ import annotations

import keyword
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvalchemi.data.fields import FIELDS, Level
from nvalchemi.errors import DataError

CLOSEST = 0.2
"""Å. No two nuclei of a molecule or crystal are nearer: H2 is 0.74. In nanometres every bond to C, N, O or H is below it."""
FARTHEST = 50.0
"""Å. When every atom of a structure is farther than this from all others, the unit is not Å (a bond in pm is over 70)."""
SHORTEST_VECTOR = 0.5
"""Å. No lattice repeats at a shorter distance: a chain of carbon repeats at 1.3."""
SMALLEST_VOLUME = 0.3
"""Å³ an atom. Hydrogen at the pressure of the sun's core has about this."""

_FLOATS = (torch.float32, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Tensors as they are, arrays copied with their dtype, lists and numbers as ``dtype`` (torch's choice if None)."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        dtype = None
    try:
        if hasattr(value, "__array__") or (isinstance(value, (list, tuple)) and value and hasattr(value[0], "__array__")):
            value = np.asarray(value)
            if value.dtype.kind not in "fiub":
                raise TypeError(f"its dtype is {value.dtype}")
            if not value.dtype.isnative:
                value = value.astype(value.dtype.newbyteorder("="))
        return torch.tensor(value, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"{name} cannot be made a tensor ({error})",
            found=f"{type(value).__name__}: {_short(value)}",
            needed="a tensor, an array, or lists of numbers of equal length",
        ) from None


def check_positions(value: Any) -> Tensor:
    """Positions (n, 3) in Å: float32 or float64, finite, n at least 1."""
    listed = not isinstance(value, (Tensor, np.ndarray))
    positions = as_tensor("positions", value, torch.get_default_dtype() if listed else None)
    if positions.dtype not in _FLOATS:
        whole = not positions.dtype.is_floating_point
        raise DataError(
            "positions have the wrong dtype",
            found=positions.dtype,
            needed="torch.float32 or torch.float64, in Å",
            fix="convert before anything is rounded; whole numbers as coordinates usually mean that something was"
            if whole
            else None,
        )
    if positions.dim() != 2 or positions.shape[1] != 3 or positions.shape[0] == 0:
        raise DataError(
            "positions have the wrong shape", found=tuple(positions.shape), needed="(n, 3), one row an atom, at least one atom"
        )
    if not math.isfinite(positions.detach().sum().item()):
        rows = (~torch.isfinite(positions.detach()).all(dim=1)).nonzero().flatten().tolist()
        raise DataError(
            f"positions are not finite in {len(rows)} of {positions.shape[0]} atoms"
            if rows
            else "positions overflow when added up",
            found=f"NaN or infinity at atoms {_short(rows)}" if rows else f"values up to {positions.abs().max().item():.3g}",
            needed="finite coordinates in Å",
            fix="repair or drop this structure where it is read",
        )
    return positions.contiguous()


def check_numbers(value: Any, n: int, device: torch.device) -> Tensor:
    """Atomic numbers (n,) as int64, each between 1 and 118."""
    numbers = as_tensor("atomic_numbers", value)
    if numbers.dtype not in _INTS:
        raise DataError(
            "atomic_numbers have the wrong dtype",
            found=numbers.dtype,
            needed="integers, 1 (H) to 118 (Og)",
            fix="turn symbols into numbers with ase.data.atomic_numbers, or use AtomicData.from_atoms",
        )
    if numbers.shape != (n,):
        raise DataError(
            "atomic_numbers do not fit the positions",
            found=f"shape {tuple(numbers.shape)}",
            needed=f"({n},), one for each position",
        )
    check_device("atomic_numbers", numbers, device)
    if numbers.dtype != torch.int64:
        numbers = numbers.long()
    low, high = torch.aminmax(numbers)
    if low.item() < 1 or high.item() > 118:
        bad = sorted({z for z in numbers.tolist() if not 1 <= z <= 118})
        raise DataError(
            "atomic_numbers name unknown elements",
            found=_short(bad),
            needed="1 (H) to 118 (Og)",
            fix="0 is often a ghost or padding atom: drop those rows; species indices must be mapped back to atomic numbers",
        )
    return numbers.contiguous()


def check_field(name: str, value: Any, level: Level, positions: Tensor, n_edges: int | None) -> Tensor:
    """A further field: kind, shape, dtype, device, number of rows, no infinity. NaN in a label means "not labelled"."""
    spec, dtype = FIELDS.get(name), positions.dtype
    if spec is None:
        tensor = as_tensor(name, value)
        if not isinstance(value, (Tensor, np.ndarray)) and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if tensor.is_complex():
            raise DataError(
                f"{name} is complex", found=tensor.dtype, needed="real numbers", fix="give two fields, real and imaginary"
            )
    elif spec.kind == "bool":
        tensor = as_tensor(name, value)
        if tensor.dtype != torch.bool:
            raise DataError(f"{name} has the wrong dtype", found=tensor.dtype, needed="booleans")
    elif spec.kind == "int64":
        tensor = as_tensor(name, value)
        if tensor.dtype not in _INTS and tensor.numel():
            raise DataError(f"{name} has the wrong dtype", found=tensor.dtype, needed="integers")
        tensor = tensor.long()
    else:
        listed = not isinstance(value, (Tensor, np.ndarray))
        tensor = as_tensor(name, value, (torch.float64 if spec.kind == "float64" else dtype) if listed else None)
        if name == "charge" and tensor.dtype in _INTS:
            tensor = tensor.to(dtype)
        if not tensor.is_floating_point():
            raise DataError(f"{name} has the wrong dtype", found=tensor.dtype, needed=f"floats in {spec.unit or 'whole cells'}")
        if spec.kind == "float64":
            tensor = tensor.double()
    if tensor.is_floating_point() and tensor.dtype != dtype and not (spec is not None and spec.kind == "float64"):
        raise DataError(
            f"{name} and positions differ in dtype",
            found=f"{tensor.dtype} and {dtype}",
            needed="one floating dtype in a structure (energy alone is always float64)",
            fix=f"convert one of them, for example {name}.to({dtype})",
        )
    if tensor.device != positions.device:
        check_device(name, tensor, positions.device)
    tensor = _check_shape(name, tensor, level, positions.shape[0], n_edges)
    if tensor.is_floating_point():
        _check_infinite(name, tensor)
    return tensor.contiguous()


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """All tensors of a structure lie on one device."""
    if tensor.device != device:
        raise DataError(
            f"{name} and positions lie on different devices",
            found=f"{tensor.device} and {device}",
            needed="one device",
            fix="make the structure on the CPU and move it with .to(device)",
        )


def check_name(name: str, level: Level, reserved: frozenset[str]) -> None:
    """A field's name can be an attribute, means nothing else here, and stands under its own level."""
    if not name.isidentifier() or name.startswith("_") or keyword.iskeyword(name):
        raise DataError(
            "a field's name must be usable as an attribute", found=repr(name), needed="letters, digits and _, not starting with _"
        )
    if name in reserved:
        raise DataError(f"the name {name!r} has another meaning here", fix="choose another name for this field")
    spec = FIELDS.get(name)
    if spec is not None and spec.level != level:
        raise DataError(f"{name} stands under the wrong level", found=level.value, needed=spec.level.value)


def _check_shape(name: str, tensor: Tensor, level: Level, n: int, n_edges: int | None) -> Tensor:
    spec, shape = FIELDS.get(name), tuple(tensor.shape)
    if level == Level.SYSTEM:
        if spec is None or shape == spec.shape:
            return tensor
        if spec.shape == () and shape == (1,):
            return tensor.reshape(())
        fixes = {
            "stress": "give the full tensor: ase.stress.voigt_6_to_full_3x3_stress(s) for the order xx yy zz yz xz xy, "
            "s.reshape(3, 3) for nine numbers",
            "cell": "give three lattice vectors as rows: ase.cell.Cell.new(c).array for lengths or lengths and angles",
        }
        raise DataError(f"{name} has the wrong shape", found=shape, needed=spec.shape, fix=fixes.get(name))
    if level == Level.EDGE and n_edges is None:
        raise DataError(f"{name} belongs to edges, and there is no edge_index", fix="give edge_index and neighbor_cutoff too")
    rows = n if level == Level.ATOM else (n_edges or 0)
    of = "atoms" if level == Level.ATOM else "edges"
    row = None if spec is None else spec.shape
    wrong = len(shape) == 0 or shape[0] != rows or (row is not None and shape[1:] != row)
    if name == "edge_index":
        wrong = len(shape) != 2 or shape[0] != 2
    if wrong:
        needed = f"({rows}, ...)" if row is None else str((rows, *row))
        raise DataError(
            f"{name} does not fit the {rows} {of}",
            found=f"shape {shape}",
            needed="(2, edges)" if name == "edge_index" else needed,
        )
    return tensor


def _check_infinite(name: str, tensor: Tensor) -> None:
    total = tensor.detach().sum().item()
    if math.isfinite(total):
        return
    if torch.isinf(tensor.detach()).any():
        raise DataError(f"{name} holds an infinity", needed="finite numbers, or NaN where there is no label")
    if name in ("cell", "edge_shift", "masses") and torch.isnan(tensor.detach()).any():
        raise DataError(f"{name} holds NaN", needed="finite numbers", fix="leave the field out where there is none")


def check_cell(cell: Tensor, pbc: Tensor, n: int) -> None:
    """The lattice vectors of the periodic directions are independent, and of a size that atoms allow."""
    rows = cell.detach().tolist()
    periodic = [v for v, p in zip(rows, pbc.tolist(), strict=True) if p]
    if not periodic:
        return
    lengths = [math.hypot(*v) for v in periodic]
    shortest = min(lengths)
    if len(periodic) == 3:
        a, b, c = periodic
        size = abs(_dot(a, _cross(b, c)))
    elif len(periodic) == 2:
        size = math.hypot(*_cross(*periodic))
    else:
        size = shortest
    if shortest == 0.0 or size < 1e-6 * math.prod(lengths):
        raise DataError(
            "pbc is True along lattice vectors that span nothing",
            found=f"cell {_short(rows)}, pbc {pbc.tolist()}",
            needed="independent lattice vectors (rows of cell) in every periodic direction",
            fix="leave cell and pbc out for a molecule, or set pbc False in the directions without a vector",
        )
    if shortest < SHORTEST_VECTOR or (len(periodic) == 3 and size < SMALLEST_VOLUME * n):
        raise DataError(
            "the cell is too small for its atoms",
            found=f"shortest periodic vector {shortest:.3g} Å" + (f", {size / n:.3g} Å³ an atom" if len(periodic) == 3 else ""),
            needed=f"vectors over {SHORTEST_VECTOR} Å and {SMALLEST_VOLUME} Å³ an atom",
            fix="lengths are in Å: multiply by 10 if these are nanometres; multiply fractional coordinates by the cell",
        )


def check_distances(positions: Tensor, periodic: bool) -> None:
    """Refuse structures whose every atom is impossibly near to, or far from, its nearest neighbour: a wrong unit.

    One atom with a sensible nearest distance clears the structure, and that is nearly always the first one.
    """
    n = positions.shape[0]
    if n < 2:
        return
    points = positions.detach().numpy() if positions.device.type == "cpu" else positions.detach().cpu().numpy()
    # Two atoms alone may be a scan of a repulsive wall: only nonsense is refused there.
    closest = CLOSEST if n > 2 else 0.1
    farthest = math.inf if periodic or n == 2 else FARTHEST
    lowest, highest = math.inf, 0.0
    for i in range(min(n, 500)):  # as many as that are no accident
        d = points - points[i]
        d2 = np.einsum("ij,ij->i", d, d)
        d2[i] = np.inf
        nearest = math.sqrt(d2.min())
        if closest <= nearest <= farthest:
            return
        lowest, highest = min(lowest, nearest), max(highest, nearest)
        if lowest < closest and highest > farthest:
            return
    near = highest < closest
    raise DataError(
        f"every atom is {'nearer' if near else 'farther'} than {closest if near else farthest} Å {'to' if near else 'from'} its nearest neighbour",
        found=f"nearest distances {lowest:.3g} to {highest:.3g}",
        needed="positions in Å, where bonds are 0.7 to 3.5",
        fix="convert the unit (1 nm = 10 Å, 1 pm = 0.01 Å, 1 bohr = 0.529177 Å) or fractional coordinates (positions @ cell)",
    )


def check_edges(edge_index: Tensor, edge_shift: Tensor | None, n: int, periodic: bool) -> None:
    """Edges join atoms that exist, are sorted by their centre (row 1), and have whole-numbered shifts where needed."""
    if edge_index.shape[1]:
        low, high = (x.item() for x in torch.aminmax(edge_index))
        if low < 0 or high >= n:
            raise DataError("edge_index names atoms that do not exist", found=f"{low} to {high}", needed=f"0 to {n - 1}")
        if (edge_index[1].diff() < 0).any():
            raise DataError(
                "edges are not sorted by their centre, row 1 of edge_index",
                fix="order = edge_index[1].argsort(stable=True); apply it to the columns of edge_index and the rows of other edge fields",
            )
    if edge_shift is None:
        if periodic:
            raise DataError(
                "a periodic structure has edge_index without edge_shift", fix="give edge_shift too, zeros where it is due"
            )
    elif not torch.equal(edge_shift.detach(), edge_shift.detach().round()):
        raise DataError(
            "edge_shift holds fractions",
            needed="whole multiples of the lattice vectors",
            fix="give S, not S @ cell, of the neighbour list",
        )


def _dot(a: list[float], b: list[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _cross(a: list[float], b: list[float]) -> list[float]:
    return [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
