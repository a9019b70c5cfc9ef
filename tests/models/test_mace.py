"""MACE as a network; the tests that need ``mace-torch`` are skipped without it."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models import InteratomicPotential, build_model
from nvalchemi.models.mace import MACENet, mace_potential
from tests.models.samples import REFERENCES, crystal, energy, molecule

installed = importlib.util.find_spec("mace") is not None
needs_mace = pytest.mark.skipif(not installed, reason="mace-torch is not installed")


@pytest.mark.skipif(installed, reason="mace-torch is installed")
def test_without_the_package():
    with pytest.raises(ConfigError, match=r"pip install nvalchemi\[mace\]"):
        build_model({"model": "potential", "net": {"net": "mace", "elements": ["H"]}})


def test_something_else():
    with pytest.raises(ConfigError, match="no MACE model"):
        MACENet(torch.nn.Linear(1, 1))


@needs_mace
@pytest.mark.filterwarnings("ignore")
def test_energies_forces_stress_and_settings():
    torch.manual_seed(0)
    net = MACENet.new(["H", "C", "O"], cutoff=4.0, channels=4, max_ell=2, correlation=2)
    model = InteratomicPotential(net, reference_energies=REFERENCES).double()
    data = [molecule(6), crystal(), molecule(1)]
    out = model.predict(Batch.from_data_list(data), ("energy", "forces", "stress"))
    assert abs(float(out["energy"][2].detach()) - REFERENCES[{1: "H", 6: "C", 8: "O"}[int(data[2].atomic_numbers)]]) < 1e-9
    h, step = 1e-4, torch.zeros(6, 3, dtype=torch.float64)
    step[2, 1] = h
    up, down = energy(model, *[data[0].replace(positions=data[0].positions + s * step) for s in (1, -1)])
    assert abs(float(out["forces"][2, 1].detach()) + float(up - down) / (2 * h)) < 1e-6
    (out["energy"].sum() * 1e-4 + out["forces"].square().sum()).backward()
    assert all(p.grad is not None for p in model.parameters())
    other = build_model(json.loads(json.dumps(model.config()))).double()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(energy(other, *data), energy(model, *data))


@needs_mace
@pytest.mark.filterwarnings("ignore")
def test_a_model_handed_over_equals_its_own_prediction():
    """Against MACE's own forward from positions, shifts and all."""
    torch.manual_seed(0)
    from nvalchemi.data.neighbors import neighbor_list

    mace = MACENet.new(["H", "C", "O"], cutoff=4.0, channels=4, max_ell=2, correlation=2).model.double()
    mace.atomic_energies_fn.atomic_energies.copy_(torch.tensor([-13.0, -1000.0, -2000.0]))
    model = mace_potential(mace)
    assert model.reference_energies == {"H": -13.0, "C": -1000.0, "O": -2000.0}
    data = crystal()
    batch = neighbor_list(Batch.from_data_list([data]), 4.0)
    numbers = list(model.net.elements)
    own = mace(
        {
            "positions": batch.positions.clone(),
            "node_attrs": torch.nn.functional.one_hot(
                torch.tensor([numbers.index(int(z)) for z in batch.atomic_numbers]), 3
            ).double(),
            "edge_index": batch.edge_index,
            "shifts": -(batch.edge_shift @ batch.cell[0]),
            "unit_shifts": -batch.edge_shift,
            "cell": batch.cell[0],
            "batch": batch.batch_idx,
            "ptr": torch.tensor([0, 4]),
        },
        compute_stress=True,
    )
    found = model.predict(batch, ("energy", "forces", "stress"))
    torch.testing.assert_close(found["energy"], own["energy"])
    torch.testing.assert_close(found["forces"], own["forces"], atol=1e-9, rtol=0)
    torch.testing.assert_close(found["stress"], own["stress"], atol=1e-9, rtol=0)
    with pytest.raises(ConfigError, match="cannot be rebuilt"):
        model.config()
