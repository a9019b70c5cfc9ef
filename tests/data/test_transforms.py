from __future__ import annotations

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.neighbors import neighbor_list, neighbor_list_data
from nvalchemi.data.transforms import NeighborList, Transform, apply, is_deterministic
from nvalchemi.errors import DataError
from tests.data.random_structures import same, same_batch, structure


class Rattle(Transform):
    def __call__(self, data: AtomicData, generator: torch.Generator) -> AtomicData:
        noise = torch.randn(data.positions.shape, generator=generator, dtype=data.dtype)
        return data.replace(positions=data.positions + 0.01 * noise)


def doubled(data: AtomicData) -> AtomicData:
    return data.replace(positions=data.positions * 2)


def test_neighbor_list_works_on_structures_and_batches():
    transform, data = NeighborList(4.0), structure(0, 6)
    assert same(transform(data), neighbor_list_data(data, 4.0))
    batch = Batch.from_data_list([data, structure(1, 3)])
    assert same_batch(transform(batch), neighbor_list(batch, 4.0))
    assert same(apply(transform, data, torch.Generator()), transform(data))
    assert is_deterministic(transform) and repr(transform) == "NeighborList(4.0)"


def test_randomness_comes_from_the_generator_alone():
    data = structure(0, 6)
    a = apply(Rattle(), data, torch.Generator().manual_seed(5))
    torch.manual_seed(99)
    b = apply(Rattle(), data, torch.Generator().manual_seed(5))
    c = apply(Rattle(), data, torch.Generator().manual_seed(6))
    assert same(a, b) and not same(a, c) and not is_deterministic(Rattle())


def test_plain_functions_are_transforms():
    data = structure(0, 6)
    assert torch.equal(apply(doubled, data, torch.Generator()).positions, data.positions * 2)
    assert not is_deterministic(doubled)


def test_a_transform_must_give_a_structure_back():
    with pytest.raises(DataError, match=r"forgot_to_return gave no structure; found: NoneType"):

        def forgot_to_return(data: AtomicData) -> None:
            data.clone()

        apply(forgot_to_return, structure(0, 2), torch.Generator())
