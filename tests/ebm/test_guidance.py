"""Classifier-free guidance, and conditions left out in training, on Gaussians whose guided density is known."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm.guidance import ClassifierFreeGuidance, left_out
from nvalchemi.ebm.losses import ConditionDropout, ContrastiveDivergence, FlowMatching, ScoreMatching
from nvalchemi.ebm.samplers import FlowSampler, LangevinDynamics, MetropolisAdjustedLangevin, NoUTurnSampler
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from tests.ebm.quadratic import seeded, standard_normal

NONE = 3
"""The label that stands for none."""


class Labelled(EnergyModel):
    """a_y |x - m_y|²/2."""

    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.a = nn.Parameter(torch.tensor([1.0, 2.0, 4.0, 0.5], dtype=torch.float64))
        self.net.m = nn.Parameter(torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=torch.float64))
        self.calls = []

    def forward(self, x, y):
        self.calls.append(y.detach().clone())
        return 0.5 * self.net.a[y] * (x - self.net.m[y][:, None]).square().sum(1)


class Field(nn.Module):
    def forward(self, x, t, y, other=None):
        assert t.shape == y.shape[:1] == x.shape[:1] and (other is None or other.shape == t.shape)
        return (y[:, None] + t[:, None] + (0 if other is None else other[:, None])) * x, ["activations"]


@pytest.mark.parametrize("w", [0.0, 0.4, 1.0, 3.0])
def test_the_guided_energy_is_linear_between_both(w):
    model, x, y = Labelled(), standard_normal(2, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    guided, free = ClassifierFreeGuidance(model, w, NONE), torch.full_like(y, NONE)
    assert isinstance(guided, EnergyModel) and isinstance(guided, ClassifierFreeGuidance)
    wanted = model(x, free) + w * (model(x, y) - model(x, free))
    model.calls.clear()
    torch.testing.assert_close(guided(x, y=y), wanted)
    assert len(model.calls) == 1 and len(model.calls[0]) == (6 if w == 0 else 12)
    slope = model.gradient(x, y=free) + w * (model.gradient(x, y=y) - model.gradient(x, y=free))
    torch.testing.assert_close(guided.gradient(x, y=y), slope)


@pytest.mark.parametrize("make", [lambda m: MetropolisAdjustedLangevin(m, 0.1), lambda m: NoUTurnSampler(m, 0.4)])
def test_guided_samples(make):
    """The density of the guided energy has the precision u + w (c - u), and the mean between both by their weights."""
    model, w, y = Labelled(), 2.0, torch.tensor([1, 2]).repeat(2000)
    sampler = make(ClassifierFreeGuidance(model, w, NONE))
    x = sampler.sample(torch.zeros(4000, 1, dtype=torch.float64), n_steps=60, generator=seeded(), y=y)
    for label in (1, 2):
        (c, u), m = model.net.a.detach()[[label, NONE]].tolist(), model.net.m[label].item()
        precision = u + w * (c - u)
        found = x[y == label]
        assert abs(found.mean() - w * c * m / precision) < 4 * (precision * 2000) ** -0.5
        assert abs(found.var() * precision - 1) < 4 * (2 / 2000) ** 0.5


def test_a_guided_field_is_a_field():
    x, y, t = standard_normal(2, 4), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    guided = ClassifierFreeGuidance(Field(), 2.0, 0.5)
    assert not isinstance(guided, EnergyModel)
    torch.testing.assert_close(guided(x, t, y=y), (0.5 + 2 * (y - 0.5) + t)[:, None] * x)
    torch.testing.assert_close(guided(x, t, y=y, other=y), (0.5 + 2 * (y - 0.5) + t + y)[:, None] * x)
    some = ClassifierFreeGuidance(Field(), 2.0, 0.5, guide_channels=1)(x, t, y=y)
    torch.testing.assert_close(some[:, :1], guided(x, t, y=y)[:, :1])
    torch.testing.assert_close(some[:, 1:], ((0.5 + t)[:, None] * x)[:, 1:])
    moved = FlowSampler(guided, integrator="rk4").sample(x=x, n_steps=50, y=y)
    torch.testing.assert_close(moved, torch.exp(0.5 + 2 * (y - 0.5) + 0.5)[:, None] * x, rtol=1e-3, atol=0)


def test_guided_structures():
    class Springs(EnergyModel):
        def forward(self, x, y):
            return x.positions.new_zeros(len(x)).index_add(0, x.batch_idx, x.positions.square().sum(1)) * y

    sizes, y = (2, 1, 4), torch.tensor([1.0, 2.0, 3.0])
    x = Batch.from_data_list(
        [
            AtomicData(positions=torch.randn(n, 3, generator=seeded()), atomic_numbers=torch.ones(n, dtype=torch.long))
            for n in sizes
        ]
    )
    torch.testing.assert_close(ClassifierFreeGuidance(Springs(), 3.0, 1.0)(x, y=y), Springs()(x, 1 + 3 * (y - 1)))


def test_without_a_condition_it_is_the_model():
    plain = ClassifierFreeGuidance(nn.Identity(), 2.0, 0)
    assert torch.equal(plain(torch.ones(2, 3)), torch.ones(2, 3))


def test_what_stands_for_no_condition():
    y, mask = torch.arange(8.0).view(4, 2), torch.tensor([True, False, True, False])
    for null in (torch.tensor([7.0, 8.0]), lambda y, mask: torch.where(mask[:, None], torch.tensor([7.0, 8.0]), y)):
        assert torch.equal(left_out(y, mask, null), torch.tensor([[7.0, 8.0], [2, 3], [7, 8], [6, 7]]))
    learned = nn.Parameter(torch.zeros(2))
    left_out(y, mask, learned).sum().backward()
    assert torch.equal(learned.grad, torch.full((2,), 2.0))
    labels = torch.tensor([0, 1, 2, 0])
    assert torch.equal(left_out(labels, mask, 3), torch.tensor([3, 1, 3, 0]))
    for null, told in (
        (torch.zeros(3), "one sample"),
        (torch.zeros(4, 2), "one sample"),
        (lambda y, mask: y[0], "another shape"),
    ):
        with pytest.raises(ConfigError, match=told):
            left_out(y, mask, null)
    with pytest.raises(ConfigError, match="no value"):
        left_out(labels, mask, 0.5)
    for bad in (None, "none", True):
        with pytest.raises(ConfigError, match="cannot be that"):
            ClassifierFreeGuidance(Field(), 1.0, bad)
    for bad in ({"guidance_scale": float("nan")}, {"guide_channels": 0}):
        with pytest.raises(ConfigError, match="no such guidance"):
            ClassifierFreeGuidance(Field(), **{"guidance_scale": 1.0, "null_condition": 0, **bad})
    with pytest.raises(ConfigError, match="no channels"):
        ClassifierFreeGuidance(Labelled(), 1.0, 0, guide_channels=1)
    with pytest.raises(DataError, match="'y' does not fit"):
        ClassifierFreeGuidance(Labelled(), 1.0, 0)(standard_normal(2, 3), y=torch.tensor([1]))


def test_it_is_copied_and_saved_like_any_module():
    guided, x, y = ClassifierFreeGuidance(Labelled(), 2.0, NONE), standard_normal(2, 3), torch.tensor([0, 1, 2])
    for other in (copy.deepcopy(guided), pickle.loads(pickle.dumps(guided))):
        assert type(other) is type(guided) and torch.equal(other(x, y=y), guided(x, y=y))
    assert list(guided.state_dict()) == ["model.net.a", "model.net.m"] and "guidance_scale=2.0" in repr(guided)


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_conditions_are_left_out_by_chance(chance):
    model, count = Labelled(), 4000
    x, y = standard_normal(2, count), torch.arange(3).repeat(count)[:count]
    loss_fn = ConditionDropout(ScoreMatching(model), chance, NONE)
    value = loss_fn(x, y=y, generator=seeded())
    (told,) = model.calls
    assert abs(float((told == NONE).double().mean()) - chance) <= 4 * (chance * (1 - chance) / count) ** 0.5
    assert torch.equal(told[told != NONE], y[told != NONE])
    assert torch.equal(value, ScoreMatching(model)(x, y=told))
    model.calls.clear()
    loss_fn(x, y=y, generator=seeded())
    assert torch.equal(model.calls[0], told)
    model.eval()
    loss_fn(x, y=y, generator=seeded())
    assert torch.equal(model.calls[-1], y)


def test_chains_and_state_are_those_of_the_loss():
    model, x, y = Labelled(), standard_normal(2, 32), torch.arange(3).repeat(11)[:32]

    def made():
        inner = ContrastiveDivergence(
            model, LangevinDynamics(model, 0.1), k_steps=2, persistent=True, buffer_size=64, init_steps=0
        )
        return ConditionDropout(inner, 0.5, NONE)

    loss_fn = made()
    loss, negatives = loss_fn(x, y=y, generator=seeded())
    assert loss.isfinite() and negatives.shape == x.shape and loss_fn.rank_local
    labels = loss_fn.chains.conditions(torch.arange(64))["y"]
    assert 0.3 < float((labels == NONE).double().mean()) < 0.7
    other = made()
    other.load_state_dict(loss_fn.state_dict())
    assert torch.equal(other.chains.conditions(torch.arange(64))["y"], labels)
    assert other.divide_anew([loss_fn.state_dict()], 0, 1).keys() == {"replay_buffer"}


def test_under_a_strategy():
    model, x, y = Labelled(), standard_normal(2, 32), torch.arange(3).repeat(11)[:32]
    run = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 1e-3}),
        loss_fn=ConditionDropout(ScoreMatching(model), 1.0, NONE),
        num_steps=2,
    ).run([(x, y)])
    assert run.progress.step == 2 and all((told == NONE).all() for told in model.calls)


def test_what_cannot_be_left_out_is_told():
    model, x = Labelled(), standard_normal(2, 4)
    with pytest.raises(ConfigError, match=r"no condition 'y'.*loss_fn\(x, y=...\)"):
        ConditionDropout(ScoreMatching(model), 0.1, NONE)(x)
    for wrong in ([0, 1, 2, 0], torch.zeros(3, dtype=torch.long)):
        with pytest.raises(DataError, match=r"'y' does not fit.*needed: a tensor \(4, ...\)"):
            ConditionDropout(ScoreMatching(model), 0.1, NONE)(x, y=wrong)
    with pytest.raises(ConfigError, match="in a loss"):
        ConditionDropout(model, 0.1, NONE)
    for chance in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            ConditionDropout(FlowMatching(Field()), chance, NONE)
