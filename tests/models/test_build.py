"""Models from plain data."""

from __future__ import annotations

import json

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models import InteratomicPotential, MLPEnergy, build_model, build_net, register_model, register_net
from tests.models.samples import LennardJones, energy, molecule, painn


def test_a_potential_comes_back():
    model = painn()
    plain = json.loads(json.dumps(model.config()))
    torch.manual_seed(99)
    other = build_model(plain).double()
    assert other.config() == model.config()
    data = molecule()
    assert not torch.equal(energy(other, data), energy(model, data))
    other.load_state_dict(model.state_dict())
    assert torch.equal(energy(other, data), energy(model, data))


def test_an_energy_of_vectors_comes_back():
    model = MLPEnergy(3, 7, layers=3, activation="tanh")
    other = build_model(json.loads(json.dumps(model.config())))
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 3)
    assert torch.equal(model(x), other(x)) and model(x).shape == (4,)


def test_names_that_are_registered():
    register_net("lennard_jones", LennardJones)
    register_net("lennard_jones", LennardJones)
    model = build_model(InteratomicPotential(LennardJones(1.5, 4.0), energy_scale=2.0).config())
    assert isinstance(model.net, LennardJones) and model.net.sigma == 1.5 and model.cutoff == 4.0
    assert model(Batch.from_data_list([molecule()])).shape == (1,)
    with pytest.raises(ConfigError, match="taken"):
        register_net("lennard_jones", lambda: LennardJones())
    with pytest.raises(ConfigError, match="taken"):
        register_model("mlp", lambda: MLPEnergy(1))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "os.system"}, "no such model"),
        ({}, "no such model"),
        ({"model": "potential", "net": {"net": "nothing"}}, "no such net"),
        ({"model": "mlp", "dim": 2, "depth": 3}, "does not take"),
        ({"model": "potential", "net": {"net": "painn", "cut": 3.0}}, "does not take"),
        ({"model": "mlp", "dim": 0}, "no such network"),
        ({"model": "mlp", "dim": 1, "activation": "relu"}, "unknown activation"),
    ],
)
def test_bad_settings(config, words):
    with pytest.raises(ConfigError, match=words):
        build_model(config)


def test_networks_of_ones_own_say_what_they_lack():
    model = InteratomicPotential(torch.nn.Identity(), cutoff=3.0)
    with pytest.raises(ConfigError, match="config"):
        model.config()
    with pytest.raises(ConfigError, match="no such net"):
        build_net({"net": None})
