"""Losses that draw further samples tell the energy the labels of those for which they were drawn."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.losses import ContrastiveDivergence, EnergyDiscrepancy, EnergyMatching, NoiseContrastiveEstimation
from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, LangevinDynamics, NoUTurnSampler
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models import EnergyModel
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from tests.ebm.quadratic import seeded, standard_normal

H, STEPS = 0.1, 3
Y = torch.tensor([0, 2, 1, 2, 0, 1])


class Labelled(EnergyModel):
    """a_y |x|²/2: a well for each of three labels."""

    def __init__(self, stiffness=(0.5, 1.0, 3.0)):
        super().__init__()
        self.net = torch.nn.Module()
        self.net.a = torch.nn.Parameter(torch.tensor(stiffness, dtype=torch.float64))

    def forward(self, x, y):
        return 0.5 * self.net.a[y] * x.square().sum(1)


LOSSES = {
    "contrastive": lambda m: ContrastiveDivergence(m, LangevinDynamics(m, H), k_steps=STEPS, energy_reg_weight=0.0),
    "hmc": lambda m: ContrastiveDivergence(m, HamiltonianMonteCarlo(m, H, 2), k_steps=STEPS, energy_reg_weight=0.0),
    "nuts": lambda m: ContrastiveDivergence(m, NoUTurnSampler(m, H), k_steps=2, energy_reg_weight=0.0),
    "persistent": lambda m: persistent(m, noise=1.0),
    "energy matching": lambda m: EnergyMatching(m, n_langevin_steps=3, cd_clamp=None),
    "noise contrastive": lambda m: NoiseContrastiveEstimation(m, noise_ratio=3),
    "discrepancy": lambda m: EnergyDiscrepancy(m, n_samples=2),
}


def test_each_chain_keeps_its_label():
    """Without noise a chain shrinks by 1 - h a_y a step."""
    model, x = Labelled(), standard_normal(2, len(Y))
    sampler = LangevinDynamics(model, H, noise_scale=0.0)
    loss, negatives = ContrastiveDivergence(model, sampler, k_steps=STEPS, energy_reg_weight=0.0)(x, y=Y)
    a = model.net.a[Y]
    torch.testing.assert_close(negatives, x * ((1 - H * a) ** STEPS)[:, None].detach())
    wanted = (0.5 * a * (x.square() - negatives.square()).sum(1)).mean()
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert model.net.a.grad.all() and sampler.model is model


@pytest.mark.parametrize("name", LOSSES)
def test_one_label_is_one_energy(name):
    """A batch of one label, and an energy that knows only this label: the same loss and gradient, and nothing for the others."""
    x = standard_normal(2, 6)
    one, all_three = Labelled((3.0,)), Labelled()
    values = []
    for model, y in ((one, 0), (all_three, 2)):
        found = LOSSES[name](model)(x, generator=seeded(), y=torch.full((6,), y))
        values.append(found[0] if isinstance(found, tuple) else found)
        values[-1].backward()
    torch.testing.assert_close(*values)
    torch.testing.assert_close(all_three.net.a.grad, torch.tensor([0.0, 0.0, float(one.net.a.grad[0])], dtype=torch.float64))


@pytest.mark.parametrize("name", LOSSES)
def test_labels_come_with_their_batch_under_a_strategy(name):
    model = Labelled()
    before = model.net.a.detach().clone()
    TrainingStrategy(
        models=model, optimizer_configs=OptimizerConfig(torch.optim.SGD, {"lr": 0.1}), loss_fn=LOSSES[name](model), num_steps=1
    ).run([(standard_normal(2, 6), Y)])
    assert (model.net.a != before).all()


def persistent(model, **settings):
    settings = {"buffer_size": 9, "init_steps": 0, "new_sample_ratio": 0.0, "energy_reg_weight": 0.0, **settings}
    sampler = LangevinDynamics(model, H, noise_scale=settings.pop("noise", 0.0))
    return ContrastiveDivergence(model, sampler, k_steps=STEPS, persistent=True, **settings)


def test_a_persistent_chain_keeps_a_label_of_its_own():
    """Without noise each shrinks by 1 - h a of its own label, whatever the labels of the batches; the loss is of these labels too."""
    model, x = Labelled(), standard_normal(2, len(Y))
    loss_fn = persistent(model)
    loss_fn.initialize_buffer(x, seeded(), {"y": Y})
    buffer, slots = loss_fn.replay_buffer, torch.arange(9)
    labels = torch.cat([Y, Y[:3]])
    start = buffer.samples
    for call in range(3):
        loss, negatives = loss_fn(x, generator=seeded(call), y=Y.roll(call))
        assert torch.equal(buffer.conditions(slots)["y"], labels)
    a = model.net.a.detach()
    moves = (buffer.samples / start).log()[:, 0] / (1 - H * a[labels]).log() / STEPS
    torch.testing.assert_close(moves, moves.round())  # how often each was drawn
    assert moves.min() > 0.5 and round(float(moves.sum())) == 18
    which = torch.tensor([int((buffer.samples == row).all(1).nonzero()) for row in negatives])
    chains = 0.5 * model.net.a[labels[which]] * negatives.square().sum(1)
    torch.testing.assert_close(loss, (model(x, Y.roll(2)) - chains).mean())


def test_a_chain_that_begins_anew_takes_the_label_of_the_batch():
    model, x = Labelled(), standard_normal(2, len(Y))
    loss_fn = persistent(model, buffer_size=6, new_sample_ratio=1.0)
    loss_fn(x, generator=seeded(), y=Y)
    loss_fn(x, generator=seeded(1), y=(Y + 1) % 3)
    assert sorted(loss_fn.replay_buffer.conditions(torch.arange(6))["y"].tolist()) == sorted(((Y + 1) % 3).tolist())


def test_labels_draw_each_its_own_density():
    """Chains of three wells in one buffer: their variances are those of their labels."""
    model, y = Labelled(), torch.arange(3).repeat(400)
    loss_fn = persistent(model, noise=1.0, buffer_size=1200)
    for call in range(20):
        loss_fn(standard_normal(2, 1200), generator=seeded(call), y=y)
    told, ends = loss_fn.replay_buffer.conditions(torch.arange(1200))["y"], loss_fn.replay_buffer.samples
    for label, a in enumerate(model.net.a.tolist()):
        found = float(ends[told == label].var(correction=0))
        assert found == pytest.approx(1 / a / (1 - H * a / 2), rel=4 * (2 / 800) ** 0.5)


def test_labels_of_chains_are_saved_and_dealt_out_with_them():
    """A loss whose chains have not begun takes them too; other numbers of ranks get chains with their own labels."""
    model, x = Labelled(), standard_normal(2, len(Y))
    first = persistent(model, noise=1.0, new_sample_ratio=0.3)
    first(x, generator=seeded(), y=Y)
    state = first.state_dict()
    again = persistent(model, noise=1.0, new_sample_ratio=0.3)
    again.load_state_dict(state)
    for got, wanted in zip(again(x, generator=seeded(2), y=Y), first(x, generator=seeded(2), y=Y), strict=True):
        assert torch.equal(got, wanted)
    pairs = []
    for rank in range(2):
        part = persistent(model, noise=1.0)
        part.load_state_dict(part.divide_anew([state], rank, 2))
        slots = torch.arange(len(part.replay_buffer))
        pairs += zip(part.replay_buffer.conditions(slots)["y"].tolist(), part.replay_buffer.samples.tolist(), strict=True)
    saved = state["replay_buffer"]
    assert sorted(pairs) == sorted(zip(saved["conditions"]["y"].tolist(), saved["samples"].tolist(), strict=True))
    first.replay_buffer.clear()
    assert first.replay_buffer.state_dict()["conditions"] == {}


def test_chains_of_energy_matching_keep_their_labels():
    """Those from data have the labels of their beginnings, those from noise the others: no label more or less than in the batch."""
    model, x = Labelled(), standard_normal(2, len(Y))
    loss_fn = EnergyMatching(model, n_langevin_steps=STEPS, langevin_dt=H, epsilon_max=0.0, cd_trim_fraction=0.0, cd_clamp=None)
    values, negatives = loss_fn.terms(model, x, generator=seeded(), step=None, conditions={"y": Y})
    order = torch.randperm(len(Y), generator=seeded())
    noise = torch.empty(3, 2, dtype=x.dtype).normal_(generator=(g := seeded(), torch.randperm(len(Y), generator=g))[0])
    a = model.net.a[Y[order]]
    wanted = torch.cat([noise, x[order[3:]]]) * ((1 - H * a) ** STEPS)[:, None]
    torch.testing.assert_close(negatives, wanted.detach())
    torch.testing.assert_close(values["contrastive"], 2.0 * (model(x, Y) - model(negatives, Y[order])), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_is_told():
    model, x = Labelled(), standard_normal(2, 6)
    loss_fn = persistent(model, buffer_size=8)
    loss_fn(x, y=Y)
    for other in ({}, {"y": Y, "z": Y}):
        with pytest.raises(ConfigError, match=r"other conditions than those of the batch.*needed: y"):
            loss_fn(x, **other)
    with pytest.raises(ConfigError, match="by their own names"):
        EnergyDiscrepancy(model)(x, model_kwargs={"y": Y})
    with pytest.raises(ConfigError, match="compiled"):
        ContrastiveDivergence(model, LangevinDynamics(model, H).compile())(x, y=Y)
    for wrong in (Y[:4], 1):
        with pytest.raises(DataError, match="'y' does not fit"):
            EnergyDiscrepancy(model)(x, y=wrong)


@pytest.mark.parametrize("name", LOSSES)
def test_labels_that_were_made_in_inference_mode(name):
    """An energy keeps them for its gradient, which tensors of that mode refuse."""
    model, x = Labelled(), standard_normal(2, 6)
    expected = LOSSES[name](model)(x, y=Y, generator=seeded())
    with torch.inference_mode():
        found = LOSSES[name](model)(x.clone(), y=Y.clone(), generator=seeded())
        drawn = LangevinDynamics(model, H).sample(x.clone(), n_steps=2, y=Y.clone())
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    torch.testing.assert_close(first(found), first(expected))
    assert not drawn.is_inference()
