"""Random structures for the tests of this folder."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch

OPTIONAL = ("cell", "energy", "forces", "stress", "charge", "dipole", "masses", "tag", "spin")


def structure(seed: int, n: int, fields: frozenset[str] = frozenset(), dtype: torch.dtype = torch.float64) -> AtomicData:
    """A structure of ``n`` atoms with the optional fields named; ``tag`` (int, system) and ``spin`` (n, 2) are not known ones."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.tensor(rng.normal(size=shape), dtype=dtype)

    # A jittered grid, so that no two atoms are closer than a real pair.
    grid = np.stack(np.unravel_index(rng.permutation(64)[:n], (4, 4, 4)), axis=1) * 1.5
    known = {
        "cell": torch.tensor(np.eye(3) * 6 + rng.uniform(-1, 1, (3, 3)), dtype=dtype),
        "energy": torch.tensor(rng.normal() * 1e4, dtype=torch.float64),
        "forces": floats(n, 3),
        "stress": floats(3, 3),
        "charge": floats(),
    }
    kwargs = {name: known[name] for name in known if name in fields}
    if "cell" in fields:
        kwargs["pbc"] = torch.tensor(rng.integers(0, 2, 3).astype(bool))
    system = {"dipole": floats(3), "tag": torch.tensor(int(rng.integers(100)))}
    atom = {"masses": floats(n).abs(), "spin": floats(n, 2)}
    return AtomicData(
        torch.tensor(grid + rng.uniform(-0.2, 0.2, (n, 3)), dtype=dtype),
        torch.tensor(rng.integers(1, 119, n)),
        **kwargs,
        system={k: v for k, v in system.items() if k in fields},
        atom={k: v for k, v in atom.items() if k in fields},
    )


field_sets = st.sets(st.sampled_from(OPTIONAL)).map(frozenset)


@st.composite
def structures(draw: st.DrawFn, min_size: int = 1, max_size: int = 6, alike: bool = False) -> list[AtomicData]:
    """Lists of structures; with ``alike`` all have the same fields."""
    size = draw(st.integers(min_size, max_size))
    fields = draw(field_sets)
    return [
        structure(draw(st.integers(0, 2**31)), draw(st.integers(1, 9)), fields if alike else draw(field_sets))
        for _ in range(size)
    ]


def same(a: AtomicData, b: AtomicData) -> bool:
    """Whether two structures have the same fields with the same bits."""
    return (
        set(a.field_names) == set(b.field_names)
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) and a.levels[k] == b.levels[k] for k in a.field_names)
        and a.neighbor_cutoff == b.neighbor_cutoff
    )


def same_batch(a: Batch, b: Batch) -> bool:
    """Whether two batches hold the same, NaN being equal to NaN."""
    return (
        set(a.fields) == set(b.fields)
        and set(a.present) == set(b.present)
        and all(torch.equal(a.present[k], b.present[k]) for k in a.present)
        and torch.equal(a.atom_offsets, b.atom_offsets)
        and all(
            torch.allclose(a[k], b[k], rtol=0, atol=0, equal_nan=True) if a[k].is_floating_point() else torch.equal(a[k], b[k])
            for k in a.fields
        )
    )
