"""Batches with labels for the tests of losses."""

from __future__ import annotations

import torch

from nvalchemi.data import AtomicData, Batch

SIZES = (3, 1, 5, 2)


def make_batch(sizes=SIZES, *, seed=0, lacking=None, dtype=torch.float64) -> Batch:
    """Structures of these sizes with random labels; ``lacking`` maps a label to the structures that do not have it."""
    g = torch.Generator().manual_seed(seed)
    lacking = lacking or {}
    data = []
    for i, n in enumerate(sizes):
        labels = {
            "energy": torch.randn((), generator=g, dtype=torch.float64),
            "forces": torch.randn(n, 3, generator=g, dtype=dtype),
            "stress": torch.randn(3, 3, generator=g, dtype=dtype),
        }
        labels = {k: v for k, v in labels.items() if i not in lacking.get(k, ())}
        positions = torch.randn(n, 3, generator=g, dtype=dtype)
        data.append(
            AtomicData(positions, torch.ones(n, dtype=torch.int64), cell=4 * torch.eye(3, dtype=dtype), pbc=[True] * 3, **labels)
        )
    return Batch.from_data_list(data)


def make_predictions(batch: Batch, *, seed=1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    n, b, dtype = batch.num_nodes, batch.num_graphs, batch.positions.dtype
    return {
        "energy": torch.randn(b, generator=g, dtype=torch.float64).requires_grad_(),
        "forces": torch.randn(n, 3, generator=g, dtype=dtype).requires_grad_(),
        "stress": torch.randn(b, 3, 3, generator=g, dtype=dtype).requires_grad_(),
    }


def rows_of(batch: Batch, chosen: list[int], predictions: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The predictions of the chosen structures."""
    atoms = torch.cat([torch.nonzero(batch.batch_idx == i).flatten() for i in chosen])
    idx = torch.tensor(chosen)
    return {"energy": predictions["energy"][idx], "forces": predictions["forces"][atoms], "stress": predictions["stress"][idx]}
