import copy

import pytest
import torch
from torch import nn

from nvalchemi.errors import CheckpointError
from nvalchemi.testing import state_differences
from nvalchemi.training.optimizer_state import load_named_state, named_state, settings_that_stay

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
}


def model(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    net[3].weight = net[2].weight
    return net


def stepped(net, optimizer, steps=3):
    for i in range(steps):

        def closure(i=i):
            optimizer.zero_grad()
            loss = (net(torch.full((2, 3), 0.1 * i)) - 1).square().sum()
            loss.backward()
            return loss.detach()  # torch 2.8 warns of a graph

        optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_named_is_taken_back(kind):
    net, other = model(), model()
    optimizer, fresh = stepped(net, KINDS[kind](net.parameters())), KINDS[kind](other.parameters())
    saved = copy.deepcopy(named_state(optimizer, net))
    names = [name for group in saved["param_groups"] for name in group["params"]]
    assert names == ["0.weight", "0.bias", "2.weight", "2.bias", "3.bias"]
    other.load_state_dict(net.state_dict())
    load_named_state(fresh, other, saved)
    assert list(state_differences(optimizer.state_dict(), fresh.state_dict())) == []
    stepped(net, optimizer), stepped(other, fresh)
    assert list(state_differences(net.state_dict(), other.state_dict())) == []


def test_the_order_of_parameters_is_free():
    net, other = model(), model()
    optimizer = stepped(net, torch.optim.Adam(net.parameters()))
    fresh = torch.optim.Adam(list(other.parameters())[::-1])
    load_named_state(fresh, other, named_state(optimizer, net))
    for own, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], fresh.state[theirs]["exp_avg"])


def test_numbers_are_places():
    net, other = model(), model()
    optimizer, fresh = stepped(net, torch.optim.Adam(net.parameters())), torch.optim.Adam(other.parameters())
    load_named_state(fresh, other, optimizer.state_dict())
    assert list(state_differences(optimizer.state_dict(), fresh.state_dict())) == []


def test_other_parameters_are_named():
    net = model()
    saved = named_state(stepped(net, torch.optim.Adam(net.parameters())), net)
    with pytest.raises(CheckpointError, match=r"other parameters than the saved one; found: 0\.bias, 0\.weight"):
        load_named_state(torch.optim.Adam([p for n, p in net.named_parameters() if not n.startswith("0")]), net, saved)
    with pytest.raises(CheckpointError, match="another number of parameter groups; found: 2; needed: 1"):
        groups = [{"params": [net[0].weight]}, {"params": [net[0].bias]}]
        load_named_state(torch.optim.Adam(groups), net, saved)
    with pytest.raises(CheckpointError, match="another number of parameters; found: 1; needed: 5"):
        load_named_state(torch.optim.Adam([net[0].weight]), net, torch.optim.Adam(net.parameters()).state_dict())


def test_a_parameter_of_nobody_goes_by_its_place():
    net, extra = model(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*net.parameters(), extra])
    extra.grad = torch.ones(2)
    optimizer.step()
    saved = named_state(optimizer, net)
    assert saved["param_groups"][0]["params"][-1] == "parameter 5" and list(saved["state"]) == ["parameter 5"]
    fresh = torch.optim.Adam([*net.parameters(), extra])
    load_named_state(fresh, net, saved)
    assert torch.equal(fresh.state[extra]["exp_avg"], optimizer.state[extra]["exp_avg"])


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"lr": 0.5}, []),  # training moves it
        ({"weight_decay": 0.1}, ["weight_decay 0.01 (declared: 0.1)"]),
        (
            {"betas": (0.8, 0.99), "amsgrad": True},
            ["amsgrad False (declared: True)", "betas (0.9, 0.999) (declared: (0.8, 0.99))"],
        ),
        ({"fused": True}, []),
    ],
)
def test_settings_that_are_declared_anew_and_do_not_count_are_told(declared, said):
    net = model()
    saved = named_state(torch.optim.AdamW(net.parameters()), net)
    assert settings_that_stay(torch.optim.AdamW(net.parameters(), **declared), saved) == said


def test_momentum_that_a_schedule_cycles_is_no_setting():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    saved = named_state(optimizer, net)
    assert settings_that_stay(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5), saved) == []
