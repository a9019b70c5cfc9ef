"""Losses that draw further samples tell the energy the labels of those for which they were drawn."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.ebm.losses import ContrastiveDivergence, EnergyDiscrepancy, NoiseContrastiveEstimation
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


def test_what_cannot_be_is_told():
    model, x = Labelled(), standard_normal(2, 6)
    with pytest.raises(ConfigError, match="label of another sample"):
        ContrastiveDivergence(model, LangevinDynamics(model, H), persistent=True, buffer_size=8)(x, y=Y)
    with pytest.raises(ConfigError, match="NoUTurnSampler"):
        ContrastiveDivergence(model, NoUTurnSampler(model, H))(x, y=Y)
    with pytest.raises(ConfigError, match="compiled"):
        ContrastiveDivergence(model, LangevinDynamics(model, H).compile())(x, y=Y)
    for wrong in (Y[:4], 1):
        with pytest.raises(DataError, match="'y' does not fit"):
            EnergyDiscrepancy(model)(x, y=wrong)
