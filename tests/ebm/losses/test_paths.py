"""Losses along paths from noise to data, against closed forms: data N(0, 1), energy a x²/2, velocity or gradient -+a x."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nvalchemi.ebm.couplings import Coupling, ExactOTCoupling, SinkhornCoupling, UnbalancedSinkhornCoupling
from nvalchemi.ebm.fields import EqMEnergy
from nvalchemi.ebm.losses import EnergyMatching, EquilibriumMatching, FlowMatching
from nvalchemi.ebm.losses.equilibrium import dispersion
from nvalchemi.ebm.samplers import FlowSampler, HamiltonianMonteCarlo, LangevinDynamics, NesterovSampler
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, MLPEnergy
from tests.ebm.quadratic import Quadratic, assert_closed_form, seeded, standard_normal, visited

A = 0.7
T = torch.linspace(0, 1, 100_001, dtype=torch.float64)
SQUARE, CROSS = T**2 + (1 - T) ** 2, 2 * T - 1  # E x_t² and E x_t u_t of the linear path between standard normals; E u_t² is 2


def mean(values) -> float:
    return float(torch.trapezoid(values, T))


class Field(nn.Module):
    """A vector field of x and t, with activations."""

    def __init__(self, dim=2, labels=0, activations=False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(dim + 1 + labels, 16), nn.Linear(16, dim)
        self.labels, self.activations = labels, activations
        self.seen = []

    def forward(self, x, t, y=None):
        self.seen.append((x, t, y))
        parts = [x, t[:, None]] + ([nn.functional.one_hot(y, self.labels).to(x)] if self.labels else [])
        hidden = self.first(torch.cat(parts, 1)).tanh()
        return (self.last(hidden), [hidden]) if self.activations else self.last(hidden)


def field(**settings):
    torch.manual_seed(0)
    return Field(**settings).double()


def mlp():
    torch.manual_seed(0)
    return MLPEnergy(2, 8).double()


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("negate", [False, True])
def test_flow_matching(dim, negate):
    """a² E x² ± 2 a E x u + E u² averaged over t, whatever the dimension; data N(2, 1), so that the sign shows."""
    m = 2.0
    square, cross = T**2 * (1 + m**2) + (1 - T) ** 2, T * (1 + m**2) - (1 - T)
    sign = -1 if negate else 1
    assert_closed_form(
        lambda model: FlowMatching(model, negate_velocity=negate),
        A, A**2 * mean(square) + sign * 2 * A * mean(cross) + 2 + m**2, 2 * A * mean(square) + sign * 2 * mean(cross),
        x=standard_normal(dim) + m,
    )  # fmt: skip


def test_flow_matching_on_the_quarter_circle():
    """E x² = 1, E x u = 0 and E u² = π²/4 at all t."""
    assert_closed_form(lambda model: FlowMatching(model, "cosine"), A, A**2 + math.pi**2 / 4, 2 * A)


@pytest.mark.parametrize("ct", ["truncated", "linear", "constant"])
def test_equilibrium_matching(ct):
    """E |a x + c u|²."""
    c = {"truncated": 4 * ((1 - T) / 0.2).clamp(max=1), "linear": 4 * (1 - T), "constant": torch.full_like(T, 4.0)}[ct]
    loss = A**2 * mean(SQUARE) + 2 * A * mean(c * CROSS) + 2 * mean(c**2)
    assert_closed_form(
        lambda model: EquilibriumMatching(model, ct=ct),
        A,
        loss,
        2 * A * mean(SQUARE) + 2 * mean(c * CROSS),
        x=standard_normal(count=500_000),
    )


def test_the_equilibrium_target_is_noise_minus_data():
    """c(t) (x_0 - x_1): uphill from the data; the gradient at a = 0 must let a grow (B88)."""
    model, x = Quadratic(0.0), standard_normal(count=4000)
    c = 4 * ((1 - T) / 0.2).clamp(max=1)
    EquilibriumMatching(model)(x, generator=seeded()).backward()
    assert float(model.net.a.grad) == pytest.approx(2 * mean(c * CROSS), abs=0.3) and mean(c * CROSS) < 0


def test_decay_at_known_times():
    loss_fn = EquilibriumMatching(field(), ct_threshold=0.5, ct_multiplier=2.0)
    assert loss_fn.decay(torch.tensor([0.0, 0.5, 0.75, 1.0])).tolist() == [2.0, 2.0, 1.0, 0.0]
    custom = EquilibriumMatching(field(), ct=lambda t: t**2, ct_multiplier=3.0)
    assert custom.decay(torch.tensor([0.5])).tolist() == [0.75]


@pytest.mark.parametrize("energy_type", ["none", "dot", "l2", "mean"])
def test_explicit_energies_of_a_field(energy_type):
    """By brute force: the gradient is that of the energy, which samplers then take."""
    net, x = field(), standard_normal(2, 6)
    loss_fn = EquilibriumMatching(net, energy_type=energy_type)
    got = loss_fn(x, generator=seeded())
    point = loss_fn.paths.draw(x, seeded(), {})
    energy = EqMEnergy(net, energy_type)
    if energy_type == "none":
        gradient = net(point.x, torch.zeros(6, dtype=torch.float64))
        torch.testing.assert_close(energy.gradient(point.x), gradient)
        with pytest.raises(ConfigError, match="no energy"):
            energy(x)
        way = NesterovSampler(energy, 0.1).sample(x, n_steps=3, return_diagnostics=True)[1]
        assert way.keys() == {"mean", "var"}
    else:
        f = lambda y: net(y[None], torch.zeros(1, dtype=torch.float64))[0]  # noqa: E731
        scalar = (lambda y: -0.5 * f(y).square().sum()) if energy_type == "l2" else (lambda y: (y * f(y)).sum())
        gradient = torch.func.vmap(torch.func.grad(scalar))(point.x)
        torch.testing.assert_close(energy.gradient(point.x), gradient)
        torch.testing.assert_close(energy(x), torch.stack([scalar(y) for y in x]))
    target = loss_fn.decay(point.t)[:, None] * (point.noise - point.data)
    assert got.item() == pytest.approx((gradient - target).square().mean().item(), rel=1e-12)
    got.backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("prediction", ["noise", "score"])
def test_other_predictions(prediction):
    net, x = field(), standard_normal(2, 6)
    loss_fn = EquilibriumMatching(net, prediction=prediction)
    got, point = loss_fn(x, generator=seeded()), loss_fn.paths.draw(x, seeded(), {})
    output = net(point.x, torch.zeros(6, dtype=torch.float64))
    difference = output - point.noise if prediction == "noise" else (1 - point.t)[:, None] * output + point.noise
    assert got.item() == pytest.approx(difference.square().mean().item(), rel=1e-12)


def test_a_field_is_told_the_time():
    """Equilibrium matching tells it zero, unless it is asked not to; flow matching the time."""
    x = standard_normal(2, 6)
    for loss_fn, zero in (
        (EquilibriumMatching(field()), True),
        (EquilibriumMatching(field(), time_invariant=False), False),
        (FlowMatching(field()), False),
    ):
        loss_fn(x, generator=seeded())
        assert bool((loss_fn.model.seen[0][1] == 0).all()) == zero


def test_dispersion():
    z = standard_normal(3, 5).reshape(5, 3, 1)
    pairs = torch.stack([(a - b).square().sum() / 3 for a in z for b in z])
    torch.testing.assert_close(dispersion(z), torch.exp(-pairs).mean().log())
    net, x = field(activations=True), standard_normal(2, 6)
    plain = EquilibriumMatching(net, energy_type="dot")(x, generator=seeded())
    loss_fn = EquilibriumMatching(net, energy_type="dot", apply_dispersion=True, dispersion_weight=0.3)
    got = loss_fn(x, generator=seeded())
    hidden = net(net.seen[-1][0], net.seen[-1][1])[1][0]
    assert got.item() == pytest.approx((plain + 0.3 * dispersion(hidden)).item(), rel=1e-12)
    got.backward()
    with pytest.raises(ConfigError, match="the field gives none"):
        EquilibriumMatching(field(), apply_dispersion=True)(x, generator=seeded())


def matching(model=None, **settings):
    return EnergyMatching(mlp() if model is None else model, **{"coupling": "independent", "n_langevin_steps": 5, **settings})


@pytest.mark.parametrize("cutoff", [0.8, 1.0])
def test_flow_term_of_energy_matching(cutoff):
    """E w(t) |a (x + σ z) + u|²."""
    w = ((1 - T) / (1 - cutoff)).clamp(0, 1) if cutoff < 1 else torch.ones_like(T)
    loss = A**2 * mean(w * (SQUARE + 0.3**2)) + 2 * A * mean(w * CROSS) + 2 * mean(w)
    slope = 2 * A * mean(w * (SQUARE + 0.3**2)) + 2 * mean(w * CROSS)
    assert_closed_form(lambda model: matching(model, sigma=0.3, flow_weight_cutoff=cutoff, lambda_cd=0.0), A, loss, slope)


@pytest.mark.parametrize("noise_fraction", [0.0, 0.5, 1.0])
def test_contrastive_term_of_energy_matching(noise_fraction):
    """λ a/2 (1 - v): the variance v of a chain follows v <- (1 - h a)² v + 2 h ε exactly."""
    steps, h, eps, tau, weight = 20, 0.1, 0.4, 0.5, 2.0
    variances = []
    for sweeps in (True, False):
        v = 1.0
        for step in range(steps):
            temperature = eps * max(0.0, (step / steps - tau) / (1 - tau)) if sweeps else eps
            v = (1 - h * A) ** 2 * v + 2 * h * temperature
        variances.append(v)
    v = noise_fraction * variances[0] + (1 - noise_fraction) * variances[1]
    model, x = Quadratic(A), standard_normal()
    loss_fn = matching(
        model, lambda_cd=weight, epsilon_max=eps, tau_star=tau, n_langevin_steps=steps, langevin_dt=h,
        noise_fraction=noise_fraction, cd_trim_fraction=0.0, cd_clamp=None,
    )  # fmt: skip
    values, negatives = loss_fn.terms(model, x, generator=seeded(), step=None, conditions={})
    values["contrastive"].mean().backward()
    error = 3 * float((x**2 - negatives**2).std()) / len(x) ** 0.5
    got = values["contrastive"].detach().mean().item()
    assert got == pytest.approx(weight * A / 2 * (1 - v), abs=weight * A / 2 * error)
    assert float(model.net.a.grad) == pytest.approx(weight / 2 * (1 - v), abs=weight / 2 * error)
    hot = round(noise_fraction * len(x))
    for part, variance in zip(negatives.split([hot, len(x) - hot]), variances, strict=True):
        if len(part):
            assert float(part.var()) == pytest.approx(variance, rel=4 * (2 / len(part)) ** 0.5)


def test_the_highest_chains_are_left_out():
    model, x = mlp(), standard_normal(2, 11)
    loss_fn = matching(model, lambda_cd=3.0, cd_trim_fraction=0.25, cd_clamp=None)
    values, negatives = loss_fn.terms(model, x, generator=seeded(), step=None, conditions={})
    kept = model(negatives).sort().values[:9]
    wanted = 3.0 * (model(x).mean() - kept.mean())
    assert values["contrastive"].mean().item() == pytest.approx(wanted.item(), rel=1e-12)
    for got, by_hand in zip(
        torch.autograd.grad(values["contrastive"].mean(), list(model.parameters())),
        torch.autograd.grad(wanted, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(got, by_hand, rtol=1e-10, atol=1e-12)


def test_the_bound_of_the_contrastive_term():
    """Below it the term is a constant, whose gradient is zero; a term that is no number stays so."""
    model, x = mlp(), standard_normal(2, 8)
    loss_fn = matching(model, cd_clamp=0.1, cd_trim_fraction=0.0)
    bound = lambda difference: loss_fn._contrastive(model(x), model(x) + difference, 2.0)  # noqa: E731
    low, inside = bound(1.0), bound(0.02)
    assert low.mean().item() == pytest.approx(-0.1) and inside.mean().item() == pytest.approx(-0.04)
    assert all(float(g.abs().max()) == 0 for g in torch.autograd.grad(low.mean(), list(model.parameters())))
    assert bool(bound(torch.nan).isnan().all())
    assert bool(bound(torch.inf).isneginf().all()) and bool(bound(-torch.inf).isposinf().all())


def test_warm_up_runs_no_chain():
    loss_fn, x = matching(lambda_cd=lambda step: 0.0 if step < 10 else 2.0), standard_normal(2, 8)
    for step in (9, 10):  # a loop of one's own sees no difference
        loss = loss_fn(x, generator=seeded(), step=step)
        assert loss.shape == () and loss.requires_grad
        values, negatives = loss_fn.terms(loss_fn.model, x, generator=seeded(), step=step, conditions={})
        assert (negatives is None) == (values["contrastive"] is None) == (step == 9)
    assert negatives.shape == x.shape
    with pytest.raises(ConfigError, match="function of the step"):
        loss_fn(x, generator=seeded())
    loss_fn.lambda_cd = 0.0
    assert isinstance(loss_fn(x, generator=seeded()), torch.Tensor)


def test_a_sampler_of_ones_own():
    """Its step size, clamp and decay are used, and it is left as it was."""
    model, x = mlp(), standard_normal(2, 8)
    sampler = LangevinDynamics(model, step_size=0.01, clamp=(-0.5, 0.5), temperature=3.0)
    loss_fn = matching(model, sampler=sampler)
    assert float(loss_fn.negatives(x, generator=seeded()).abs().max()) <= 0.5
    assert sampler.temperature == 3.0 and sampler.noise_scale == 1.0


LOSSES = {
    "flow of a field": lambda: FlowMatching(field()),
    "flow of an energy": lambda: FlowMatching(mlp()),
    "equilibrium": lambda: EquilibriumMatching(field()),
    "equilibrium, dot": lambda: EquilibriumMatching(field(), energy_type="dot"),
    "equilibrium of an energy": lambda: EquilibriumMatching(mlp()),
    "energy matching": matching,
    "energy matching, warm-up": lambda: matching(lambda_cd=0.0),
}


def value(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_left_behind(name):
    """B100: works in and out of no_grad; noise is the generator's; modes and gradients are as they were."""
    loss_fn, x = LOSSES[name](), standard_normal(2, 8)
    before, modes = torch.get_rng_state(), [m.training for m in loss_fn.model.modules()]
    with torch.no_grad():
        quiet = value(loss_fn(x, generator=seeded(1))).item()
    first, other = (value(loss_fn(x, generator=seeded(seed))) for seed in (1, 2))
    assert first.item() == pytest.approx(quiet, rel=1e-12) and first.item() != other.item()
    assert torch.equal(before, torch.get_rng_state()) and modes == [m.training for m in loss_fn.model.modules()]
    assert all(p.grad is None for p in loss_fn.model.parameters())
    assert visited(first, loss_fn.model) == {name for name, _ in loss_fn.model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_finite_stays_so(name):
    loss_fn, x = LOSSES[name](), standard_normal(2, 8)
    with torch.no_grad():
        next(loss_fn.model.parameters())[0] = torch.nan
    if name == "energy matching":
        loss_fn.n_langevin_steps = 0
    assert not torch.isfinite(value(loss_fn(x, generator=seeded())))


@pytest.mark.parametrize(
    "coupling", [SinkhornCoupling(0.01), ExactOTCoupling(), "ot", "greedy", UnbalancedSinkhornCoupling(0.05)]
)
@pytest.mark.parametrize("kind", [FlowMatching, EquilibriumMatching])
def test_labels_stay_with_their_data(kind, coupling):
    """B96: label i is that of target i after the pairing."""
    net, x = field(labels=16), standard_normal(2, 16)
    loss_fn = kind(net, coupling=coupling)
    y = torch.arange(16)
    point = loss_fn.paths.draw(x, seeded(), {"y": y})
    assert torch.equal(x[point.conditions["y"]], point.data)
    loss_fn(x, y=y, generator=seeded())
    assert torch.equal(net.seen[-1][2], point.conditions["y"])


def test_a_coupling_makes_paths_short():
    x = standard_normal(2, 64) + 3
    lengths = []
    for coupling in ("independent", "ot"):
        point = FlowMatching(field(), coupling=coupling).paths.draw(x, seeded(), {})
        lengths.append((point.noise - point.data).square().sum(1).mean().item())
    assert lengths[1] < lengths[0]


def test_weights_of_pairs_count():
    class Weighted(Coupling):
        def couple(self, x0, x1, *, generator, conditions):
            from nvalchemi.ebm.couplings import CouplingResult

            return CouplingResult(x0, x1, conditions, torch.tensor([2.0, 0.0, 1.0, 1.0], dtype=torch.float64))

    net, x = field(), standard_normal(2, 4)
    for kind in (FlowMatching, EquilibriumMatching):
        plain = kind(net).terms(net, x, generator=seeded(), step=None, conditions={}).values["loss"]
        got = kind(net, coupling=Weighted()).terms(net, x, generator=seeded(), step=None, conditions={}).values["loss"]
        torch.testing.assert_close(got, plain * torch.tensor([[2.0], [0.0], [1.0], [1.0]], dtype=torch.float64))


def test_paths_may_begin_elsewhere():
    """x0 is where they begin, and where the chains of energy matching from noise begin."""
    x, x0 = standard_normal(2, 8), standard_normal(2, 8, seed=1) + 50
    loss_fn = matching(noise_fraction=1.0, n_langevin_steps=0)
    assert float(loss_fn.negatives(x, x0, seeded()).min()) > 40 and loss_fn(x, x0=x0, generator=seeded()).isfinite()
    assert torch.equal(FlowMatching(field()).paths.draw(x, seeded(), {"x0": x0}).noise, x0)


def test_times_keep_away_from_the_ends():
    t = FlowMatching(field(), train_eps=0.2).paths.draw(standard_normal(1, 10_000), seeded(), {}).t
    assert 0.2 <= float(t.min()) < 0.21 and 0.79 < float(t.max()) <= 0.8


def test_conditions_of_an_energy():
    class Labelled(EnergyModel):
        def __init__(self):
            super().__init__()
            self.net = nn.Embedding(3, 1).double()

        def forward(self, x, y):
            return 0.5 * self.net(y).squeeze(1) * x.square().sum(1)

    x, y = standard_normal(2, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    for make in (FlowMatching, EquilibriumMatching, lambda m: matching(m, lambda_cd=0.0), matching):
        value(make(Labelled())(x, y=y, generator=seeded())).backward()


@pytest.mark.parametrize("kind", [FlowMatching, EquilibriumMatching])
def test_a_field_of_another_shape_is_told(kind):
    """It would be broadcast against the target without notice; activations beside it are left alone."""
    x = standard_normal(2, 4)

    class Narrow(nn.Module):
        def forward(self, x, t):
            return x[:, :1]

    with pytest.raises(ConfigError, match=r"differ in shape.*\(4, 1\).*needed: \(4, 2\)"):
        kind(Narrow())(x)
    with pytest.raises(ConfigError, match="differ in shape"):
        FlowSampler(Narrow()).sample(x=x)
    plain, active = field(), field(activations=True)
    active.load_state_dict(plain.state_dict())
    assert torch.equal(kind(plain)(x, generator=seeded()), kind(active)(x, generator=seeded()))
    assert torch.equal(FlowSampler(plain, "ode").sample(x=x), FlowSampler(active, "ode").sample(x=x))


def test_what_cannot_be_is_told():
    model = mlp()
    for settings, match in (
        ({"prediction": "data"}, "velocity, score or noise"),
        ({"energy_type": "cos"}, "dot, l2, mean"),
        ({"energy_type": "dot", "prediction": "noise"}, "a field's"),
        ({"ct": "steep"}, "truncated"),
        ({"ct_threshold": 1.0}, "between 0 and 1"),
        ({"coupling": "best"}, "independent"),
        ({"train_eps": 0.5}, "no times"),
    ):
        with pytest.raises(ConfigError, match=match):
            EquilibriumMatching(field(), **settings)
    with pytest.raises(ConfigError, match="a field's"):
        EquilibriumMatching(model, energy_type="dot")
    with pytest.raises(ConfigError, match="none of its energy"):
        EnergyMatching(model, sampler=LangevinDynamics(mlp()))
    with pytest.raises(ConfigError, match="none of its energy"):
        EnergyMatching(model, sampler=HamiltonianMonteCarlo(model, 0.1, 2))
    with pytest.raises(ConfigError, match="trains an energy"):
        EnergyMatching(field())
    with pytest.raises(ConfigError, match="needs a model"):
        FlowMatching(lambda x, t: x)
    with pytest.raises(ConfigError, match="nothing below 0"):
        EnergyMatching(model, cd_trim_fraction=1.0)
    with pytest.raises(ConfigError, match="energy_type"):
        EqMEnergy(field(), "cos")
