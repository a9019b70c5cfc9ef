"""The input gradient of an energy, and its traps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.models import EnergyModel, MLPEnergy
from nvalchemi.models.gradient import input_gradient


class Quadratic(EnergyModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x).squeeze(-1).square() + self.net.bias


def test_of_a_known_function():
    model, x = Quadratic().double(), torch.randn(5, 3, dtype=torch.float64)
    w, b = model.net.weight[0], model.net.bias
    expected = 2 * (x @ w + b)[:, None] * w
    torch.testing.assert_close(model.gradient(x), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inside = torch.randn(5, 3, dtype=torch.float64)
            found = model.gradient(inside)
        assert not found.requires_grad
        inside = inside.clone()
        torch.testing.assert_close(found.clone(), (2 * (inside @ w + b)[:, None] * w).detach())
    assert all(p.grad is None for p in model.parameters())


def test_an_output_bias_gets_a_gradient_from_a_score():
    """Without it a wrapped network would refuse its next forward; it is zero, and the others' are as they were."""
    model, x = MLPEnergy(3, 8), torch.randn(4, 3)
    model.gradient(x, create_graph=True).square().sum().backward()
    bias = model.net[-1].bias
    assert bias.grad is not None and not bias.grad.any()
    with_trap = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    at = x.clone().requires_grad_()
    (plain,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    plain.square().sum().backward()
    for found, p in zip(with_trap[:-1], list(model.parameters())[:-1], strict=True):
        torch.testing.assert_close(found, p.grad)
    assert list(model.parameters())[-1].grad is None  # what the trap is


def test_the_graph_reaches_back_to_an_input_that_wants_it():
    model, x = MLPEnergy(2, 8).double(), torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    model.gradient(x, create_graph=True).sum().backward()
    assert x.grad is not None and x.grad.any()
    assert not model.gradient(x).requires_grad


def test_an_energy_that_ignores_its_input():
    x = torch.randn(3, 2, requires_grad=True)
    assert not input_gradient(torch.ones(3), x).any()
    w = torch.ones(3, requires_grad=True)
    assert not input_gradient(w * 2, x, create_graph=True).any()


def test_gradients_of_gradients():
    model, x = MLPEnergy(3, 5, activation="tanh").double(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: model.gradient(y, create_graph=True), x)
    assert torch.autograd.gradgradcheck(lambda y: model.gradient(y, create_graph=True), x)


@pytest.mark.parametrize("training", [True, False])
def test_a_plain_energy_predicts_energies(training):
    model, x = MLPEnergy(3, 5).train(training), torch.randn(2, 3)
    found = model.predict(x)
    assert set(found) == {"energy"} and found["energy"].requires_grad == training


def test_energy_and_gradient_come_from_one_pass():
    model, x = MLPEnergy(3, 5), torch.randn(4, 3)
    energy, gradient = model.energy_and_gradient(x)
    assert not energy.requires_grad and torch.equal(gradient, model.gradient(x))
    torch.testing.assert_close(energy, model(x))
    energy, gradient = model.energy_and_gradient(x, create_graph=True)
    assert energy.requires_grad and gradient.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtype_of_the_input(dtype):
    x = torch.randn(4, 3).to(dtype)
    assert MLPEnergy(3, 5).to(dtype).gradient(x).dtype == dtype
    model = MLPEnergy(3, 5)
    with pytest.raises(RuntimeError, match="dtype"):
        model.gradient(x)
    model.force_fp32_gradient = True
    with torch.autocast("cpu", torch.bfloat16):
        found = model.gradient(x)
    assert found.dtype == dtype
    model.force_fp32_gradient = False
    torch.testing.assert_close(found, model.gradient(x.float()).to(dtype), rtol=0, atol=0)
