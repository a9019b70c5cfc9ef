"""Modules that keep no activations: the same gradients to any order, and less memory."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nvalchemi.data import Batch
from nvalchemi.distributed.recompute import is_recomputed, keep, recompute
from nvalchemi.errors import TrainingError
from nvalchemi.models import InteratomicPotential, PaiNN
from tests.memory import MostAlive
from tests.multiprocess.gathered_cases import LOSSES, WIDTH, Energy, structures
from tests.multiprocess.odd_net_cases import DIM, Waves


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(got, wanted):
    scale = max(float(g.abs().max()) for g in wanted if g is not None)
    for a, b in zip(got, wanted, strict=True):
        if a is None or b is None:  # a part of the graph that torch leaves out is zero here
            assert not any(g.any() for g in (a, b) if g is not None)
        else:
            assert float((a - b).abs().max()) <= 1e-12 * scale


def after_backward(model, modules, loss):
    """The gradients with and without the modules recomputed."""
    found = []
    for chosen in ([], modules):
        for module in chosen:
            recompute(module)
        model.zero_grad()
        torch.manual_seed(1)
        loss(model).backward()
        found.append(gradients(model))
    return found


def first_order(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("loss", [*LOSSES, "first_order"])
def test_gradients_of_any_order(loss):
    torch.manual_seed(0)
    model = Energy(dropout=0.3).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    function = LOSSES.get(loss, first_order)
    wanted, got = after_backward(model, model.net.blocks, lambda m: function(m, x))
    assert_equal(got, wanted)


@pytest.mark.parametrize("loss", ["score", "first_order"])
def test_complex_numbers_between_modules_have_their_gradient(loss):
    torch.manual_seed(0)
    model = Energy().double()
    model.net = Waves().double()
    x = torch.randn(5, DIM, dtype=torch.float64)
    function = LOSSES.get(loss, first_order)
    wanted, got = after_backward(model, [model.net.into], lambda m: function(m, x))
    assert_equal(got, wanted)
    assert all(bool(p.grad.any()) for p in model.net.into.parameters())


@pytest.mark.parametrize("share", [False, True])
def test_twice_in_one_pass_and_shared_weights(share):
    """A module that is called twice, with a weight that two of its parts hold."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    if share:
        part[2].weight = part[0].weight
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def loss(m):
        (slope,) = torch.autograd.grad(m(m(x)).square().sum(), x, create_graph=True)
        return slope.square().sum()

    wanted, got = after_backward(part, [part], loss)
    assert_equal(got, wanted)


class Reads(nn.Module):
    """Reads a tensor from its attribute, or from inside an object; with a dropout and a running mean."""

    def __init__(self, how):
        super().__init__()
        self.how, self.lin, self.drop, self.norm = how, nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.held = None

    def forward(self, x):
        other = self.held if self.how == "attribute" else x.other
        return self.drop(torch.tanh(self.norm(self.lin(x if self.how == "attribute" else x.x)))) * other


@pytest.mark.parametrize("how", ["attribute", "object"])
def test_tensors_that_are_no_arguments_have_their_gradient(how):
    """What an operation of its arguments would lose in silence goes through torch's checkpoint."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"before": nn.Linear(4, 4), "part": Reads(how)}).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def loss(m):
        other = m["before"](x)
        m["part"].held = other
        y = m["part"](x if how == "attribute" else SimpleNamespace(x=x, other=other))
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y.sum() + slope.square().sum()

    wanted, got = after_backward(model, [model["part"]], loss)
    assert_equal(got, wanted)
    assert all(g is not None and g.any() for g in got)
    assert model["part"].norm.num_batches_tracked.item() == 2  # one for each of the two passes of this test


@pytest.mark.parametrize("hides", [False, True])
def test_running_means_move_once(hides):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    twin = copy.deepcopy(model)
    recompute(twin)
    twin.__dict__["forward"]._hides = hides
    x = torch.randn(6, 4, dtype=torch.float64)
    for m in (model, twin):
        at = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(at).square().sum(), at, create_graph=True)
        slope.square().sum().backward()
    assert twin[1].num_batches_tracked.item() == 1
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert_equal(gradients(twin), gradients(model))


def test_nothing_is_computed_again_without_gradients_or_in_eval_mode():
    calls = []

    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    model = Counts(3, 3)
    recompute(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        model(x)
    assert len(calls) == 1
    model.eval()
    model(x).sum().backward()
    assert len(calls) == 2
    model.train()
    model(x).sum().backward()
    assert len(calls) == 4


def test_names_copies_and_the_way_back():
    model = Energy()
    before = list(model.state_dict())
    own = model.net.blocks[1].forward
    model.net.blocks[1].__dict__["forward"] = own  # as some wrappers do
    for block in model.net.blocks:
        recompute(block)
    assert list(model.state_dict()) == before and is_recomputed(model)
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        nn.init.zeros_(p)
    x = torch.randn(3, WIDTH)
    assert twin(x).abs().max() == 0 != model(x).abs().max()  # a copy runs with its own weights
    for block in model.net.blocks:
        keep(block)
    assert not is_recomputed(model)
    assert model.net.blocks[1].__dict__["forward"] == own and "forward" not in model.net.blocks[0].__dict__


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("hidden", [False, True], ids=["data", "activations"])
def test_inputs_that_are_changed_in_place_are_an_error(hidden, hides):
    """Computed again from data that were changed it would give other gradients, and nobody would know."""
    model = nn.Sequential(nn.Linear(3, 3), InPlace(3, 3)) if hidden else nn.Sequential(InPlace(3, 3))
    recompute(model[-1])
    model[-1].__dict__["forward"]._hides = hides
    with pytest.raises(TrainingError, match=r"InPlace changes its input in place.*on a copy"):
        model(torch.randn(2, 3))


@pytest.mark.timeout(300)
def test_under_torch_func_and_while_traced():
    """Samplers' ``compile`` does both."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    wanted = torch.func.grad(lambda x: part(x).sum())(x)
    recompute(part)
    assert torch.equal(torch.func.grad(lambda x: part(x).sum())(x), wanted)
    assert torch.func.vmap(part)(x).shape == (5, 1)
    traced = torch.compile(torch.func.grad(lambda x: part(x).sum()), backend="eager", fullgraph=True)
    assert torch.allclose(traced(x), wanted, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["first_order", "score"])
def test_under_autocast(loss, dtype):
    """What is computed again is rounded as the first time."""
    torch.manual_seed(0)
    model = Energy(dropout=0.3)
    x = torch.randn(5, WIDTH)
    function = LOSSES.get(loss, first_order)

    def short(m):
        with torch.autocast("cpu", dtype):
            return function(m, x)

    wanted, got = after_backward(model, model.net.blocks, short)
    scale = max(float(g.abs().max()) for g in wanted if g is not None)
    for a, b in zip(got, wanted, strict=True):
        if a is not None and b is not None:
            assert float((a - b).abs().max()) <= 2e-3 * scale


@pytest.mark.parametrize("order", [1, 2, 3])
def test_less_memory(order):
    """The blocks' inner activations are never there all at once: the hidden ones, two thirds of all, of one block of eight."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    blocks = nn.Sequential(*(Block() for _ in range(8)))
    x = torch.randn(256, 16)
    most = []
    for chosen in ([], blocks):
        for block in chosen:
            recompute(block)
        blocks.zero_grad()
        with MostAlive() as seen:
            at = x.clone().requires_grad_()
            loss = blocks(at).square().sum()
            for _ in range(order - 1):
                loss = torch.autograd.grad(loss, at, create_graph=True)[0].square().sum()
            loss.backward()
        most.append(seen.most)
    assert most[1] < {1: 0.5, 2: 0.45, 3: 0.4}[order] * most[0], most


@pytest.mark.parametrize("quantities", [("energy",), ("energy", "forces"), ("energy", "forces", "stress")])
def test_a_potentials_layers(quantities):
    """PaiNN's derivative by hand keeps the activations of all layers; layers that are computed again are differentiated in its place."""
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(elements=[1, 6, 8], n_features=8, n_interactions=3, n_rbf=6).double())
    cell, repeats = 9.0 * torch.eye(3, dtype=torch.float64), torch.tensor([True, True, True])
    batch = Batch.from_data_list([s.replace(cell=cell, pbc=repeats) for s in structures()])
    memory = []

    def loss(m):
        found = m.predict(batch, quantities)
        return sum(value.square().sum() for value in found.values())

    for chosen in ([], model.net.layers):
        for layer in chosen:
            recompute(layer)
        with MostAlive() as seen:
            loss(model).backward()
        memory.append(seen.most)
        model.zero_grad()
        keep_all(model.net.layers)
    wanted, got = after_backward(model, model.net.layers, loss)
    assert_equal(got, wanted)
    assert memory[1] < memory[0], memory


def keep_all(modules):
    for module in modules:
        keep(module)
