from __future__ import annotations

import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from ase.cell import Cell

from nvalchemi.data import AtomicData, Batch, Level
from nvalchemi.data.atoms import RESERVED
from nvalchemi.data.fields import FIELDS
from nvalchemi.errors import DataError
from tests.data.random_structures import OPTIONAL, same, structure

WATER = {
    "positions": [[0.0, 0.0, 0.1173], [0.0, 0.7572, -0.4692], [0.0, -0.7572, -0.4692]],
    "atomic_numbers": [8, 1, 1],
}
CELL = np.eye(3) * 8.0
EDGES = {"edge_index": torch.tensor([[1, 2, 0, 0], [0, 0, 1, 2]]), "neighbor_cutoff": 1.2}


def water(**changes):
    arguments = {"positions": torch.tensor(WATER["positions"], dtype=torch.float64), "atomic_numbers": WATER["atomic_numbers"]}
    return AtomicData(**{**arguments, **changes})


def test_lists_arrays_and_tensors_give_the_same():
    forces = np.arange(9.0).reshape(3, 3)
    a = AtomicData(
        np.array(WATER["positions"]), np.array([8, 1, 1], dtype=np.uint8), energy=-3, forces=forces, cell=CELL, pbc=True
    )
    b = AtomicData(
        torch.tensor(WATER["positions"], dtype=torch.float64),
        torch.tensor([8, 1, 1]),
        energy=torch.tensor([-3.0]),
        forces=torch.tensor(forces),
        cell=CELL.tolist(),
        pbc=[True, True, True],
    )
    assert same(a, b)
    assert a.energy.shape == () and a.energy.dtype == torch.float64 and a.atomic_numbers.dtype == torch.int64
    assert AtomicData(**WATER).dtype == torch.float32


def test_energy_is_float64_whatever_comes():
    for energy in (np.float32(1.5), torch.tensor(1.5, dtype=torch.float32), 1.5, np.float64(1.5)):
        d = AtomicData(**WATER, energy=energy)
        assert d.energy.dtype == torch.float64 and d.energy == 1.5
    big = -123456.789012345
    assert AtomicData(**WATER, energy=big).energy.item() == big
    assert water(energy=big).to(dtype=torch.float32).energy.item() == big


def test_arrays_are_copied_and_everything_is_contiguous():
    positions = np.asfortranarray(np.array(WATER["positions"]))
    d = AtomicData(positions, [8, 1, 1], forces=torch.zeros(3, 3, dtype=torch.float64).T)
    positions[:] = 7.0
    assert d.positions[0, 2] == 0.1173
    assert all(d[name].is_contiguous() for name in d.field_names)
    big_endian = np.array(WATER["positions"]).astype(">f8")
    assert torch.equal(AtomicData(big_endian, [8, 1, 1]).positions, d.positions)


def test_reading_fields():
    d = water(energy=1.0, system={"tag": 3}, atom={"spin": torch.zeros(3, 2)[:, :1].double()})
    assert d.num_atoms == d.num_nodes == 3 and d.num_edges == 0
    assert d.stress is None and d.cell is None and d.neighbor_cutoff is None
    assert "energy" in d and "stress" not in d
    assert d["energy"] == 1.0 and d.levels["tag"] == Level.SYSTEM and d.levels["spin"] == "atom"
    assert d.field_names == ("positions", "atomic_numbers", "energy", "tag", "spin")
    assert "positions(3, 3)" in repr(d)
    with pytest.raises(AttributeError, match="no field 'enregy'; there are positions"):
        _ = d.enregy
    with pytest.raises(KeyError, match="no field 'stress'"):
        _ = d["stress"]
    with pytest.raises(AttributeError, match="replace"):
        d.energy = 2.0


def test_no_field_can_hide_a_method():
    names = {name for cls in (AtomicData, Batch) for name in dir(cls) if not name.startswith("_")}
    assert names - set(FIELDS) <= RESERVED | {"trusted"}


BAD = {
    "positions flat": ({"positions": torch.zeros(9)}, "shape", r"\(n, 3\)"),
    "positions of two axes": ({"positions": torch.zeros(3, 2)}, "shape", r"\(n, 3\)"),
    "no atoms": ({"positions": torch.zeros(0, 3), "atomic_numbers": []}, "shape", "at least one atom"),
    "integer positions": ({"positions": torch.tensor([[0, 0, 0], [0, 0, 1], [1, 0, 0]])}, "dtype", "float64"),
    "half positions": ({"positions": torch.zeros(3, 3, dtype=torch.float16)}, "dtype", "float32"),
    "complex positions": ({"positions": np.zeros((3, 3), dtype=complex)}, "its dtype is complex128", "lists of numbers"),
    "array of objects": ({"positions": np.array([[None] * 3] * 3)}, "its dtype is object", "lists of numbers"),
    "text": ({"positions": "here"}, "cannot be made a tensor", "lists of numbers"),
    "uneven lists": ({"positions": [[0.0, 0.0, 0.0], [1.0]]}, "cannot be made a tensor", "equal length"),
    "NaN position": (
        {"positions": torch.tensor([[0.0, 0, 0], [0, float("nan"), 0], [0, 0, 1]])},
        r"not finite in 1 of 3",
        r"\[1\]",
    ),
    "infinite position": ({"positions": torch.tensor([[0.0, 0, 0], [0, float("inf"), 0], [0, 0, 1]])}, "not finite", "drop"),
    "opposite infinities": (
        {"positions": torch.tensor([[0.0, 0, 0], [0, torch.inf, 0], [0, -torch.inf, 1]])},
        "in 2 of 3",
        "drop",
    ),
    "too few numbers": ({"atomic_numbers": [8, 1]}, "do not fit the positions", r"\(3,\)"),
    "float numbers": ({"atomic_numbers": torch.tensor([8.0, 1, 1])}, "dtype", "integers"),
    "symbols": ({"atomic_numbers": ["O", "H", "H"]}, "cannot be made a tensor", "numbers"),
    "ghost": ({"atomic_numbers": [8, 1, 0]}, "unknown elements", r"\[0\]"),
    "negative element": ({"atomic_numbers": [8, 1, -1]}, "unknown elements", r"\[-1\]"),
    "too heavy": ({"atomic_numbers": [8, 1, 119]}, "unknown elements", r"\[119\]"),
    "boolean numbers": ({"atomic_numbers": torch.tensor([True, True, True])}, "dtype", "integers"),
    "forces of two atoms": ({"forces": torch.zeros(2, 3).double()}, "does not fit the 3 atoms", r"\(3, 3\)"),
    "flat forces": ({"forces": torch.zeros(9).double()}, "does not fit", r"\(9,\)"),
    "float32 forces": ({"forces": torch.zeros(3, 3)}, "differ in dtype", "float64"),
    "integer forces": ({"forces": torch.zeros(3, 3, dtype=torch.int64)}, "dtype", "floats in eV/angstrom"),
    "infinite force": ({"forces": torch.full((3, 3), torch.inf).double()}, "infinity", "NaN where there is no label"),
    "energy of each atom": ({"energy": [1.0, 2.0, 3.0]}, "energy has the wrong shape", r"\(3,\)"),
    "infinite energy": ({"energy": float("-inf")}, "infinity", "finite"),
    "integer energy": ({"energy": torch.tensor(3)}, "dtype", "eV"),
    "Voigt stress": ({"stress": [0.0] * 6, "cell": CELL}, "stress has the wrong shape", "voigt_6_to_full_3x3_stress"),
    "flat stress": ({"stress": [0.0] * 9, "cell": CELL}, "stress has the wrong shape", "reshape"),
    "cell lengths": ({"cell": [8.0, 8.0, 8.0], "pbc": True}, "cell has the wrong shape", "lattice vectors"),
    "pbc without cell": ({"pbc": True}, "pbc is True without a cell", "leave pbc out"),
    "pbc of two": ({"pbc": [True, False], "cell": CELL}, "pbc has the wrong shape", r"\(3,\)"),
    "pbc of numbers": ({"pbc": [1, 0, 1], "cell": CELL}, "pbc has the wrong dtype", "booleans"),
    "zero cell": ({"cell": np.zeros((3, 3)), "pbc": True}, "span nothing", "leave cell and pbc out"),
    "flat cell": ({"cell": [[8.0, 0, 0], [0, 8, 0], [8, 8, 0]], "pbc": True}, "span nothing", "independent"),
    "two equal vectors": (
        {"cell": [[8.0, 0, 0], [8, 0, 0], [0, 0, 8]], "pbc": [True, True, False]},
        "span nothing",
        "independent",
    ),
    "NaN cell": ({"cell": np.full((3, 3), np.nan)}, "cell holds NaN", "leave the field out"),
    "infinite cell": ({"cell": np.full((3, 3), np.inf)}, "infinity", "finite"),
    "cell in nm": ({"cell": CELL / 20, "pbc": True}, "too small", "nanometres"),
    "volume in nm": ({"cell": np.eye(3) * 0.8, "pbc": True}, "too small", "Å³ an atom"),
    "positions in nm": ({"positions": torch.tensor(WATER["positions"]).double() / 10}, "nearer than 0.2 Å", "1 nm = 10 Å"),
    "positions in pm": ({"positions": torch.tensor(WATER["positions"]).double() * 100}, "farther than 50", "1 pm = 0.01 Å"),
    "atoms on top of each other": ({"positions": torch.zeros(3, 3)}, "nearer than", "fractional"),
    "charge of each atom": ({"charge": [0.0, 0.0, 0.0]}, "charge has the wrong shape", r"\(\)"),
    "custom per atom": ({"atom": {"spin": [1.0, 2.0]}}, "spin does not fit the 3 atoms", r"\(3, \.\.\.\)"),
    "custom number for atoms": ({"atom": {"spin": 1.0}}, "spin does not fit", r"\(\)"),
    "custom dtype": ({"system": {"gap": torch.tensor(1.0)}}, "differ in dtype", "float64"),
    "custom text": ({"system": {"name": "water"}}, "cannot be made a tensor", "str"),
    "custom complex": ({"system": {"wave": torch.tensor(1j)}}, "complex", "real"),
    "wrong level": ({"system": {"forces": torch.zeros(3, 3).double()}}, "wrong level", "atom"),
    "unusable name": ({"system": {"my gap": 1.0}}, "usable as an attribute", "my gap"),
    "reserved name": ({"system": {"batch_idx": 1.0}}, "another meaning", "another name"),
    "given twice": ({"energy": 1.0, "system": {"energy": 2.0}}, "given twice", "once"),
    "edges without cutoff": ({"edge_index": EDGES["edge_index"]}, "without neighbor_cutoff", "neighbor_list"),
    "cutoff without edges": ({"neighbor_cutoff": 5.0}, "without edge_index", "both"),
    "cutoff zero": ({**EDGES, "neighbor_cutoff": 0.0}, "no length", "positive"),
    "edges transposed": ({**EDGES, "edge_index": EDGES["edge_index"].T}, "edge_index does not fit", r"\(2, edges\)"),
    "edge to nowhere": ({**EDGES, "edge_index": EDGES["edge_index"] + 1}, "do not exist", "0 to 2"),
    "edges unsorted": ({**EDGES, "edge_index": EDGES["edge_index"].flip(1)}, "not sorted", "argsort"),
    "shift without cell": ({**EDGES, "edge_shift": torch.zeros(4, 3).double()}, "without a cell", "molecule"),
    "edges without shift": ({**EDGES, "cell": CELL, "pbc": True}, "without edge_shift", "zeros"),
    "fractional shift": ({**EDGES, "cell": CELL, "edge_shift": torch.full((4, 3), 0.5).double()}, "fractions", "whole"),
    "too few shifts": (
        {**EDGES, "cell": CELL, "edge_shift": torch.zeros(3, 3).double()},
        "does not fit the 4 edges",
        r"\(4, 3\)",
    ),
    "edge field without edges": ({"edge": {"bond": [1.0]}}, "no edge_index", "give edge_index"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused(case):
    changes, said, helped = BAD[case]
    with pytest.raises(DataError, match=said) as info:
        water(**changes)
    assert re.search(helped, str(info.value)), str(info.value)
    assert "needed: " in str(info.value) or "do this: " in str(info.value)


def test_sensible_rarities_pass():
    AtomicData([[0, 0, 0]], [1])  # one atom, whole numbers in a list
    AtomicData([[0.0, 0, 0], [0, 0, 0.74]], [1, 1])
    AtomicData([[0.0, 0, 0], [0, 0, 0.15]], [18, 18])  # a scan of the repulsive wall
    AtomicData([[0.0, 0, 0], [0, 0, 500.0]], [18, 18])  # two atoms far apart
    AtomicData([[0.0, 0, 0], [0, 0, 0.1], [0, 0, 2.0]], [18, 18, 18])  # two atoms nearly on top of each other, a third not
    water(cell=[[8.0, 0, 0], [0, 8, 0], [0, 0, 0]], pbc=[True, True, False])  # a slab without a third vector
    water(cell=np.zeros((3, 3)), pbc=False)
    water(pbc=False)
    water(cell=CELL * [[-1], [1], [1]], pbc=True)  # left-handed
    nan = float("nan")
    d = water(energy=nan, forces=torch.full((3, 3), nan).double(), stress=np.full((3, 3), nan), charge=1)
    assert d.energy.isnan() and d.charge == 1.0 and d.charge.dtype == torch.float64
    far = AtomicData([[0.0, 0, 0], [0, 0, 90.0], [90.0, 0, 0]], [2, 2, 2], cell=(np.eye(3) * 100).tolist(), pbc=True)
    assert far.num_atoms == 3


def test_lists_of_arrays_and_things_like_arrays():
    rows = [np.array(row) for row in WATER["positions"]]
    d = AtomicData(rows, [np.int64(8), np.int64(1), np.int64(1)], energy=np.int64(3), cell=Cell.new([8, 9, 10]), pbc=np.True_)
    assert d.dtype == torch.float32 and d.cell.diagonal().tolist() == [8, 9, 10] and d.energy == 3 and d.pbc.all()
    assert AtomicData(torch.tensor(WATER["positions"]), (8, 1, 1), charge=np.float64(1)).charge.dtype == torch.float32


def test_large_structures_in_the_wrong_unit_are_refused_quickly():
    positions = np.stack(np.unravel_index(np.arange(20000), (30, 30, 30)), axis=1) * 0.15
    with pytest.raises(DataError, match="1 nm = 10 Å"):
        AtomicData(positions, np.full(20000, 6))


def test_cell_alone_is_periodic():
    assert water(cell=CELL).pbc.tolist() == [True] * 3


def test_gradients_pass_through():
    x = torch.tensor(WATER["positions"], dtype=torch.float64, requires_grad=True)
    d = AtomicData(x, [8, 1, 1])
    assert d.positions is x
    (d.positions**2).sum().backward()
    assert x.grad is not None


def test_to_casts_all_but_the_energy():
    d = structure(0, 5, frozenset(OPTIONAL))
    e = d.to("cpu", torch.float32)
    for name in d.field_names:
        if name == "energy" or not d[name].is_floating_point():
            assert e[name].dtype == d[name].dtype
        else:
            assert e[name].dtype == torch.float32
    assert same(e.to(torch.float32), e)
    with pytest.raises(DataError, match="float32 or float64"):
        d.to(dtype=torch.bfloat16)


def test_replace():
    d = structure(1, 5, frozenset({"energy", "spin"}))
    e = d.replace(energy=2.0, forces=torch.zeros(5, 3).double())
    assert e.energy == 2.0 and e.forces.shape == (5, 3) and torch.equal(e.spin, d.spin) and d.forces is None
    assert "spin" not in d.replace(spin=None) and d.replace(energy=None).energy is None
    assert d.replace(tag=3, levels={"tag": Level.SYSTEM}).levels["tag"] == Level.SYSTEM
    with pytest.raises(DataError, match="level of the new field 'tag'"):
        d.replace(tag=3)
    with pytest.raises(DataError, match="does not fit"):
        d.replace(forces=torch.zeros(4, 3).double())
    w = water(**EDGES, edge={"bond": [1.0] * 4})
    assert w.replace(energy=1.0).neighbor_cutoff == 1.2 and w.replace(energy=1.0).num_edges == 4
    bare = w.replace(edge_index=None)
    assert bare.neighbor_cutoff is None and bare.field_names == ("positions", "atomic_numbers")


def test_pickle_and_clone_are_small_and_whole():
    many = [structure(s, 8, frozenset(OPTIONAL)) for s in range(50)]
    one = Batch.from_data_list(many)[7]
    assert same(one, many[7])
    assert same(pickle.loads(pickle.dumps(one)), one)
    assert len(pickle.dumps(one)) < 2 * len(pickle.dumps(many[7].clone()))
    copy = one.clone()
    copy.positions.add_(1.0)
    assert not torch.equal(copy.positions, one.positions)


def test_import_is_light():
    code = "import torch, sys, nvalchemi.data; print([m for m in ('ase', 'vesin', 'zarr', 'scipy', 'physicsnemo') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
