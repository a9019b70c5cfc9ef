"""The hand-written passes give what autograd derives from the plain network."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from tests.models.samples import crystal, molecule, painn


def run(model, batch, fast, outputs):
    model._gives_gradient = fast
    model.zero_grad()
    found = model.predict(batch, outputs)
    loss = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for value in found.values():
        weights = torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.3
        loss = loss + (weights * torch.where(value.isnan(), 0.0, value.double()) ** 2).sum() * 1e-3
    loss.backward()
    return found, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("outputs", [("energy", "forces"), ("forces",), ("energy", "forces", "stress"), ("stress",)])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_equal_to_autograd(layers, outputs):
    model = painn(n_interactions=layers)
    batch = Batch.from_data_list([molecule(9), crystal(), molecule(1), molecule(4, seed=2)])
    expected, gradients = run(model, batch, False, outputs)
    found, fast = run(model, batch, True, outputs)
    for name in outputs:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10, equal_nan=True)
    for name, gradient in gradients.items():
        assert fast[name] is not None, f"{name} has no gradient"
        torch.testing.assert_close(fast[name], gradient, rtol=1e-8, atol=1e-8 * float(gradient.abs().max() + 1e-6), msg=name)


def test_no_edges():
    model, batch = painn(), Batch.from_data_list([AtomicData([[0.0, 0, 0], [0, 0, 30.0]], [1, 8]).to(dtype=torch.float64)])
    expected, gradients = run(model, batch, False, ("energy", "forces"))
    found, fast = run(model, batch, True, ("energy", "forces"))
    torch.testing.assert_close(found["energy"], expected["energy"])
    for name, gradient in gradients.items():
        torch.testing.assert_close(fast[name], gradient, rtol=0, atol=1e-12)


def test_backward_twice_and_in_pieces():
    model, batch = painn(), Batch.from_data_list([molecule(5)])
    out = model.predict(batch)
    out["energy"].sum().backward(retain_graph=True)
    out["forces"].square().sum().backward()
    pieces = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = model.predict(batch)
    (out["energy"].sum() + out["forces"].square().sum()).backward()
    for piece, p in zip(pieces, model.parameters(), strict=True):
        torch.testing.assert_close(piece, p.grad)


def test_changed_weights_between_forward_and_backward_are_noticed():
    model, batch = painn(), Batch.from_data_list([molecule(5)])
    loss = model.predict(batch)["forces"].square().sum()
    with torch.no_grad():
        model.net.embedding.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_third_derivative_is_refused_here_and_there_by_the_plain_way():
    model, batch = painn(), Batch.from_data_list([molecule(4)])
    loss = model.predict(batch)["forces"].square().sum()
    (gradient,) = torch.autograd.grad(loss, [model.net.embedding], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    loss = model.gradient(batch, create_graph=True).square().sum()
    (gradient,) = torch.autograd.grad(loss, [model.net.embedding], create_graph=True)
    gradient.sum().backward()
    assert model.net.embedding.grad.isfinite().all()


def test_frozen_parameters_stay_frozen():
    model, batch = painn(), Batch.from_data_list([molecule(4)])
    model.net.embedding.requires_grad_(False)
    model.predict(batch)["forces"].square().sum().backward()
    assert model.net.embedding.grad is None
    assert model.net.readout.out.grad is not None
