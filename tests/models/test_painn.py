"""PaiNN keeps the symmetries of physics, and is smooth (Schütt et al. 2021)."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models import InteratomicPotential, PaiNN
from tests.models.samples import crystal, molecule, painn, rotation

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
OUTPUTS = ("energy", "forces", "stress")


def predict(model: InteratomicPotential, *data: AtomicData):
    return {name: value.detach() for name, value in model.predict(Batch.from_data_list(list(data)), OUTPUTS).items()}


def close(a, b, dtype):
    scale = max(1.0, float(b.abs().max()))
    return float((a.double() - b.double()).abs().max()) < TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [molecule, crystal])
def test_turned_moved_and_mirrored(dtype, kind):
    model, data = painn(dtype, references=None), kind(dtype=torch.float64)
    for seed, sign in ((1, 1.0), (2, -1.0)):
        turn = rotation(seed) * sign
        moved = data.replace(positions=data.positions @ turn + torch.tensor([3.0, -20.0, 7.0], dtype=torch.float64))
        if data.cell is not None:
            moved = moved.replace(cell=data.cell @ turn)
        before, after = predict(model, data), predict(model, moved)
        turn = turn.to(dtype)
        assert close(after["energy"], before["energy"], dtype)
        assert close(after["forces"], before["forces"] @ turn, dtype)
        if data.cell is not None:
            assert close(after["stress"], turn.T @ before["stress"] @ turn, dtype)
        assert close(after["forces"].sum(0), torch.zeros(3), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_atoms_in_another_order(dtype):
    model, data = painn(dtype, references=None), molecule(12, dtype=dtype)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    other = AtomicData(data.positions[order], data.atomic_numbers[order])
    before, after = predict(model, data), predict(model, other)
    assert close(after["energy"], before["energy"], dtype)
    assert close(after["forces"], before["forces"][order], dtype)


def test_two_far_copies_have_twice_the_energy():
    model, data = painn(), molecule()
    both = AtomicData(torch.cat([data.positions, data.positions + 100.0]), torch.cat([data.atomic_numbers, data.atomic_numbers]))
    one, two = predict(model, data), predict(model, both)
    assert abs(float(two["energy"] - 2 * one["energy"])) < 1e-8
    torch.testing.assert_close(two["forces"], one["forces"].repeat(2, 1), rtol=0, atol=1e-10)


def test_a_supercell_has_the_energy_and_stress_of_its_cells():
    model, data = painn(references=None), crystal()
    shifts = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3) @ data.cell
    big = AtomicData(
        (data.positions + shifts[:, None]).reshape(-1, 3),
        data.atomic_numbers.repeat(8),
        cell=2 * data.cell,
        pbc=data.pbc,
    )
    one, eight = predict(model, data), predict(model, big)
    assert abs(float(eight["energy"] - 8 * one["energy"])) < 1e-9
    torch.testing.assert_close(eight["forces"], one["forces"].repeat(8, 1), rtol=0, atol=1e-10)
    torch.testing.assert_close(eight["stress"], one["stress"], rtol=0, atol=1e-10)


def test_energy_and_forces_go_smoothly_through_the_cutoff():
    """An atom leaves at 4 Å: no jump, and the force fades to nothing."""
    model = painn()
    base = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.2, 0.0]], dtype=torch.float64)

    def at(distance):
        away = torch.tensor([[distance, 0.0, 0.0]], dtype=torch.float64)
        return predict(model, AtomicData(torch.cat([base, away]), [6, 1, 8]))

    inside, outside, gone = at(4.0 - 1e-5), at(4.0 + 1e-5), at(50.0)
    assert abs(float(inside["energy"] - outside["energy"])) < 1e-9
    assert float((inside["forces"] - outside["forces"]).abs().max()) < 1e-8
    assert abs(float(outside["energy"] - gone["energy"])) < 1e-9
    assert not outside["forces"][2].any()
    near = at(3.9)
    assert float(near["forces"][2].abs().max()) > 1e-7  # and it does reach that far
    # even the slope of the force has no step: it is as small before the cutoff as behind it
    slope = (at(4.0 - 1e-3)["forces"] - at(4.0 - 2e-3)["forces"]) / 1e-3
    assert float(slope[2].abs().max()) < 1e-4


def test_no_edges_and_single_atoms():
    model = painn()
    apart = AtomicData([[0.0, 0, 0], [0, 0, 30.0]], [1, 8]).to(dtype=torch.float64)
    out = predict(model, apart, molecule(1))
    assert not out["forces"].any()
    torch.testing.assert_close(out["energy"][0], model.reference[1] + model.reference[8], rtol=0, atol=1e-9)
    batch = Batch.from_data_list([apart])
    found = model.predict(batch)
    (found["energy"].sum() + found["forces"].sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "data",
    [
        AtomicData([[0.0, 0, 0], [1.3, 0, 0]], [6, 8]),
        AtomicData([[0.0, 0, 0], [0, 1.3, 0]], [6, 8]),
        AtomicData([[0.0, 0, 0], [0, 0, 1.3], [0, 0, 2.6]], [1, 6, 1]),
        AtomicData([[0.0, 0, 0]], [6], cell=2.5 * torch.eye(3), pbc=[True] * 3),
        AtomicData([[0.0, 0, 0]], [6]),
    ],
    ids=["along x", "along y", "straight line along z", "one atom in a cell", "one atom"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_second_derivatives_are_finite_where_vectors_vanish(data, fast):
    """B86: a norm-type loss of forces, the norm itself being safe where a force is zero."""
    model, batch = painn(), Batch.from_data_list([data.to(dtype=torch.float64)])
    model._gives_gradient = fast
    forces = model.predict(batch)["forces"]
    (forces.square().sum(1) + 1e-12).sqrt().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    moved = batch.replace(positions=batch.positions.clone().requires_grad_())
    model.gradient(moved, create_graph=True).square().sum().backward()
    assert moved.positions.grad.isfinite().all()


def test_under_autocast():
    """Mixed precision runs, near to what full precision gives; energies are summed in float64 all the same."""
    model, batch = painn(torch.float32), Batch.from_data_list([molecule(9, dtype=torch.float32)])
    full = model.predict(batch)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.predict(batch)
    assert out["energy"].dtype == torch.float64 and out["forces"].dtype == torch.float32
    assert float((out["forces"] - full["forces"]).detach().abs().max()) < 0.1 * float(full["forces"].detach().abs().max())
    out["forces"].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_elements_and_settings():
    net = PaiNN(["O", 1, "C", "H"])
    assert net.elements == (1, 6, 8)
    assert len(PaiNN(n_features=2, n_interactions=1).elements) == 118
    assert sum(p.numel() for p in net.parameters()) == 140_928
    for wrong in ({"n_features": 0}, {"n_features": 7}, {"cutoff": -1.0}, {"n_rbf": 0}, {"n_interactions": 0}):
        with pytest.raises(ConfigError):
            PaiNN(["H"], **wrong)
    with pytest.raises(ConfigError, match="no elements"):
        PaiNN([])


def test_it_learns():
    """A few steps of full-batch training bring the loss down a lot."""
    torch.manual_seed(0)
    teacher, model = painn(torch.float32, references=None), painn(torch.float32, references=None)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    batch = Batch.from_data_list([molecule(8, seed=s, dtype=torch.float32) for s in range(4)])
    target = {k: v.detach() for k, v in teacher.predict(batch).items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        out = model.predict(batch)
        loss = (out["energy"] - target["energy"]).square().mean() + (out["forces"] - target["forces"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
