"""Energies, forces and stress of potentials, whatever the network."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models import InteratomicPotential, PaiNN
from tests.models.samples import REFERENCES, LennardJones, crystal, energy, molecule, painn, strained

EV_PER_GPA = 1.0 / 160.21766208


def both_kinds():
    return {"pair potential": InteratomicPotential(LennardJones(1.6, 4.0)).double(), "PaiNN": painn()}


@pytest.mark.parametrize("kind", ["pair potential", "PaiNN"])
@pytest.mark.parametrize("data", [molecule(), crystal()], ids=["molecule", "crystal"])
def test_forces_are_minus_the_finite_difference(kind, data):
    model = both_kinds()[kind]
    forces = model.eval().predict(Batch.from_data_list([data]))["forces"]
    h = 1e-4
    for atom, axis in [(0, 0), (1, 2), (3, 1)]:
        step = torch.zeros_like(data.positions)
        step[atom, axis] = h
        up, down = energy(model, data.replace(positions=data.positions + step), data.replace(positions=data.positions - step))
        assert float(forces[atom, axis]) == pytest.approx(-float(up - down) / (2 * h), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("kind", ["pair potential", "PaiNN"])
def test_b15_stress_is_the_finite_difference_with_strain(kind):
    """B15."""
    model, data = both_kinds()[kind], crystal()
    stress = model.eval().predict(Batch.from_data_list([data]), ("stress",))["stress"][0]
    volume, h = float(data.cell.det().abs()), 1e-4
    for a, b in [(0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2)]:
        strain = torch.zeros(3, 3)
        strain[a, b] += h / 2
        strain[b, a] += h / 2
        up, down = energy(model, strained(data, strain), strained(data, -strain))
        slope = float(up - down) / (2 * h) / volume
        assert abs(float(stress[a, b]) - slope) < 1e-6
        assert float(stress[a, b]) == float(stress[b, a])


def test_a_squeezed_crystal_has_negative_stress_in_ev_per_cubic_angstrom():
    """B15: squeezed by one percent below the minimum of its energy, tension being positive."""
    model = InteratomicPotential(LennardJones(2.2, 7.0)).double()
    sites = torch.tensor([[0.0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=torch.float64)

    def at(a):
        return AtomicData(sites * a, [6] * 4, cell=a * torch.eye(3, dtype=torch.float64), pbc=[True] * 3)

    lengths = np.linspace(3.2, 3.8, 121)
    best = float(lengths[int(energy(model, *[at(float(a)) for a in lengths]).argmin())])
    squeezed = at(best * 0.99)
    stress = model.eval().predict(Batch.from_data_list([squeezed]), ("stress",))["stress"][0]
    volume = float(squeezed.cell.det())
    up, down = energy(model, at(best * 0.99 * 1.0001), at(best * 0.99 * 0.9999))
    assert float(stress[0, 0]) < -1e-3
    assert abs(float(stress.trace()) / 3 - float(up - down) / (3 * 2e-4 * volume)) < 1e-4
    assert float(stress.trace()) / 3 / EV_PER_GPA < -0.1  # as it would read in GPa: another number altogether


def test_structures_that_repeat_nowhere_have_no_stress_and_spoil_no_gradient():
    model, batch = painn(), Batch.from_data_list([molecule(), crystal()])
    stress = model.predict(batch, ("stress",))["stress"]
    assert stress[0].isnan().all() and stress[1].isfinite().all()
    stress[1].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    alone = model.predict(Batch.from_data_list([molecule()]), ("stress", "energy"))
    assert alone["stress"].isnan().all() and alone["energy"].isfinite().all()


def test_only_what_is_asked_for():
    model, batch = painn(), Batch.from_data_list([crystal()])
    assert set(model.predict(batch, ("forces",))) == {"forces"}
    assert set(model.predict(batch, ("energy", "stress"))) == {"energy", "stress"}
    assert model.predict(batch, ()) == {}
    for wrong in (("enthalpy",), "energy"):
        with pytest.raises(ConfigError, match="does not predict"):
            model.predict(batch, wrong)


@pytest.mark.parametrize("kind", ["pair potential", "PaiNN"])
def test_b19_a_batch_gives_what_each_structure_gives_alone(kind):
    """B19: overlapping coordinates, periodic and not, an atom alone, in any order."""
    model = both_kinds()[kind]
    data = [molecule(9), crystal(), molecule(1), molecule(5, seed=3)]
    outputs = ("energy", "forces", "stress")
    together = model.predict(Batch.from_data_list(data), outputs)
    alone = [model.predict(Batch.from_data_list([d]), outputs) for d in data]
    for name in outputs:
        torch.testing.assert_close(together[name], torch.cat([p[name] for p in alone]), rtol=0, atol=1e-10, equal_nan=True)
    turned = model.predict(Batch.from_data_list(data[::-1]), outputs)
    torch.testing.assert_close(turned["energy"].flip(0), together["energy"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", ["pair potential", "PaiNN"])
def test_b104_evaluation_in_any_mode(mode, kind):
    """B104: the same numbers, no graph, no gradients of parameters."""
    model = both_kinds()[kind].train()
    outputs = ("energy", "forces", "stress")
    data = [molecule(6), crystal()]
    expected = model.predict(Batch.from_data_list(data), outputs)
    model.eval()
    with mode():
        batch = Batch.from_data_list(data)  # under inference_mode its tensors cannot enter a graph
        found = model.predict(batch, outputs)
    for name in outputs:
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12, equal_nan=True)
    assert all(p.grad is None for p in model.parameters())
    model.train()  # what evaluation cached in the batch does not get in the way of training
    model.predict(batch.clone() if mode is torch.inference_mode else batch)["forces"].sum().backward()


def test_the_graph_is_kept_for_training_only():
    model, batch = painn(), Batch.from_data_list([molecule()])
    assert all(p.requires_grad for p in model.predict(batch).values())
    with torch.no_grad():
        assert not any(p.requires_grad for p in model.predict(batch).values())
    model.eval()
    assert not any(p.requires_grad for p in model.predict(batch, ("energy",)).values())
    assert model(batch).requires_grad  # a plain call is autograd's business


@pytest.mark.parametrize("kind", ["pair potential", "PaiNN"])
def test_edges_at_hand_are_used_if_they_reach_far_enough(kind, monkeypatch):
    model = both_kinds()[kind]
    plain = Batch.from_data_list([molecule(), crystal()])
    expected = model.predict(plain, ("energy", "forces", "stress"))
    exact, longer, shorter = (neighbor_list(plain, c) for c in (4.0, 6.0, 2.0))
    made = []
    monkeypatch.setattr("nvalchemi.models.potential.neighbor_list", lambda b, c: made.append(c) or neighbor_list(b, c))
    for batch, count in ((exact, 0), (longer, 0), (shorter, 1)):
        made.clear()
        found = model.predict(batch, ("energy", "forces", "stress"))
        assert len(made) == count
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, equal_nan=True)


def test_the_network_leaves_out_longer_edges_by_itself():
    net = painn().net
    batch = neighbor_list(Batch.from_data_list([molecule()]), 6.0)
    j, i = batch.edge_index
    vectors = batch.positions[j] - batch.positions[i]
    near = vectors.norm(dim=1) < 4.0
    assert not near.all()
    few = net(batch.atomic_numbers, vectors[near], batch.edge_index[:, near])
    torch.testing.assert_close(net(batch.atomic_numbers, vectors, batch.edge_index), few, rtol=0, atol=1e-12)
    energies, gradient = net(batch.atomic_numbers, vectors, batch.edge_index, gradient=True)
    torch.testing.assert_close(energies, few, rtol=0, atol=1e-12)
    assert not gradient[~near].any()


def test_b17_an_atom_alone_has_its_reference_energy():
    """B17: once, and nothing of the network beside it."""
    model = painn(torch.float32)
    for z, value in ((1, REFERENCES["H"]), (8, REFERENCES["O"])):
        data = AtomicData([[0.3, 0.1, 0.2]], [z]).to(dtype=torch.float32)
        out = model.eval().predict(Batch.from_data_list([data]))
        assert abs(float(out["energy"]) - value) < 1e-6
        assert not out["forces"].any()


def test_b17_unknown_elements_are_named():
    """B17."""
    copper = Batch.from_data_list([AtomicData([[0.0, 0, 0], [0, 0, 2.5]], [8, 29])])
    with pytest.raises(DataError, match=r"found: Cu; needed: some of H, C, O"):
        painn()(copper)
    general = InteratomicPotential(PaiNN(n_features=4, n_interactions=1), reference_energies={"O": -1.0, 6: -2.0})
    with pytest.raises(DataError, match="Cu"):
        general.predict(copper)
    general.set_reference_energies(None)
    assert general.predict(copper)["energy"].isfinite().all()


def test_b17_reference_energies_are_used_once():
    """B17: a data pipe that took them off says so, and the model refuses."""
    model, data = painn(), molecule(system={"removed_energy": torch.tensor(-1.0, dtype=torch.float64)})
    batch = Batch.from_data_list([data])
    for use in (model, model.predict, model.gradient):
        with pytest.raises(DataError, match="twice"):
            use(batch)
    assert painn(references=None)(batch).isfinite().all()


def test_totals_keep_their_precision_in_float32():
    """Energies of 1e5 eV, differences of 1e-6 eV, whatever the dtype of the network and however it got there."""
    exact = painn()
    data = molecule(40, seed=2)
    expected = energy(exact, data)
    model = copy.deepcopy(exact).float()
    found = energy(model, data)
    assert found.dtype == torch.float64 and model.reference.dtype == torch.float64
    assert abs(float(found - expected)) < 1e-4
    assert model.half().reference.dtype == torch.float64
    assert float(model.reference[1]) == REFERENCES["H"]


def test_gradient_is_minus_the_forces_and_reaches_back_to_the_positions():
    model, batch = painn(), Batch.from_data_list([molecule(6), crystal()])
    forces = model.predict(batch)["forces"]
    with torch.inference_mode():
        torch.testing.assert_close(model.gradient(batch), -forces.detach(), rtol=0, atol=1e-12)
    moved = batch.replace(positions=batch.positions.clone().requires_grad_())
    row = torch.zeros_like(batch.positions)
    row[2, 1] = 1.0
    again = model.gradient(moved, create_graph=True)
    (again * row).sum().backward()
    h = 1e-5
    up, down = (model.gradient(batch.replace(positions=batch.positions + s * h * row)) for s in (1, -1))
    torch.testing.assert_close(moved.positions.grad, (up - down) / (2 * h), rtol=0, atol=1e-6)
    forces = model.predict(moved)["forces"]  # positions that require a gradient stay connected
    assert torch.autograd.grad(forces[2, 1], moved.positions)[0].abs().max() > 0


def test_state_and_settings():
    model = painn()
    state = model.state_dict()
    other = painn(references=None)
    other.load_state_dict(state)
    assert other.reference_energies == REFERENCES
    zeros = InteratomicPotential(PaiNN(n_features=4, n_interactions=1), reference_energies={"H": 0.0})
    assert zeros.config()["reference_energies"] == {"H": 0.0}
    assert float(other.scale) == 1.3
    for wrong in ({"cutoff": 0.0}, {"energy_scale": -1.0}, {"energy_scale": float("nan")}, {"cutoff": 2.0}):
        with pytest.raises(ConfigError):
            InteratomicPotential(PaiNN(["H"], n_features=4, cutoff=4.0), **wrong)
    with pytest.raises(ConfigError, match="cutoff"):
        InteratomicPotential(torch.nn.Linear(1, 1))


def test_fitting_to_a_training_set():
    data = [molecule(n, seed=n) for n in range(3, 15)]
    true = {1: -13.0, 6: -1000.0, 8: -2000.0}
    data = [
        d.replace(
            energy=sum(true[int(z)] for z in d.atomic_numbers) + 0.0,
            forces=torch.full((d.num_atoms, 3), 0.5, dtype=torch.float64),
        )
        for d in data
    ]
    model = painn(references=None)
    fit = model.fit_reference_energies(data)
    assert fit.determined and fit.residual_rms < 1e-9
    assert model.reference_energies == pytest.approx({"H": -13.0, "C": -1000.0, "O": -2000.0})
    assert model.fit_energy_scale(Batch.from_data_list(data)) == pytest.approx(0.5)
    assert float(model.scale) == pytest.approx(0.5)


def test_what_is_no_structure_is_told():
    with pytest.raises(DataError, match=r"energy of structures; found: Tensor"):
        painn()(torch.zeros(3, 3))
