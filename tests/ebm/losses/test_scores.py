"""Scores and score matching against closed forms: data N(0, 1), energy a x²/2, score -a x."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm.losses import DenoisingScoreMatching, ScoreMatching, SlicedScoreMatching
from nvalchemi.ebm.scores import (
    PROJECTIONS,
    differentiable_gradient,
    energy_gradient,
    exact_divergence,
    random_direction,
    score,
    sliced_derivatives,
)
from nvalchemi.errors import ConfigError, DataError
from nvalchemi.models import EnergyModel, InteratomicPotential, MLPEnergy, PaiNN
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from tests.ebm.quadratic import Quadratic, assert_closed_form, seeded, standard_normal, visited

A = 0.7
LOSSES = {
    "exact": lambda model: ScoreMatching(model),
    "hutchinson": lambda model: ScoreMatching(model, hessian_method="hutchinson"),
    "sliced": lambda model: SlicedScoreMatching(model),
    "denoising": lambda model: DenoisingScoreMatching(model, noise_scale=0.5),
    "denoising, many scales": lambda model: DenoisingScoreMatching(model, noise_scale=[0.1, 0.5, 2.0]),
}


@pytest.mark.parametrize("make", [LOSSES["exact"], LOSSES["hutchinson"], LOSSES["sliced"]], ids=["exact", "hutchinson", "sliced"])
def test_score_matching(make):
    """1/2 E s² + E s' = a²/2 - a."""
    assert_closed_form(make, A, A**2 / 2 - A, A - 1)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_sliced_score_matching_in_three_dimensions(kind):
    """E (v·s)² = a² d whatever the law of the directions, for its covariance is 1."""
    assert_closed_form(
        lambda model: SlicedScoreMatching(model, 2, kind), A, 3 * (A**2 / 2 - A), 3 * (A - 1), x=standard_normal(3)
    )


def test_denoising():
    """1/2 E (-a y + z/σ)² with y = x + σ z: (a² (1 + σ²) - 2 a + 1/σ²) / 2."""
    variance = 1 + 0.5**2
    assert_closed_form(LOSSES["denoising"], A, (A**2 * variance - 2 * A + 4) / 2, A * variance - 1)


def test_denoising_with_many_scales():
    """The mean over scales of σ² times the loss with one scale."""
    scales = [0.1, 0.5, 2.0]
    loss = sum(s**2 * (A**2 * (1 + s**2) - 2 * A + s**-2) / 2 for s in scales) / 3
    slope = sum(s**2 * (A * (1 + s**2) - 1) for s in scales) / 3
    assert_closed_form(LOSSES["denoising, many scales"], A, loss, slope)


@pytest.mark.parametrize("name", LOSSES)
def test_the_sign_is_right(name):
    """B88: at a = 0 a must grow, and after training E(0) < E(3)."""
    model = Quadratic(0.0)
    loss_fn, x = LOSSES[name](model), standard_normal(count=2000)
    optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.1), seeded()
    for step in range(50):
        optimizer.zero_grad()
        loss_fn(x, generator=generator).backward()
        if step == 0:
            assert float(model.net.a.grad) < 0
        optimizer.step()
    low, high = model(torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    assert low < high


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_a_network_by_brute_force(name):
    """The value from the network's own derivatives, written out with torch.func."""
    torch.manual_seed(0)
    model = MLPEnergy(3, 8, activation="tanh").double()
    x = standard_normal(3, 6)
    gradient = torch.func.vmap(torch.func.grad(lambda point: model(point[None])[0]))
    hessian = torch.func.vmap(torch.func.hessian(lambda point: model(point[None])[0]))
    got, noise = LOSSES[name](model)(x, generator=seeded(3)), seeded(3)
    g = gradient(x)
    if name == "exact":
        wanted = (0.5 * g.square().sum(1) - hessian(x).diagonal(dim1=1, dim2=2).sum(1)).mean()
    elif name == "hutchinson":
        v = random_direction(x, "rademacher", noise)
        wanted = (0.5 * g.square().sum(1) - torch.einsum("bi,bij,bj->b", v, hessian(x), v)).mean()
    elif name == "sliced":
        vs = [random_direction(x, "rademacher", noise) for _ in range(5)]
        wanted = torch.stack(
            [(0.5 * (v * g).sum(1).square() - torch.einsum("bi,bij,bj->b", v, hessian(x), v)).mean() for v in vs]
        ).mean()
    elif name == "denoising":
        z = torch.empty_like(x).normal_(generator=noise)
        wanted = 0.5 * (-gradient(x + 0.5 * z) + z / 0.5).square().sum(1).mean()
    else:
        z = torch.empty_like(x).normal_(generator=noise)
        sigma = x.new_tensor([0.1, 0.5, 2.0])[torch.randint(3, (6,), generator=noise)][:, None]
        wanted = 0.5 * (-sigma * gradient(x + sigma * z) + z).square().sum(1).mean()
    assert got.item() == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_noise_is_the_generators(name):
    torch.manual_seed(0)
    model = MLPEnergy(2, 8)
    x = torch.randn(8, 2)
    before = torch.get_rng_state()
    first, again, other = (LOSSES[name](model)(x, generator=seeded(seed)).item() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state()) and first == again
    assert (first != other) or name == "exact"


@pytest.mark.parametrize("name", LOSSES)
def test_the_backward_pass_visits_every_parameter(name):
    """The output bias too, which gets no gradient from it: a wrapper of distributed training waits for the visit."""
    model = MLPEnergy(2, 8)
    loss = LOSSES[name](model)(torch.randn(8, 2, generator=seeded()), generator=seeded())
    assert visited(loss, model) == {n for n, _ in model.named_parameters()}
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["net.4.bias"]


@pytest.mark.parametrize("name", LOSSES)
def test_under_a_strategy_every_parameter_gets_a_gradient(name):
    """Zero for the output bias, so that one process does to it what several do."""
    model = MLPEnergy(2, 8)
    torch.nn.init.ones_(model.net[-1].bias)
    optimizer = OptimizerConfig(torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5})
    batch = torch.randn(8, 2, generator=seeded())
    TrainingStrategy(models=model, optimizer_configs=optimizer, loss_fn=LOSSES[name](model), num_steps=1).run([batch])
    assert model.net[-1].bias.item() == pytest.approx(0.95)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_finite_stays_so(name):
    model = MLPEnergy(2, 8)
    x = torch.zeros(4, 2)
    x[1, 0] = torch.nan
    assert not torch.isfinite(LOSSES[name](model)(x, generator=seeded()))


@pytest.mark.parametrize("name", LOSSES)
def test_works_without_grad_mode(name):
    """A loss can be looked at under no_grad, and then keeps no graph where it needs none."""
    model, x = MLPEnergy(2, 8), torch.zeros(4, 2)
    expected = LOSSES[name](model)(x, generator=seeded()).item()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert LOSSES[name](model)(x.clone(), generator=seeded()).item() == pytest.approx(expected)


def test_divergences_of_a_known_field():
    at = standard_normal(3, 5).requires_grad_()
    matrix = standard_normal(3, 3, seed=1)
    field = at.sin() @ matrix.T
    wanted = (at.cos() * matrix.diagonal()).sum(1)
    torch.testing.assert_close(exact_divergence(field, at), wanted)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    every = [sliced_derivatives(field, at, v.expand(5, 3), at)[1] for v in signs]
    torch.testing.assert_close(torch.stack(every).mean(0), wanted)


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_directions_have_covariance_one(kind):
    v = random_direction(torch.zeros(200_000, 3, dtype=torch.float64), kind, seeded())
    assert float((v.T @ v / len(v) - torch.eye(3)).abs().max()) < 0.02
    if kind == "sphere":
        torch.testing.assert_close(v.square().sum(1), torch.full((200_000,), 3.0, dtype=torch.float64))


def test_images_and_conditions():
    """Any shape of a sample; conditions reach the energy by name."""

    class Labelled(EnergyModel):
        def __init__(self):
            super().__init__()
            self.net = nn.Embedding(3, 1).double()

        def forward(self, x, y):
            return 0.5 * self.net(y).squeeze(1).exp() * x.flatten(1).square().sum(1)

    model, x, y = Labelled(), standard_normal(8, 4).reshape(4, 2, 2, 2), torch.tensor([0, 1, 2, 0])
    a = model.net(y).exp().detach()
    torch.testing.assert_close(score(model, x, y=y), -a.reshape(4, 1, 1, 1) * x)
    loss = ScoreMatching(model)(x, y=y)
    assert loss.item() == pytest.approx(
        float((0.5 * a.square().squeeze(1) * x.flatten(1).square().sum(1) - 8 * a.squeeze(1)).mean())
    )
    assert torch.isfinite(DenoisingScoreMatching(model, 0.1)(x, y=y, generator=seeded()))


def test_the_model_can_be_told_the_scale():
    class Scaled(EnergyModel):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1).double()

        def forward(self, x, sigma):
            return 0.5 * x.square().sum(1) / (1 + sigma.square()) + 0.0 * self.net(sigma[:, None]).squeeze(1)

    x = standard_normal(2, 100_000)
    loss = DenoisingScoreMatching(Scaled(), [0.3, 3.0], conditional=True)(x, generator=seeded())
    wanted = sum(s**2 * (1 / s**2 - 1 / (1 + s**2)) for s in (0.3, 3.0)) / 2  # d/2 σ² (1/σ² - 1/(1 + σ²)), the lowest there is
    assert loss.item() == pytest.approx(wanted, rel=0.02)


def molecules(dtype=torch.float64):
    generator = seeded(2)
    make = lambda n: AtomicData(1.5 * torch.randn(n, 3, generator=generator, dtype=dtype), torch.tensor([6] * n))  # noqa: E731
    return Batch.from_data_list([make(2), make(5), make(3)])


def potential():
    torch.manual_seed(1)
    return InteratomicPotential(PaiNN(["C"], n_features=8, n_interactions=2, cutoff=4.0, n_rbf=5).double(), cutoff=4.0)


def test_atoms_denoise():
    """One term a structure, its squares summed over its atoms."""
    model, batch = potential(), molecules()
    loss_fn = DenoisingScoreMatching(model, noise_scale=0.1)
    got = loss_fn.terms(model, batch, generator=seeded(), step=None, conditions={}).values["loss"]
    noise = torch.empty_like(batch.positions).normal_(generator=seeded())
    noise = torch.cat([part - part.mean(0) for part in noise.split([2, 5, 3])])  # a translation cannot be answered
    gradient = energy_gradient(model, batch.replace(positions=batch.positions + 0.1 * noise))
    squares = (gradient - noise / 0.1).square().sum(1)
    torch.testing.assert_close(got, 0.5 * torch.stack([part.sum() for part in squares.split([2, 5, 3])]), rtol=1e-10, atol=1e-10)
    got.mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_forces_by_hand_give_the_gradient_of_the_loss():
    """The network's own derivatives in training mode, autograd's in evaluation: the same loss and gradients."""
    found = []
    for training in (True, False):
        model = potential().train(training)
        loss = DenoisingScoreMatching(model, noise_scale=0.1)(molecules(), generator=seeded())
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_neighbour_list_follows_the_noise():
    """Two atoms just outside the cutoff that noise brings together interact."""
    from nvalchemi.data.neighbors import neighbor_list

    model, batch = potential(), molecules()
    listed = neighbor_list(batch, 4.0)
    plainly, with_list = (DenoisingScoreMatching(model, noise_scale=2.0)(x, generator=seeded()) for x in (batch, listed))
    assert plainly.item() == pytest.approx(with_list.item(), rel=1e-12)


@pytest.mark.parametrize("make", [LOSSES["hutchinson"], LOSSES["sliced"], LOSSES["denoising, many scales"]])
def test_atoms_of_unequal_structures_are_those_alone(make):
    """A structure's term does not depend on what else is in the batch (with the noise that it gets)."""
    model, batch = potential(), molecules()
    at, _, gradient = differentiable_gradient(model, batch)
    v = random_direction(batch, "sphere", seeded())
    _, together = sliced_derivatives(gradient, at, v, batch)
    start = 0
    for i, structure in enumerate(batch.to_data_list()):
        alone = Batch.from_data_list([structure])
        own, _, field = differentiable_gradient(model, alone)
        direction = v[start : start + structure.num_nodes]
        assert float(direction.square().sum()) == pytest.approx(3 * structure.num_nodes)
        assert sliced_derivatives(field, own, direction, alone)[1].item() == pytest.approx(
            together[i].item(), rel=1e-8, abs=1e-10
        )
        start += structure.num_nodes
    make(model)(batch, generator=seeded()).backward()


@pytest.mark.parametrize("name", LOSSES)
def test_whole_numbers_are_told(name):
    with pytest.raises(DataError, match=r"needed: x.float\(\)"):
        LOSSES[name](MLPEnergy(2, 4))(torch.zeros(4, 2, dtype=torch.uint8))


@pytest.mark.parametrize("name", LOSSES)
def test_conditions_of_other_samples_are_told(name):
    class Labelled(EnergyModel):
        def forward(self, x, y):
            return 0.5 * y * x.square().sum(1)

    x = standard_normal(2, 4)
    for y in (torch.ones(1), torch.ones(3)):
        with pytest.raises(DataError, match=r"'y' does not fit.*needed: a tensor \(4, ...\)"):
            LOSSES[name](Labelled())(x, y=y)
    same = LOSSES[name](Labelled())(x, y=2.0, generator=seeded())
    torch.testing.assert_close(LOSSES[name](Labelled())(x, y=torch.full((4,), 2.0), generator=seeded()), same)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), [], [0.1, -1.0], lambda step: 0.1, "a", [[0.1]]])
def test_noise_that_cannot_be_is_told(bad):
    with pytest.raises(ConfigError, match=r"no such noise.*a positive number, or several"):
        DenoisingScoreMatching(MLPEnergy(2, 4), bad)


def test_what_cannot_be_is_told():
    model = MLPEnergy(2)
    with pytest.raises(ConfigError, match="EnergyModel"):
        ScoreMatching(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="exact or hutchinson"):
        ScoreMatching(model, "approx")
    with pytest.raises(ConfigError, match="rademacher"):
        SlicedScoreMatching(model, 2, "cube")
    with pytest.raises(ConfigError, match="positive"):
        DenoisingScoreMatching(model, [0.1, 0.0])
    with pytest.raises(ConfigError, match="hutchinson"):
        ScoreMatching(potential())(molecules())
