"""Forces and stress of an energy of one's own: by the facade, from the energy alone."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel
from tests.models.samples import crystal, molecule, painn


class Own(EnergyModel):
    """A potential's energies without its hand-made derivatives."""

    outputs = ("energy", "forces", "stress")

    def __init__(self, potential):
        super().__init__()
        self.net = potential

    def forward(self, batch):
        return self.net(batch)


class EnergyAlone(Own):
    outputs = ("energy",)


def both():
    batch = Batch.from_data_list([crystal(), molecule(), crystal(1)])
    potential = painn()
    return Own(potential), potential, batch


def test_they_are_those_of_the_potential():
    model, potential, batch = both()
    model.eval()
    found, expected = (m.predict(batch, ("energy", "forces", "stress")) for m in (model, potential))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, equal_nan=True, rtol=1e-9, atol=1e-11)
        assert not found[name].requires_grad
    assert found["stress"][1].isnan().all()
    torch.testing.assert_close(model.gradient(batch), -expected["forces"])


def test_they_train_the_same():
    model, potential, batch = both()
    gradients = []
    for m in (model.train(), potential.train()):
        potential.zero_grad()
        found = m.predict(batch, ("energy", "forces", "stress"))
        (found["energy"].sum() + found["forces"].square().sum() + found["stress"][[0, 2]].square().sum()).backward()
        gradients.append([p.grad.clone() for p in potential.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_any_gradient_mode(mode):
    model, _, batch = both()
    expected = model.eval().predict(batch, ("forces", "stress"))
    with mode():
        found = model.predict(batch, ("forces", "stress"))
    assert list(found) == ["forces", "stress"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name].clone(), value, equal_nan=True)


def test_only_what_is_declared():
    _, potential, batch = both()
    model = EnergyAlone(potential)
    assert list(model.predict(batch)) == ["energy"] and model.predict(batch, ()) == {}
    with pytest.raises(ConfigError, match="does not predict that; found: forces; needed: some of energy"):
        model.predict(batch, ("energy", "forces"))
    with pytest.raises(ConfigError, match="found: 'energy'"):
        model.predict(batch, "energy")


@pytest.mark.parametrize("wrong", [lambda e: e.mean(), lambda e: e.sum(), lambda e: e[:, None]])
def test_energies_are_one_a_structure(wrong):
    """The forces of a mean over the batch were too small by the number of its structures, without notice."""
    model, _, batch = both()
    model.forward = lambda batch: wrong(model.net(batch))
    for outputs in (("energy", "forces"), ("stress",)):
        with pytest.raises(ConfigError, match=r"not one number a sample.*needed: \(3,\)"):
            model.predict(batch, outputs)
    with pytest.raises(ConfigError, match="not one number a sample"):
        model.gradient(batch)
