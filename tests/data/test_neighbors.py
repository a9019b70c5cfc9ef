from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import neighbor_list as ase_neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.neighbors import ALL_PAIRS, neighbor_list, neighbor_list_data
from nvalchemi.errors import DataError
from tests.data.random_structures import same, same_batch, structure, structures

quick = settings(max_examples=60, deadline=None)


def edges_of(data: AtomicData) -> list[tuple[int, int, tuple[int, ...]]]:
    shift = torch.zeros(data.num_edges, 3) if data.edge_shift is None else data.edge_shift
    return sorted(zip(data.edge_index[1].tolist(), data.edge_index[0].tolist(), map(tuple, shift.long().tolist()), strict=True))


def ase_edges(atoms: Atoms, cutoff: float) -> list[tuple[int, int, tuple[int, ...]]]:
    i, j, shift = ase_neighbor_list("ijS", atoms, cutoff)
    return sorted(zip(i.tolist(), j.tolist(), map(tuple, shift.tolist()), strict=True))


def check(atoms: Atoms, cutoff: float) -> AtomicData:
    data = neighbor_list_data(AtomicData.from_atoms(atoms), cutoff)
    assert edges_of(data) == ase_edges(atoms, cutoff)
    assert (data.edge_index[1].diff() >= 0).all()
    assert same(data.replace(), data)  # passes the checks at the door
    vectors = data.positions[data.edge_index[0]] - data.positions[data.edge_index[1]]
    if data.edge_shift is not None:
        vectors = vectors + data.edge_shift @ data.cell
    assert data.num_edges == 0 or vectors.norm(dim=1).max() < cutoff
    return data


@quick
@given(st.integers(0, 2**31), st.integers(1, 8), st.tuples(st.booleans(), st.booleans(), st.booleans()), st.floats(1.0, 6.0))
def test_equal_to_ase_in_skewed_cells(seed, n, pbc, cutoff):
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(2.0, 8.0, 3)) @ (np.eye(3) + np.triu(rng.uniform(-0.9, 0.9, (3, 3)), 1))
    # Positions may lie outside the cell: nothing wraps them.
    atoms = Atoms(numbers=np.ones(n), positions=rng.uniform(-1, 2, (n, 3)) @ cell, cell=cell, pbc=pbc)
    check(atoms, cutoff)


@pytest.mark.parametrize("pbc", [(1, 1, 1), (1, 0, 0), (0, 1, 1), (0, 0, 1)])
def test_cells_thinner_than_the_cutoff(pbc):
    cell = np.array([[1.5, 0.0, 0.0], [0.7, 2.0, 0.0], [-0.4, 0.5, 9.0]])
    data = check(Atoms("HHe", positions=[[0.1, 0.2, 0.3], [1.0, 0.4, 4.0]], cell=cell, pbc=pbc), 7.0)
    assert data.edge_shift.abs().max() >= (4 if pbc[0] else 1) or not pbc[1]


def test_slabs_and_wires_without_all_vectors():
    check(Atoms("CO", positions=[[0, 0, 0], [0, 0, 1.1]], cell=[3.0, 4.0, 0.0], pbc=(1, 1, 0)), 5.0)
    check(Atoms("CO", positions=[[0, 0, 0], [0, 0, 1.1]], cell=[0.0, 0.0, 2.5], pbc=(0, 0, 1)), 5.0)


def test_one_atom_sees_its_images():
    data = check(bulk("Cu"), 2.6)
    assert data.num_edges == 12 and (data.edge_index == 0).all()


def test_molecules_of_both_ways_of_searching():
    rng = np.random.default_rng(3)
    for n in (1, 2, ALL_PAIRS, ALL_PAIRS + 1):
        data = check(Atoms(numbers=np.ones(n), positions=rng.uniform(0, n ** (1 / 3) * 2, (n, 3))), 3.0)
        assert data.edge_shift is None
        assert torch.equal(torch.unique(data.edge_index, dim=1).sort().values, data.edge_index.unique(dim=1).sort().values)


@quick
@given(structures(max_size=5), st.floats(1.0, 4.0))
def test_batch_equals_structures_one_by_one(data, cutoff):
    batch = neighbor_list(Batch.from_data_list(data), cutoff).validate()
    alone = [neighbor_list_data(d, cutoff) for d in data]
    assert all(same(a, b) for a, b in zip(alone, batch.to_data_list(), strict=True))
    assert same_batch(Batch.from_data_list(alone), batch)
    assert (batch.batch_idx[batch.edge_index[0]] == batch.batch_idx[batch.edge_index[1]]).all()


def test_b19_no_edge_between_structures_in_the_same_place():
    data = structure(0, 6)
    batch = neighbor_list(Batch.from_data_list([data, data, data]), 4.0)
    alone = neighbor_list_data(data, 4.0)
    for k, one in enumerate(batch.to_data_list()):
        assert torch.equal(one.edge_index, alone.edge_index)
        low, high = batch.edge_offsets[k : k + 2]
        assert (batch.batch_idx[batch.edge_index[:, low:high]] == k).all()


def test_structures_without_edges():
    lone = AtomicData([[0.0, 0, 0]], [2])
    apart = AtomicData([[0.0, 0, 0], [0, 0, 9.0]], [2, 2])
    batch = neighbor_list(Batch.from_data_list([lone, apart]), 5.0).validate()
    assert batch.edge_index.shape == (2, 0) and batch.edge_offsets.tolist() == [0, 0, 0] and batch.neighbor_cutoff == 5.0
    assert "edge_shift" not in batch
    batch = neighbor_list(Batch.from_data_list([lone, structure(0, 20, dtype=torch.float32), lone]), 3.0).validate()
    assert batch.num_edges_per_graph[0] == batch.num_edges_per_graph[2] == 0 < batch.num_edges
    empty = neighbor_list(batch.index_select([]), 5.0)
    assert empty.num_graphs == 0 and empty.edge_index.shape == (2, 0)


def test_shifts_only_where_something_is_periodic():
    molecule = structure(0, 3)
    crystal = AtomicData.from_atoms(bulk("NaCl", "rocksalt", a=5.64))
    batch = neighbor_list(Batch.from_data_list([molecule, crystal]), 4.0)
    assert batch.has("edge_shift").tolist() == [False, True] and batch.edge_shift.dtype == batch.dtype
    assert "edge_shift" not in batch.to_data_list()[0]
    boxed = AtomicData(molecule.positions, molecule.atomic_numbers, cell=torch.eye(3).double() * 9, pbc=False)
    assert "edge_shift" not in neighbor_list_data(boxed, 4.0)


def test_new_edges_replace_old_ones():
    data = neighbor_list_data(structure(0, 6), 5.0)
    data = data.replace(bond=torch.ones(data.num_edges).double(), levels={"bond": "edge"})
    shorter = neighbor_list_data(data, 2.0)
    assert shorter.num_edges < data.num_edges and shorter.neighbor_cutoff == 2.0 and "bond" not in shorter
    again = neighbor_list(Batch.from_data_list([data]), 2.0)
    assert same(again[0], shorter)


def test_float32_and_gradients():
    data = structure(2, 6, frozenset({"cell"}), torch.float32)
    data.positions.requires_grad_()
    found = neighbor_list_data(data, 4.0)
    assert found.positions is data.positions
    assert found.edge_shift is None or found.edge_shift.dtype == torch.float32


@pytest.mark.parametrize("cutoff", [0, -1.0, float("nan"), float("inf"), True])
def test_cutoff_must_be_a_length(cutoff):
    with pytest.raises(DataError, match="positive number of Å"):
        neighbor_list_data(structure(0, 2), cutoff)


def test_positions_that_became_nan_are_refused():
    batch = Batch.from_data_list([structure(0, 3)])
    with pytest.raises(DataError, match="not finite"):
        neighbor_list(batch.replace(positions=batch.positions * float("nan")), 3.0)
