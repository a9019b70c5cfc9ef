"""What every sampler keeps to, whatever it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm import samplers
from nvalchemi.errors import ConfigError, DataError, TrainingError
from nvalchemi.models import EnergyModel, MLPEnergy
from tests.ebm.energies import Labelled, Noted, Quadratic


class Velocity(nn.Module):
    """A field with a network, in training mode."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, t):
        assert not self.net[1].training
        return self.net(x) * (1 + t[:, None])


def metric(x):
    return torch.eye(2, dtype=x.dtype).expand(len(x), 2, 2) * (1 + 0.1 * x[:, :1, None].square())


MAKE = {
    "langevin": lambda m: samplers.LangevinDynamics(m, 0.1),
    "heun": lambda m: samplers.LangevinDynamics(m, 0.1, integrator="heun", decay=0.1, clamp=(-9.0, 9.0)),
    "mala": lambda m: samplers.MetropolisAdjustedLangevin(m, 0.1),
    "underdamped": lambda m: samplers.UnderdampedLangevin(m, 0.1),
    "hmc": lambda m: samplers.HamiltonianMonteCarlo(m, 0.2, 3, jitter=0.1),
    "nuts": lambda m: samplers.NoUTurnSampler(m, 0.3, max_tree_depth=3),
    "rmhmc": lambda m: samplers.RiemannianManifoldHMC(m, metric, 0.2, 2),
    "descent": lambda m: samplers.GradientDescentSampler(m, 0.1),
    "nesterov": lambda m: samplers.NesterovSampler(m, 0.1),
    "ode": lambda m: samplers.FlowSampler(Velocity(), integrator="rk4"),
    "adaptive": lambda m: samplers.FlowSampler(Velocity()),
    "sde": lambda m: samplers.FlowSampler(Velocity(), "sde"),
}
QUIET = {"descent", "nesterov", "ode", "adaptive"}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=MAKE)
def name(request):
    return request.param


def test_every_sampler_is_here():
    made = {type(make(MLPEnergy(2, 4))).__name__ for make in MAKE.values()}
    others = {"SpeciesSwaps"}  # of structures alone: test_swaps.py
    assert made | others | {"Sampler", "EnergySampler", "AdaptiveSampler"} == set(samplers.__all__)


def test_it_leaves_no_trace(name):
    """B100: no graph, no parameter gradients, modes and flags as they were, the beginning as it was; in any mode."""
    x = torch.randn(4, 2, generator=seeded())
    before = x.clone()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        sampler = MAKE[name](Noted())
        modes = [m.training for m in sampler.model.modules()]
        flags = [p.requires_grad for p in sampler.model.parameters()]
        with mode():
            out = sampler.sample(x=x, n_steps=3, generator=seeded())
        assert not out.requires_grad and not out.is_inference() and out.shape == x.shape and torch.equal(x, before)
        assert [m.training for m in sampler.model.modules()] == modes
        assert [p.requires_grad for p in sampler.model.parameters()] == flags
        assert all(p.grad is None for p in sampler.model.parameters())
        assert not any(getattr(sampler.model, "modes", []))
    model = Noted()
    if sampler.energy_model is not None:
        model.fail_at = 2
        sampler = MAKE[name](model)
        with pytest.raises(RuntimeError, match="asked"):
            sampler.sample(x=x, n_steps=3, generator=seeded())
        assert model.net[1].training and not model.net[0].training


def test_it_gives_what_is_asked_for(name):
    sampler, x = MAKE[name](MLPEnergy(2, 8).double()), torch.randn(5, 2, dtype=torch.float64, generator=seeded())
    if sampler.energy_model is None:
        sampler.model.double()
    last = sampler.sample(x=x, n_steps=6, generator=seeded())
    path, numbers = sampler.sample(x=x, n_steps=6, thin=2, return_trajectory=True, return_diagnostics=True, generator=seeded())
    assert last.dtype == path.dtype == torch.float64 and path.shape == (5, 3, 2)
    torch.testing.assert_close(path[:, -1], last, rtol=1e-4 if name == "adaptive" else 0, atol=1e-4 if name == "adaptive" else 0)
    assert all(len(value) == 3 and value.isfinite().all() for value in numbers.values()) and {"mean", "var"} <= set(numbers)
    assert ("energy" in numbers) == (sampler.energy_model is not None)
    if sampler.energy_model is not None:
        torch.testing.assert_close(numbers["energy"][-1], sampler.model(last).mean())
    assert torch.equal(sampler.sample(x=x, n_steps=0), x)
    seen = []
    sampler.sample(x=x, n_steps=4, progress=lambda done, total: seen.append((done, total)), generator=seeded())
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sampler.sample(dim=2, n_samples=3, n_steps=2).shape == (3, 2)


def test_the_generator_is_the_only_source(name):
    sampler, x = MAKE[name](MLPEnergy(2, 8)), torch.randn(5, 2, generator=seeded())
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = sampler.sample(x=x, n_steps=4, generator=seeded())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sampler.sample(x=x, n_steps=4, generator=seeded()), first)
    assert torch.equal(sampler.sample(x=x, n_steps=4, generator=seeded(1)), first) == (name in QUIET)
    drawn = sampler.sample(x=x, n_steps=4)
    torch.manual_seed(0)
    assert torch.equal(sampler.sample(x=x, n_steps=4), drawn)


def test_a_step_size_for_each_chain(name):
    """B102: equal numbers are one number; chains of step 0 stay; another length is an error."""
    sampler, x = MAKE[name](MLPEnergy(2, 8)), torch.randn(4, 2, generator=seeded())
    if isinstance(sampler, samplers.FlowSampler):
        pytest.skip("its steps are those of time")
    size = sampler.step_size
    plain = sampler.sample(x=x, n_steps=3, generator=seeded())
    sampler.step_size = torch.full((4,), size)
    torch.testing.assert_close(sampler.sample(x=x, n_steps=3, generator=seeded()), plain)
    sampler.step_size = lambda step: torch.tensor([size, 0.0, size, 0.0])
    assert [bool(torch.equal(a, b)) for a, b in zip(sampler.sample(x=x, n_steps=3, generator=seeded()), x, strict=True)] == [
        False,
        True,
    ] * 2
    sampler.step_size = torch.full((3,), size)
    with pytest.raises(ConfigError, match=r"step_size .*\(3,\) for 4 samples"):
        sampler.sample(x=x, n_steps=1)


def test_samples_that_are_not_finite(name):
    sampler, x = MAKE[name](MLPEnergy(2, 8)), torch.randn(4, 2, generator=seeded())
    x[1, 0] = torch.nan
    with pytest.raises(TrainingError, match=r"1 of 4|cannot go on"):
        sampler.sample(x=x, n_steps=3, generator=seeded())


@pytest.mark.parametrize("which", ["rmhmc", "ode"])
def test_what_does_not_move_structures(which):
    batch = Batch.from_data_list([AtomicData(torch.zeros(1, 3), torch.tensor([1]))])
    with pytest.raises(ConfigError, match="AtomChains"):
        MAKE[which](Atoms()).sample(x=batch, n_steps=1)


class Atoms(MLPEnergy):
    """An energy of a batch."""

    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        return x.positions.square().sum() * torch.ones(len(x))


MCMC = [name for name in MAKE if name not in ("ode", "adaptive", "sde")]


@pytest.mark.parametrize("name", MCMC)
def test_a_condition_of_each_chain_reaches_the_energy(name):
    """As many chains of one label as chains of the energy of this label: the same ones; and rows that are not one a chain are refused."""
    x, sampler = torch.randn(6, 2, generator=seeded()), MAKE[name](Labelled())
    settings = {"n_steps": 5, "return_trajectory": True, "return_diagnostics": True}
    path, numbers = sampler.sample(x, generator=seeded(1), a=torch.full((6,), 2.5), **settings)
    wanted, known = MAKE[name](Quadratic(2.5)).sample(x, generator=seeded(1), **settings)
    torch.testing.assert_close(path, wanted)
    assert numbers.keys() == known.keys()
    for key, value in numbers.items():
        torch.testing.assert_close(value, known[key])
    torch.testing.assert_close(sampler.sample(x, n_steps=5, generator=seeded(1), a=2.5), wanted[:, -1])
    for wrong in (torch.ones(1), torch.ones(5)):
        with pytest.raises(DataError, match=r"'a' does not fit.*needed: a tensor \(6, ...\)"):
            sampler.sample(x, n_steps=1, a=wrong)
    with pytest.raises(ConfigError, match="by their own names"):
        sampler.sample(x, n_steps=1, model_kwargs={"a": torch.ones(6)})


@pytest.mark.parametrize("name", ["mala", "hmc", "nuts", "rmhmc"])
def test_chains_of_unlike_conditions_draw_unlike_densities(name):
    """Those that leave a tree early take their condition along."""
    a = torch.tensor([1.0, 9.0]).repeat(2000)
    sampler = {**MAKE, "mala": lambda m: samplers.MetropolisAdjustedLangevin(m, 0.05)}[name](Labelled())
    x = sampler.warm_up(torch.randn(4000, 2, generator=seeded()), n_steps=20, generator=seeded(1), a=a)
    x = sampler.sample(x, n_steps=30, generator=seeded(2), a=a)
    for stiffness in (1.0, 9.0):
        assert abs(float(x[a == stiffness].var()) * stiffness - 1) < 4 * (2 / 4000) ** 0.5


@pytest.mark.parametrize("name", MCMC)
@pytest.mark.parametrize("shape", ["sum", "mean", "column"])
def test_an_energy_that_is_not_one_number_a_sample_is_told(name, shape):
    """The mean over a batch has a gradient that is too small, and a sum would be the energy of every chain: both without notice."""

    class Wrong(EnergyModel):
        def forward(self, x):
            each = 0.5 * x.square().sum(1)
            return each[:, None] if shape == "column" else getattr(each, shape)()

    with pytest.raises(ConfigError, match=r"not one number a sample.*needed: \(3,\)"):
        MAKE[name](Wrong()).sample(dim=2, n_samples=3, n_steps=1)
    if name == "langevin":
        with pytest.raises(ConfigError, match="not one number a sample"):
            MAKE[name](Wrong()).compile(backend="eager").sample(dim=2, n_samples=3, n_steps=1)


@pytest.mark.parametrize("name", MCMC)
def test_autocast_is_for_the_energy(name):
    """A way that is rounded on its way cannot be reversed, so nothing but the energy is."""
    mass = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    with_mass = {
        "mala": lambda m: samplers.MetropolisAdjustedLangevin(m, 0.1, mass=mass),
        "underdamped": lambda m: samplers.UnderdampedLangevin(m, 0.1, mass=mass),
        "hmc": lambda m: samplers.HamiltonianMonteCarlo(m, 0.2, 3, mass=mass),
        "nuts": lambda m: samplers.NoUTurnSampler(m, 0.3, mass=mass),
        "rmhmc": lambda m: samplers.RiemannianManifoldHMC(m, lambda x: mass.expand(len(x), 2, 2), 0.2, 2),
    }
    sampler = {**MAKE, **with_mass}[name](Quadratic())
    plain = sampler.sample(dim=2, n_samples=50, n_steps=5, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sampler.sample(dim=2, n_samples=50, n_steps=5, generator=seeded()), plain)
