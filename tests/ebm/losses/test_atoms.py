"""Losses on structures of unequal sizes, against closed forms on springs."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.ebm.losses import (
    ContrastiveDivergence,
    DenoisingScoreMatching,
    EnergyDiscrepancy,
    EnergyMatching,
    EquilibriumMatching,
    FlowMatching,
    NoiseContrastiveEstimation,
)
from nvalchemi.ebm.samplers import HamiltonianMonteCarlo, LangevinDynamics, MetropolisAdjustedLangevin
from nvalchemi.errors import ConfigError
from tests.ebm.molecules import Springs, bumps, crystals, equilibrium, molecules, pair_springs

SIZES = (2, 3, 5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def constant(model: torch.nn.Module) -> torch.nn.Parameter:
    return next(model.parameters())


def close(values: torch.Tensor, wanted: float) -> None:
    error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - wanted) < 3 * error < 0.3 * abs(wanted)


@pytest.mark.parametrize("make", [Springs, pair_springs])
@pytest.mark.parametrize("k", [0.4, 1.5])
def test_denoising_is_its_closed_form(make, k):
    """B88: with v the variance of noisy coordinates, L = 3 (n - 1) (n² k² v - 2 n k + 1/σ²) / 2, and its derivative with respect to k."""
    sigma, model = 0.4, make(k)
    batch = equilibrium(SIZES * 1500, k=1.0)
    loss_fn = DenoisingScoreMatching(model, noise_scale=sigma)
    terms = loss_fn.terms(model, batch, generator=seeded(), step=None, conditions={}).values["loss"]
    for i, n in enumerate(SIZES):
        v = 1 / n + sigma**2
        rest = 0.0 if make is pair_springs else 1.5 / sigma**2  # what a translation costs that is not taken off
        close(terms[i::3].detach(), 1.5 * (n - 1) * (n * n * k * k * v - 2 * n * k + 1 / sigma**2) + rest)
        # a structure's loss is quadratic in k: a mean of 50 groups has the mean and the error of its derivative
        groups = [g.mean() for g in terms[i::3].chunk(50)]
        slopes = torch.stack([torch.autograd.grad(g, constant(model), retain_graph=True)[0] for g in groups])
        close(slopes, 3 * (n - 1) * (n * n * k * v - n))


def test_translations_change_no_gradient():
    """The noise of a potential has no mean over a structure; the gradients are those of the whole noise."""
    batch, slopes, losses = molecules((1, *SIZES)), [], []
    for make in (Springs, pair_springs):
        for scale in (0.3, [0.1, 0.3]):
            model = make(0.7)
            loss = DenoisingScoreMatching(model, noise_scale=scale)(batch, generator=seeded())
            loss.backward()
            slopes.append(constant(model).grad)
            losses.append(loss.item())
    assert slopes[0].item() == pytest.approx(slopes[2].item(), rel=1e-10)
    assert slopes[1].item() == pytest.approx(slopes[3].item(), rel=1e-10)
    assert losses[2] < losses[0] and losses[3] < losses[1]


def test_denoising_of_crystals_sees_the_neighbours_after_the_noise():
    model, batch = bumps(), crystals(3, n=4)
    terms = DenoisingScoreMatching(model, 0.5).terms(model, batch, generator=seeded(), step=None, conditions={}).values["loss"]
    noise = torch.empty_like(batch.positions).normal_(generator=seeded())
    noise = noise - noise.view(3, 4, 3).mean(1).repeat_interleave(4, 0)
    forces = model.predict(batch.replace(positions=batch.positions + 0.5 * noise), ("forces",))["forces"]
    wanted = 0.5 * (forces - noise / -0.5).square().view(3, 12).sum(1)
    torch.testing.assert_close(terms, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("persistent", [False, True])
def test_contrastive_divergence_has_the_gradient_of_the_likelihood(persistent):
    """B88: where the chains are in equilibrium, dL/dk is 3 (n - 1) / 2 (1/k_data - 1/k): negative where the springs are too soft."""
    model, data = pair_springs(0.5), equilibrium(SIZES * 200, k=1.0)
    sampler = HamiltonianMonteCarlo(model, 0.4, n_leapfrog_steps=3, jitter=0.2)
    loss_fn = ContrastiveDivergence(
        model,
        sampler,
        k_steps=12,
        persistent=persistent,
        buffer_size=600,
        new_sample_ratio=0.0,
        init_steps=5,
        energy_reg_weight=0.0,
    )
    values, negatives = loss_fn.terms(model, data, generator=seeded(), step=None, conditions={})
    assert isinstance(negatives, Batch)
    for n in SIZES:
        # chains come in the order of their slots, so that a row of the difference may be of two sizes
        ours, theirs = ((model(x) / 0.5).detach()[x.num_nodes_per_graph == n] for x in (data, negatives))
        close(ours, 1.5 * (n - 1))
        close(theirs, 1.5 * (n - 1) / 0.5)
    loss = values["contrastive"].mean()
    loss.backward()
    slope = constant(model).grad.item()
    wanted = sum(1.5 * (n - 1) * (1 - 2) for n in SIZES) / 3
    assert slope < 0 and slope == pytest.approx(wanted, rel=0.15)


def test_persistent_chains_of_structures_go_on():
    """B90: without steps the negatives are the data, or the chains kept; with steps the chains hold their ends."""
    model, data = bumps(), Batch.from_data_list([*crystals(2, n=3).to_data_list(), *molecules((1, 4)).to_data_list()])
    still = ContrastiveDivergence(model, LangevinDynamics(model, 0.01), k_steps=0)
    assert torch.equal(still(data, generator=seeded())[1].positions, data.positions)

    sampler = MetropolisAdjustedLangevin(model, 0.05)
    loss_fn = ContrastiveDivergence(model, sampler, k_steps=0, persistent=True, buffer_size=6, new_sample_ratio=0, init_steps=3)
    loss_fn.initialize_buffer(data, seeded(1))
    before = loss_fn.replay_buffer.samples.positions
    _, negatives = loss_fn(data, generator=seeded(2))
    rows = {tuple(row) for row in before.tolist()}
    assert len(before) == 17 and all(tuple(row) in rows for row in negatives.positions.tolist())
    loss_fn.k_steps = 4
    loss, negatives = loss_fn(data, generator=seeded(3))
    kept = {tuple(row) for row in loss_fn.replay_buffer.samples.positions.tolist()}
    assert all(tuple(row) in kept for row in negatives.positions.tolist())
    loss.backward()
    assert constant(model).grad.abs() > 0

    other = ContrastiveDivergence(model, sampler, k_steps=4, persistent=True, buffer_size=6, new_sample_ratio=0, init_steps=3)
    other.load_state_dict(loss_fn.state_dict())
    a, b = (fn(data, generator=seeded(4)) for fn in (loss_fn, other))
    assert a[0].item() == b[0].item() and torch.equal(a[1].positions, b[1].positions)


def test_chains_begin_anew_at_the_data():
    """Labels of the data and chains without them stand together in a batch."""
    model = pair_springs()
    data = molecules(SIZES).replace(energy=torch.zeros(3, dtype=torch.float64))
    sampler = LangevinDynamics(model, 0.05)
    loss_fn = ContrastiveDivergence(model, sampler, k_steps=2, persistent=True, buffer_size=9, new_sample_ratio=0.5, init_steps=2)
    for seed in range(4):
        loss, negatives = loss_fn(data, generator=seeded(seed))
        assert torch.isfinite(loss) and len(negatives) == 3 and "energy" not in negatives


@pytest.mark.parametrize(
    "kind", [NoiseContrastiveEstimation, EnergyDiscrepancy, FlowMatching, EquilibriumMatching, EnergyMatching]
)
def test_losses_that_take_no_structures_say_so(kind):
    with pytest.raises(ConfigError, match=r"takes vectors.*structures are for DenoisingScoreMatching"):
        kind(Springs(1.0))(molecules((2, 3)))
