"""Losses that tell data from other samples, against closed forms: data N(0, 1), energy a x²/2 + b."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm.losses import ContrastiveDivergence, EnergyDiscrepancy, GaussianNoise, NoiseContrastiveEstimation
from nvalchemi.ebm.samplers import LangevinDynamics
from nvalchemi.ebm.samplers.base import EnergySampler
from nvalchemi.errors import CheckpointError, ConfigError, DataError, TrainingError
from nvalchemi.models import InteratomicPotential, MLPEnergy, PaiNN
from tests.ebm.quadratic import Quadratic, assert_closed_form, seeded, standard_normal

A = 0.7


class Exact(EnergySampler):
    """Draws from exp(-a x²/2) itself, for a fixed a."""

    def __init__(self, model, a: float = A) -> None:
        super().__init__(model, 1.0)
        self.a = a

    def moves(self, run):
        for _ in range(run.n_steps):
            yield run.normal(run.chains.start) / self.a**0.5, {}


def mlp():
    torch.manual_seed(0)
    return MLPEnergy(2, 8)


def divergence(model=None, step_size=0.01, **settings):
    model = mlp() if model is None else model
    return ContrastiveDivergence(model, LangevinDynamics(model, step_size=step_size), **{"k_steps": 3, **settings})


LOSSES = {
    "cd": divergence,
    "pcd": lambda model: divergence(model, persistent=True, buffer_size=32, init_steps=2),
    "nce": lambda model: NoiseContrastiveEstimation(model, noise_ratio=2),
    "discrepancy": EnergyDiscrepancy,
}


def value(result):
    return result[0] if isinstance(result, tuple) else result


def test_contrastive_divergence():
    """a/2 (E x² - 1/a) = (a - 1) / 2, and half of 1 - 1/a, where the chains draw exactly."""
    assert_closed_form(
        lambda model: ContrastiveDivergence(model, Exact(model), k_steps=1, energy_reg_weight=0.0),
        A,
        (A - 1) / 2,
        (1 - 1 / A) / 2,
    )


def test_contrastive_divergence_with_its_penalty():
    """w (E E(x)² + E E(x')²) with E[(a x²/2 + b)²] = 3 a²/4 + a b + b² of data, 3/4 + b + b² of chains."""
    w, b = 0.1, 0.3
    data, chains = 3 * A**2 / 4 + A * b + b**2, 3 / 4 + b + b**2
    slope = w * (3 * A / 2 + b + 3 / (2 * A) + b / A)
    assert_closed_form(
        lambda model: ContrastiveDivergence(model, Exact(model), k_steps=1, energy_reg_weight=w),
        A, (A - 1) / 2 + w * (data + chains), (1 - 1 / A) / 2 + slope, bias=2 * w * (A / 2 + b + 1 / 2 + b),
    )  # fmt: skip


def normal(x, std):
    return torch.exp(-0.5 * (x / std) ** 2) / (std * math.sqrt(2 * math.pi))


def test_noise_contrastive_estimation():
    """Against the integral."""
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    a = torch.tensor(A, dtype=torch.float64, requires_grad=True)
    b = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    h = -(0.5 * a * x**2 + b) - torch.log(normal(x, 2.0)) - math.log(3)
    softplus = nn.functional.softplus
    loss = torch.trapezoid(normal(x, 1.0) * softplus(-h) + 3 * normal(x, 2.0) * softplus(h), x)
    slope, bias = torch.autograd.grad(loss, [a, b])
    assert_closed_form(
        lambda model: NoiseContrastiveEstimation(model, GaussianNoise(0.0, 2.0), noise_ratio=3),
        A, loss.item(), slope.item(), bias=bias.item(),
    )  # fmt: skip


def test_noise_contrastive_estimation_learns_the_normalisation():
    """At a = 1 and b = log √(2π), the log of the partition function, the gradient vanishes."""
    model, x = Quadratic(1.0, 0.5 * math.log(2 * math.pi)), standard_normal()
    value(NoiseContrastiveEstimation(model, GaussianNoise.fit(1.5 * x))(x, generator=seeded())).backward()
    assert abs(float(model.net.a.grad)) < 0.01 and abs(float(model.net.b.grad)) < 0.01


def test_gaussian_noise():
    x = standard_normal(3, 1000) * torch.tensor([1.0, 2.0, 3.0]) + 5.0
    noise = GaussianNoise.fit(x)
    wanted = torch.distributions.Normal(x.mean(0), x.std(0)).log_prob(x).sum(1)
    torch.testing.assert_close(noise.log_prob(x), wanted)
    drawn = noise.sample(x.repeat(50, 1), seeded())
    assert float((drawn.mean(0) - 5.0).abs().max()) < 0.1 and float((drawn.std(0) / x.std(0) - 1).abs().max()) < 0.02


def test_energy_discrepancy():
    """a/2 - (a (1 + t) / (2 (1 + a t)) + log(1 + a t) / 2): the smoothed energy of a x²/2 is known."""
    t = 0.5
    loss = A / 2 - (A * (1 + t) / (2 * (1 + A * t)) + 0.5 * math.log(1 + A * t))
    slope = 0.5 - ((1 + t) / (2 * (1 + A * t) ** 2) + t / (2 * (1 + A * t)))
    assert_closed_form(
        lambda model: EnergyDiscrepancy(model, t=t, n_samples=500, w=0.0),
        A,
        loss,
        slope,
        x=standard_normal(count=4000),
        slack=2e-3,
    )


def test_energy_discrepancy_by_its_formula():
    model, x = mlp().double(), standard_normal(2, 6)
    got, noise = EnergyDiscrepancy(model, t=0.3, n_samples=3, w=2.0)(x, generator=seeded()), seeded()
    away = x + 0.3**0.5 * torch.empty_like(x).normal_(generator=noise)
    back = away + 0.3**0.5 * torch.empty(3, *x.shape, dtype=x.dtype).normal_(generator=noise)
    total = 2.0 / 3 + torch.stack([torch.exp(model(x) - model(y)) for y in back]).mean(0)
    assert got.item() == pytest.approx(total.log().mean().item(), rel=1e-12)


@pytest.mark.parametrize("make", [LOSSES["cd"], LOSSES["pcd"], LOSSES["discrepancy"]], ids=["cd", "pcd", "discrepancy"])
def test_the_sign_is_right(make):
    """B88: at a = 0 a must grow, and after training E(0) < E(3)."""
    model, x, generator = Quadratic(0.0), standard_normal(count=500), seeded()
    loss_fn = make(model)
    if isinstance(loss_fn, ContrastiveDivergence):
        loss_fn.sampler.step_size = 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(40):
        optimizer.zero_grad()
        value(loss_fn(x, generator=generator)).backward()
        if step == 0:
            assert float(model.net.a.grad) < 0
        optimizer.step()
    low, high = model(torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    assert low < high


def test_chains_begin_at_the_data():
    """B90: with no step, or steps of size 0 without noise, the negatives are the data."""
    x = torch.randn(5, 2, generator=seeded())
    for loss_fn in (divergence(k_steps=0), divergence(step_size=0.0)):
        assert torch.equal(loss_fn(x, generator=seeded())[1], x)
    assert not torch.equal(divergence()(x, generator=seeded())[1], x)


def test_persistent_chains_go_on():
    """B90: the negatives are the stored chains; their ends are written back to the slots they came from."""
    x = torch.randn(8, 2, generator=seeded())
    loss_fn = divergence(k_steps=0, persistent=True, buffer_size=8, init_steps=0, new_sample_ratio=0.0)
    loss_fn.initialize_buffer(x, seeded(1))
    stored = loss_fn.replay_buffer.samples
    assert torch.equal(stored, torch.empty(8, 2).normal_(generator=seeded(1)))
    for call in range(2):
        negatives = loss_fn(x, generator=seeded(call))[1]
        assert torch.equal(negatives.sort(0).values, stored.sort(0).values)
        assert torch.equal(loss_fn.replay_buffer.samples, stored)
    loss_fn.k_steps = 3
    ends = loss_fn(x, generator=seeded(7))[1]
    after = loss_fn.replay_buffer.samples
    assert torch.equal(ends.sort(0).values, after.sort(0).values)
    near = (after - stored).norm(dim=1)  # each slot's chain moved a little: three steps of size 0.01
    assert float(near.max()) < 1.5 and float(near.min()) > 0
    assert float((after - stored.roll(1, 0)).norm(dim=1).mean()) > float(near.mean())


def test_a_failed_start_of_the_chains_is_an_error():
    """And leaves no half-made buffer behind: the next call begins anew."""
    x = torch.randn(4, 2, generator=seeded())
    loss_fn = divergence(persistent=True, buffer_size=6, init_steps=2)
    weight = next(loss_fn.model.parameters()).detach()
    good = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="left the finite numbers"):
        loss_fn(x, generator=seeded())
    assert not loss_fn.replay_buffer.is_initialized
    weight.copy_(good)
    assert bool(torch.isfinite(loss_fn(x, generator=seeded())[1]).all())


def test_a_buffer_smaller_than_the_batch():
    x = torch.randn(8, 2, generator=seeded())
    loss_fn = divergence(persistent=True, buffer_size=3, init_steps=0)
    assert loss_fn(x, generator=seeded())[1].shape == (8, 2)


def test_some_chains_begin_anew():
    x = torch.zeros(2000, 2)
    loss_fn = divergence(k_steps=0, persistent=True, buffer_size=2000, init_steps=0, new_sample_ratio=0.25)
    loss_fn.initialize_buffer(x, seeded(1))
    loss_fn.replay_buffer.initialize(x + 9.0)
    negatives = loss_fn(x, generator=seeded(2))[1]
    new = (negatives != 9.0).all(1)
    assert abs(float(new.double().mean()) - 0.25) < 0.03
    assert abs(float(negatives[new].std()) - 1.0) < 0.1


def test_chains_are_saved_whole():
    """A loss whose buffer was never filled takes them too; the model is not among the state."""
    x = torch.randn(4, 2, generator=seeded())
    first = divergence(persistent=True, buffer_size=6, init_steps=2)
    first(x, generator=seeded(1))
    state = first.state_dict()
    assert set(state) == {"replay_buffer"}
    wanted = first(x, generator=seeded(2))
    again = divergence(persistent=True, buffer_size=6, init_steps=2)
    again.load_state_dict(state)
    got = again(x, generator=seeded(2))
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert torch.equal(again.replay_buffer.samples, first.replay_buffer.samples)


def test_chains_that_are_missing_are_told():
    kept, plain = divergence(persistent=True, buffer_size=4), divergence()
    with pytest.raises(CheckpointError, match="no persistent chains were saved"):
        kept.load_state_dict(plain.state_dict())
    with pytest.raises(CheckpointError, match="has none"):
        plain.load_state_dict(kept.state_dict())
    with pytest.raises(ConfigError, match="not kept"):
        plain.initialize_buffer(torch.zeros(2, 2))


def test_chains_of_a_shape_alone():
    kept = divergence(persistent=True, buffer_size=4)
    with pytest.raises(ConfigError, match=r"begin like a batch.*found: \(2,\).*torch.empty\(1, \*shape\)"):
        kept.initialize_buffer((2,))
    kept.initialize_buffer(torch.empty(1, 2), seeded())
    assert kept.replay_buffer.samples.shape == (4, 2) and kept.replay_buffer.samples.std() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_left_behind(name):
    """B100: works in and out of no_grad; modes, flags, gradients and torch's own random stream are as they were."""
    model = mlp()
    model.net[0].weight.requires_grad_(False)
    model.net[1].eval()
    loss_fn, x = LOSSES[name](model), torch.randn(8, 2, generator=seeded())
    before = torch.get_rng_state()
    modes, flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    with torch.no_grad():
        quiet = value(loss_fn(x, generator=seeded()))
    assert not quiet.requires_grad
    loss = value(loss_fn(x, generator=seeded()))
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()] and flags == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert [p.grad is not None for p in model.parameters()] == flags


def test_chains_that_began_in_inference_mode_go_on_outside():
    """Such as where a user looks at the loss before training."""
    model, x = mlp(), torch.randn(8, 2, generator=seeded())
    loss_fn = divergence(model, persistent=True, buffer_size=16)
    with torch.inference_mode():
        loss_fn(x.clone(), generator=seeded())
    loss, _ = loss_fn(x, generator=seeded())
    loss.backward()
    assert not loss_fn.replay_buffer.draw(4, seeded())[1].is_inference()


@pytest.mark.parametrize("name", ["cd", "nce", "discrepancy"])
def test_a_loss_that_is_not_finite_stays_so(name):
    model, x = mlp(), torch.zeros(4, 2)
    x[1, 0] = torch.nan
    loss_fn = LOSSES[name](model)
    if name == "cd":
        with pytest.raises(TrainingError, match="step"):
            loss_fn(x, generator=seeded())
        loss_fn.k_steps = 0
    assert not torch.isfinite(value(loss_fn(x, generator=seeded())))


@pytest.mark.parametrize("name", LOSSES)
def test_noise_is_the_generators(name):
    x = torch.randn(8, 2, generator=seeded())
    first, again, other = (value(LOSSES[name](mlp())(x, generator=seeded(seed))).item() for seed in (1, 1, 2))
    assert first == again != other


def test_images():
    """Any shape of a sample."""

    class Images(MLPEnergy):
        def forward(self, x):
            return super().forward(x.flatten(1))

    x = torch.randn(4, 1, 1, 2, generator=seeded())
    for make in LOSSES.values():
        value(make(Images(2, 8))(x, generator=seeded())).backward()


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_wide_under_autocast(name):
    """It is a small difference of energies, whose last figures bf16 has not."""
    model, x = MLPEnergy(2, 8), standard_normal(2, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        loss = value(LOSSES[name](model)(x, generator=seeded()))
    assert loss.dtype == torch.float32
    loss.backward()


@pytest.mark.parametrize("name", ["nce", "discrepancy"])
def test_whole_numbers_are_told(name):
    with pytest.raises(DataError, match=r"floating dtype.*int64"):
        LOSSES[name](mlp())(torch.zeros(4, 2, dtype=torch.long))


def test_what_cannot_be_is_told():
    model = mlp()
    sampler = LangevinDynamics(model)
    with pytest.raises(ConfigError, match="does not sample the energy"):
        ContrastiveDivergence(mlp(), sampler)
    with pytest.raises(ConfigError, match="none below 0"):
        ContrastiveDivergence(model, sampler, k_steps=-1)
    with pytest.raises(ConfigError, match="whole number"):
        NoiseContrastiveEstimation(model, noise_ratio=0)
    with pytest.raises(ConfigError, match="sample and log_prob"):
        NoiseContrastiveEstimation(model, torch.distributions.Normal(0.0, 1.0).mean)
    with pytest.raises(ConfigError, match="positive"):
        GaussianNoise(0.0, 0.0)
    x = standard_normal(2, 4).float()
    for noise in (GaussianNoise(torch.zeros(3)), GaussianNoise(0.0, torch.ones(4, 1))):  # one a row: it would be broadcast
        with pytest.raises(ConfigError, match=r"of other samples.*numbers, or \(2,\)"):
            NoiseContrastiveEstimation(model, noise)(x)

    class Noise(GaussianNoise):
        def sample(self, like, generator):
            return super().sample(like, generator)[:, : self.mean]

        def log_prob(self, x):
            return x if self.mean == 2 else x.sum(1)

    for width, match in ((1, r"of other samples.*\(4, 1\)"), (2, r"not one number a sample.*\(4, 2\).*\(4,\)")):
        with pytest.raises(ConfigError, match=match):
            NoiseContrastiveEstimation(model, Noise(width))(x)
    with pytest.raises(ConfigError, match="n_samples"):
        EnergyDiscrepancy(model, n_samples=0)

    class Wide(MLPEnergy):
        def forward(self, x):
            return self.net(x)

    with pytest.raises(ConfigError, match="one number a sample"):
        EnergyDiscrepancy(Wide(2, 8))(torch.zeros(2, 2), generator=seeded())


class Shake(EnergySampler):
    """Moves the atoms of structures a little."""

    def moves(self, run):
        raise NotImplementedError

    def sample(self, x=None, n_steps=100, *, generator=None, **_):
        moved = x.positions
        for _ in range(n_steps):
            moved = moved + 0.01 * torch.empty_like(moved).normal_(generator=generator)
        return x.replace(positions=moved)


def molecules(count=3):
    generator = seeded(2)
    make = lambda n: AtomicData(1.5 * torch.randn(n, 3, generator=generator, dtype=torch.float64), torch.tensor([6] * n))  # noqa: E731
    return Batch.from_data_list([make(2 + i) for i in range(count)])


def potential():
    torch.manual_seed(1)
    return InteratomicPotential(PaiNN(["C"], n_features=8, n_interactions=2, cutoff=4.0, n_rbf=5).double(), cutoff=4.0)


def test_structures_of_unequal_sizes():
    """Energies of data minus those of chains, one term a structure; all weights learn."""
    model, batch = potential(), molecules()
    loss_fn = ContrastiveDivergence(model, Shake(model, 1.0), k_steps=3)
    values, negatives = loss_fn.terms(model, batch, generator=seeded(), step=None, conditions={})
    torch.testing.assert_close(values["contrastive"], model(batch) - model(negatives))
    assert negatives.num_nodes_per_graph.tolist() == [2, 3, 4]
    loss_fn(batch, generator=seeded())[0].backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("persistent", [False, True])
def test_langevin_chains_of_structures(persistent):
    """A potential learns against its own molecules; a chain that does not move is the data."""
    model, batch = potential(), molecules()
    settings = {"persistent": persistent, "buffer_size": 5, "init_steps": 2}
    loss_fn = ContrastiveDivergence(model, LangevinDynamics(model, 1e-4, temperature=0.03), k_steps=3, **settings)
    loss, negatives = loss_fn(batch, generator=seeded())
    loss.backward()
    assert len(negatives) == 3 and all(p.grad is not None for p in model.parameters())
    if not persistent:
        assert 0 < float((negatives.positions - batch.positions).abs().max()) < 0.1


def test_persistent_chains_of_structures():
    """They begin at structures of the batch, go on, and are saved whole."""
    model, batch = potential(), molecules()

    def make():
        return ContrastiveDivergence(model, Shake(model, 1.0), k_steps=1, persistent=True, buffer_size=7, init_steps=0)

    first = make()
    first.new_sample_ratio = 0.0
    first.k_steps = 0
    negatives = first(batch, generator=seeded())[1]
    assert sorted(first.replay_buffer.samples.num_nodes_per_graph.tolist()) == [2, 2, 2, 3, 3, 4, 4]
    known = [structure.positions for structure in batch.to_data_list()]
    assert all(any(torch.equal(s.positions, k) for k in known if k.shape == s.positions.shape) for s in negatives.to_data_list())
    first.k_steps, first.new_sample_ratio = 2, 0.3
    first(batch, generator=seeded(1))
    again = make()
    again.k_steps, again.new_sample_ratio = 2, 0.3
    again.load_state_dict(first.state_dict())
    got, wanted = again(batch, generator=seeded(2))[1], first(batch, generator=seeded(2))[1]
    assert torch.equal(got.positions, wanted.positions)
