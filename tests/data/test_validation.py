from __future__ import annotations

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.errors import DataError
from tests.data.random_structures import OPTIONAL, structure


def batch() -> Batch:
    data = [structure(0, 4, frozenset(OPTIONAL)), structure(1, 3, frozenset({"energy"}))]
    return neighbor_list(Batch.from_data_list(data), 3.0)


def with_row(tensor: torch.Tensor, row: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


def test_a_good_batch_passes():
    batch().validate()
    batch().cast(torch.float32).validate()


BAD = {
    "no positions": (lambda b: b.fields.pop("positions"), "needs positions"),
    "negative count": (lambda b: b.atom_offsets.copy_(torch.tensor([0, 8, 7])), "least count -1"),
    "empty structure": (lambda b: b.atom_offsets.copy_(torch.tensor([0, 7, 7])), "counts of at least 1"),
    "atoms left over": (lambda b: b.atom_offsets.copy_(torch.tensor([0, 4, 6])), "from 0 to 7"),
    "int32 offsets": (lambda b: setattr(b, "atom_offsets", b.atom_offsets.int()), "int64"),
    "edges left over": (lambda b: b.edge_offsets.mul_(2), "edge_offsets does not divide"),
    "short field": (lambda b: b.fields.update(energy=b.energy[:1]), "energy has the wrong shape.*2 rows"),
    "wide field": (lambda b: b.fields.update(forces=torch.zeros(7, 4).double()), "forces has the wrong shape"),
    "unknown level": (lambda b: b.fields.update(extra=torch.zeros(2)), "extra has no level"),
    "float32 energy": (lambda b: b.fields.update(energy=b.energy.float()), "energy has the wrong dtype"),
    "float32 custom": (lambda b: b.fields.update(spin=b.spin.float()), "spin has the wrong dtype"),
    "other device": (lambda b: b.fields.update(energy=b.energy.to("meta")), "another device"),
    "bad mask": (lambda b: b.present.update(energy=torch.ones(3, dtype=torch.bool)), "mask of energy"),
    "NaN position": (lambda b: b.fields.update(positions=with_row(b.positions, 5, torch.nan)), "not finite; found: structure 1"),
    "ghost": (lambda b: b.fields.update(atomic_numbers=with_row(b.atomic_numbers, 1, 0)), "unknown elements; found: structure 0"),
    "crossing edge": (lambda b: b.edge_index[0, 0:1].fill_(6), "leaves its structure"),
    "edge to nowhere": (lambda b: b.edge_index[0, 0:1].fill_(7), "do not exist"),
    "edges unsorted": (lambda b: b.edge_index[1, 0:1].fill_(3), "not sorted"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_batch_is_named(case):
    damage, said = BAD[case]
    b = batch()
    damage(b)
    with pytest.raises(DataError, match=said):
        b.validate()
