from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch, Level
from nvalchemi.data.neighbors import neighbor_list_data
from nvalchemi.errors import DataError
from tests.data.random_structures import OPTIONAL, same, same_batch, structure, structures

quick = settings(max_examples=40, deadline=None)


@quick
@given(structures())
def test_round_trip(data):
    batch = Batch.from_data_list(data).validate()
    back = batch.to_data_list()
    assert len(back) == len(batch) == batch.num_graphs == len(data)
    assert all(same(a, b) for a, b in zip(data, back, strict=True))
    assert all(same(batch[i], d) and same(batch[i - len(data)], d) for i, d in enumerate(data))
    assert all(t.is_contiguous() for t in batch.fields.values())


@quick
@given(structures(), st.data())
def test_index_select(data, draw):
    batch = Batch.from_data_list(data)
    batch.sample_index = torch.arange(len(data)) * 10
    index = draw.draw(st.lists(st.integers(-len(data), len(data) - 1), max_size=8))
    chosen = batch.index_select(index)
    assert all(same(a, data[i]) for a, i in zip(chosen.to_data_list(), index, strict=True))
    assert chosen.sample_index.tolist() == [batch.sample_index[i].item() for i in index]
    assert all(len(mask) == len(index) for mask in chosen.present.values())
    assert len(chosen) == len(index)
    mask = torch.tensor(draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data))))
    assert same_batch(batch.index_select(mask), batch.index_select(mask.nonzero().flatten()))
    assert same_batch(batch.index_select(slice(None, None, 2)), batch.index_select(range(0, len(data), 2)))


@quick
@given(structures(min_size=2), st.randoms(use_true_random=False))
def test_order_of_structures_does_not_matter(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    assert same_batch(Batch.from_data_list([data[i] for i in order]), Batch.from_data_list(data).index_select(order))


@quick
@given(structures(max_size=4, alike=True), st.floats(1.0, 4.0))
def test_edges_round_trip(data, cutoff):
    data = [neighbor_list_data(d, cutoff) for d in data]
    batch = Batch.from_data_list(data).validate()
    assert batch.neighbor_cutoff == cutoff and batch.num_edges == sum(d.num_edges for d in data)
    assert batch.num_edges_per_graph.tolist() == [d.num_edges for d in data]
    assert all(same(a, b) for a, b in zip(data, batch.to_data_list(), strict=True))
    assert all(same(batch[i], d) for i, d in enumerate(data))
    index = [len(data) - 1, 0, 0]
    chosen = batch.index_select(index).validate()
    assert all(same(a, data[i]) for a, i in zip(chosen.to_data_list(), index, strict=True))


def test_cell_on_some_structures_only():
    molecule, crystal = structure(0, 3, frozenset({"energy"})), structure(1, 4, frozenset({"cell", "stress"}))
    for order in ([molecule, crystal], [crystal, molecule]):
        batch = Batch.from_data_list(order)
        i = order.index(molecule)
        assert batch.present["cell"].tolist() == [d is crystal for d in order]
        assert (batch.cell[i] == 0).all() and not batch.pbc[i].any()
        assert torch.equal(batch.cell[1 - i], crystal.cell)
        assert batch.stress[i].isnan().all() and batch.energy[1 - i].isnan()
        assert batch.has("energy").tolist() == [d is molecule for d in order]
        assert batch.has("positions").all() and not batch.has("forces").any()
        assert batch.to_data_list()[i].cell is None


def test_reading():
    data = [structure(s, n, frozenset({"energy", "tag"})) for s, n in enumerate((2, 1, 4))]
    batch = Batch.from_data_list(data)
    assert batch.batch_idx.tolist() == [0, 0, 1, 2, 2, 2, 2] and batch.batch_idx is batch.batch_idx
    assert (
        batch.num_nodes == 7 and batch.num_nodes_per_graph.tolist() == [2, 1, 4] and batch.atom_offsets.tolist() == [0, 2, 3, 7]
    )
    assert batch.num_edges == 0 and batch.num_edges_per_graph.tolist() == [0, 0, 0]
    assert batch["energy"] is batch.energy and "energy" in batch and "stress" not in batch
    assert batch.present == {} and batch.levels["tag"] == Level.SYSTEM and batch.neighbor_cutoff is None
    assert [d.num_atoms for d in batch] == [2, 1, 4]
    assert "3 structures, 7 atoms" in repr(batch)
    with pytest.raises(AttributeError, match=r"no field 'stress' in this batch; there are positions, .*tag"):
        _ = batch.stress
    with pytest.raises(KeyError, match="no field"):
        _ = batch["stress"]
    for bad in (3, -4):
        with pytest.raises(IndexError, match="batch of 3"):
            _ = batch[bad]
        with pytest.raises(IndexError, match="batch of 3"):
            batch.index_select([0, bad])
    with pytest.raises(DataError, match="mask does not fit"):
        batch.index_select(torch.tensor([True]))
    with pytest.raises(DataError, match="whole numbers"):
        batch.index_select([0.5])
    assert batch.describe(1) == "structure 1 of the batch"
    batch.sample_index, batch.dataset_index, batch.dataset_names = (
        torch.tensor([5, 6, 7]),
        torch.tensor([0, 1, 1]),
        ("a.zarr", "b.zarr"),
    )
    assert batch.describe(1) == "sample 6 of b.zarr"
    assert batch.index_select([2]).describe(0) == "sample 7 of b.zarr"


def test_what_does_not_fit_together_is_named():
    a, b = structure(0, 3, frozenset({"spin"})), structure(1, 3, frozenset({"spin"}))
    with pytest.raises(DataError, match="at least one structure"):
        Batch.from_data_list([])
    with pytest.raises(DataError, match="made of AtomicData; found: AtomicData, dict"):
        Batch.from_data_list([a, {"positions": b.positions}])
    with pytest.raises(DataError, match=r"positions has different dtypes .* torch.float32 in structure 1"):
        Batch.from_data_list([a, b.to(torch.float32)])
    with pytest.raises(DataError, match=r"spin has different shapes of a row .*\(2,\), and \(5,\) in structure 1"):
        Batch.from_data_list([a, b.replace(spin=torch.zeros(3, 5).double())])
    with pytest.raises(DataError, match="'spin' has different levels"):
        Batch.from_data_list([a, AtomicData(b.positions, b.atomic_numbers, system={"spin": torch.zeros(2).double()})])
    with pytest.raises(DataError, match=r"tag has different shapes .*\(\), and \(2,\)"):
        Batch.from_data_list([a.replace(tag=t, levels={"tag": Level.SYSTEM}) for t in (torch.tensor(1), torch.tensor([1, 2]))])
    with pytest.raises(DataError, match="only some structures of a batch have edges"):
        Batch.from_data_list([neighbor_list_data(a, 3.0), b])
    with pytest.raises(DataError, match="different cutoffs"):
        Batch.from_data_list([neighbor_list_data(a, 3.0), neighbor_list_data(b, 4.0)])


def test_partial_integers_are_zero_and_marked():
    batch = Batch.from_data_list([structure(0, 2, frozenset({"tag", "spin"})), structure(1, 3)])
    assert batch.tag[1] == 0 and batch.present["tag"].tolist() == [True, False]
    assert batch.spin[2:].isnan().all() and batch.spin.shape == (5, 2)


def whole() -> Batch:
    data = [structure(s, 3 + s, frozenset(OPTIONAL if s else {"energy"})) for s in range(3)]
    batch = Batch.from_data_list([neighbor_list_data(d, 3.0) for d in data])
    batch.sample_index, batch.dataset_index, batch.dataset_names = torch.arange(3), torch.zeros(3, dtype=torch.int64), ("a",)
    _ = batch.batch_idx
    return batch


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    out = {**batch.fields, **{f"present of {k}": v for k, v in batch.present.items()}}
    for name in ("atom_offsets", "edge_offsets", "sample_index", "dataset_index", "_batch_idx"):
        out[name] = getattr(batch, name)
    return out


def test_every_tensor_moves():
    batch = whole()
    assert {t.device.type for t in tensors(batch.to("meta")).values()} == {"meta"}
    assert not {t.data_ptr() for t in tensors(batch.clone()).values()} & {t.data_ptr() for t in tensors(batch).values()}
    assert same_batch(batch.clone(), batch)
    pinned = batch.pin_memory()
    assert pinned is batch if not torch.accelerator.is_available() else all(t.is_pinned() for t in tensors(pinned).values())


def test_cast_keeps_the_energy():
    batch = whole().cast(torch.float32)
    floats = {name: t.dtype for name, t in batch.fields.items() if t.is_floating_point()}
    assert floats.pop("energy") == torch.float64 and set(floats.values()) == {torch.float32}
    batch.validate()


def test_pickle():
    batch = whole()
    back = pickle.loads(pickle.dumps(batch))
    assert (
        same_batch(back, batch)
        and back.neighbor_cutoff == 3.0
        and back.dataset_names == ("a",)
        and back.sample_index.tolist() == [0, 1, 2]
    )
    big = Batch.from_data_list([structure(s, 9) for s in range(200)])
    slim = Batch({k: v[:9] for k, v in big.fields.items()}, big.levels, big.atom_offsets[:2])
    assert len(pickle.dumps(slim)) < len(pickle.dumps(big)) / 10


def test_replace():
    batch = whole()
    moved = batch.replace(positions=batch.positions + 1)
    assert moved.num_edges == batch.num_edges and moved.neighbor_cutoff == 3.0 and moved.batch_idx is batch.batch_idx
    assert torch.equal(moved.present["cell"], batch.present["cell"])
    assert "forces" not in batch.replace(forces=None) and "forces" not in batch.replace(forces=None).present
    bare = batch.replace(edge_index=None)
    assert bare.num_edges == 0 and "edge_shift" not in bare and bare.neighbor_cutoff is None and bare.edge_offsets is None
    bare.validate()
    named = batch.replace(
        score=torch.zeros(3), levels={"score": Level.SYSTEM}, present={"score": torch.tensor([True, False, True])}
    )
    assert named.has("score").tolist() == [True, False, True]
    with pytest.raises(DataError, match="level of the new field"):
        batch.replace(score=torch.zeros(3))
    with pytest.raises(DataError, match=r"forces does not fit .*12 rows, one for each atom"):
        batch.replace(forces=torch.zeros(3, 3))
    with pytest.raises(DataError, match="edge_offsets and neighbor_cutoff"):
        batch.replace(edge_index=torch.zeros(2, 0, dtype=torch.int64))


def test_gradients_pass_through():
    data = [structure(s, 3) for s in range(2)]
    x = [d.positions.requires_grad_() for d in data]
    Batch.from_data_list(data).index_select([1, 1]).positions.sum().backward()
    assert x[0].grad.abs().sum() == 0 and (x[1].grad == 2).all()


def test_speed():
    """Bounds of many times what it takes (0.11 ms and 0.15 ms), so that only a change of kind is seen here."""
    from time import perf_counter

    data = [
        structure(s, int(n), frozenset({"energy", "forces"})) for s, n in enumerate(np.random.default_rng(0).integers(5, 61, 64))
    ]
    batch = Batch.from_data_list(data)
    for action, bound in (
        (lambda: Batch.from_data_list(data), 3e-3),
        (batch.to_data_list, 5e-3),
        (lambda: batch.index_select(range(63, -1, -1)), 3e-3),
    ):
        times = []
        for _ in range(20):
            start = perf_counter()
            action()
            times.append(perf_counter() - start)
        assert min(times) < bound
