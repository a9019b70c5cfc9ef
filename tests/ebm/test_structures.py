"""Samplers on structures: the atoms of a batch of unequal sizes move, each structure is a chain."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data import Batch
from nvalchemi.data.neighbors import neighbor_list
from nvalchemi.ebm.samplers import (
    HamiltonianMonteCarlo,
    LangevinDynamics,
    MetropolisAdjustedLangevin,
    NoUTurnSampler,
    UnderdampedLangevin,
)
from nvalchemi.ebm.structures import AtomChains, near
from nvalchemi.errors import ConfigError, DataError, TrainingError
from nvalchemi.models import EnergyModel, InteratomicPotential, PaiNN
from tests.ebm.molecules import Springs, bumps, crystals, molecules, placed

SIZES = (2, 3, 5)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def within(values: torch.Tensor, wanted: float, errors: float = 3.0) -> None:
    """The mean of independent values is what is wanted, within three standard errors."""
    error = float(values.std()) / len(values) ** 0.5
    assert abs(float(values.mean()) - wanted) < errors * error, (float(values.mean()), wanted, error)
    assert error < 0.1 * abs(wanted)


# step of the modes of the largest structure: k n = 5
SAMPLERS = {
    "mala": (lambda m, t: MetropolisAdjustedLangevin(m, 0.1, temperature=t), 150),
    "hmc": (lambda m, t: HamiltonianMonteCarlo(m, 0.25, n_leapfrog_steps=4, temperature=t, jitter=0.2), 30),
    "hmc, masses": (lambda m, t: HamiltonianMonteCarlo(m, 0.9, 4, mass="atomic", temperature=t, jitter=0.2), 30),
    "baoab": (lambda m, t: UnderdampedLangevin(m, 0.5, friction=1.0, temperature=t), 60),
    "baoab, masses": (lambda m, t: UnderdampedLangevin(m, 1.8, friction=0.3, temperature=t, mass="atomic"), 80),
    "nuts": (lambda m, t: NoUTurnSampler(m, 0.3, temperature=t, max_tree_depth=3), 5),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_equipartition_for_each_size_and_temperature(name):
    """B102: 3 (n - 1) quadratic coordinates of temperature T have the mean energy 3 (n - 1) T / 2; of BAOAB at a long step too."""
    make, n_steps = SAMPLERS[name]
    model, start = Springs(), molecules(SIZES * 300)
    temperature = torch.tensor([0.5, 2.0], dtype=torch.float64).repeat_interleave(450)
    end = make(model, temperature).sample(x=start, n_steps=n_steps, generator=seeded())
    energy = model(end).detach()
    assert all(p.grad is None for p in model.parameters())
    for i, n in enumerate(SIZES):
        for half, t in ((slice(0, 450), 0.5), (slice(450, 900), 2.0)):
            within(energy[half][i::3], 1.5 * (n - 1) * t)


def test_overdamped_langevin_has_its_known_bias():
    """B94: the plain step has the variance T / (s (1 - h s / 2)) for a mode of stiffness s = k n."""
    model, h = Springs(), 0.1
    end = LangevinDynamics(model, step_size=h).sample(x=molecules(SIZES * 400), n_steps=150, generator=seeded())
    energy = model(end).detach()
    for i, n in enumerate(SIZES):
        within(energy[i::3], 1.5 * (n - 1) / (1 - h * n / 2))


PERIODIC = {
    "mala": lambda m: MetropolisAdjustedLangevin(m, 0.3),
    "hmc": lambda m: HamiltonianMonteCarlo(m, 0.4, n_leapfrog_steps=3),
    "baoab": lambda m: UnderdampedLangevin(m, 0.2, friction=1.0),
}


@pytest.mark.parametrize("name", PERIODIC)
def test_a_periodic_cell_has_its_canonical_energy(name):
    """Two atoms that leave their cell: the mean energy is the integral over the cell of the vector between them."""
    model, start = bumps(), crystals(60)
    side = torch.arange(8, dtype=torch.float64) / 8
    fractions = torch.cartesian_prod(side, side, side)
    cell = start.cell[0]
    zero = torch.zeros(3, dtype=torch.float64)
    grid = placed([torch.stack([zero, f @ cell]) for f in fractions], cell=cell, pbc=torch.tensor([True] * 3))
    energies = model(grid).detach()
    weights = (-energies).softmax(0)
    wanted = float((weights * energies).sum())
    assert float(energies.mean()) > 1.1 * wanted  # a uniform distribution would be told apart

    sampler = PERIODIC[name](model)
    path = sampler.sample(x=start, n_steps=80, thin=8, return_trajectory=True, generator=seeded(1))
    values = torch.stack([model(batch).detach() for batch in path[2:]])
    inside = torch.linalg.solve(cell.T, path[-1].positions.T).T
    assert float(((inside < 0) | (inside >= 1)).double().mean()) > 0.3  # they are not wrapped back
    error = float(values.mean(0).std()) / len(start) ** 0.5
    assert abs(float(values.mean()) - wanted) < 3 * error
    assert error < 0.1 * wanted


def test_neighbours_follow_the_atoms():
    """The energies seen on the way are those of structures whose neighbours are sought anew, with and without a list at the beginning."""
    model = bumps()
    mixed = Batch.from_data_list([*crystals(3, n=5).to_data_list(), *molecules((4, 1, 6), spread=1.0).to_data_list()])
    ends = []
    for start in (mixed, neighbor_list(mixed, 2.5), neighbor_list(mixed, 3.5)):
        sampler = LangevinDynamics(model, 0.1)
        path, numbers = sampler.sample(x=start, n_steps=12, return_trajectory=True, return_diagnostics=True, generator=seeded())
        for batch, energy in zip(path, numbers["energy"], strict=True):
            fresh = model(batch.replace(edge_index=None)).mean()
            torch.testing.assert_close(energy, fresh.detach(), rtol=1e-10, atol=1e-12)
        assert path[-1].neighbor_cutoff == start.neighbor_cutoff and ("edge_index" in path[-1]) == ("edge_index" in start)
        if "edge_index" in start:
            assert path[-1].num_edges == neighbor_list(path[-1], start.neighbor_cutoff).num_edges
        ends.append(path[-1].positions)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-8, atol=1e-8)


def test_a_shortened_list_is_the_list():
    mixed = Batch.from_data_list([*crystals(2, n=4).to_data_list(), *molecules((5, 1)).to_data_list()])
    short, wanted = near(neighbor_list(mixed, 4.0), 2.5).validate(), neighbor_list(mixed, 2.5)
    assert short.neighbor_cutoff == 2.5 and torch.equal(short.edge_offsets, wanted.edge_offsets)

    def as_set(batch):
        return set(zip(*batch.edge_index.tolist(), map(tuple, batch.edge_shift.tolist()), strict=True))

    assert as_set(short) == as_set(wanted)


class Holed(Springs):
    """NaN for a structure of three atoms that has left radius 1."""

    def forward(self, batch):
        energy = super().forward(batch)
        far = batch.positions.norm(dim=1).new_zeros(len(batch)).index_add(0, batch.batch_idx, batch.positions.square().sum(1)) > 1
        return torch.where(far & (batch.num_nodes_per_graph == 3), torch.nan, energy)


@pytest.mark.parametrize("make", [lambda m: HamiltonianMonteCarlo(m, 0.3, 5), lambda m: MetropolisAdjustedLangevin(m, 0.2)])
def test_an_energy_that_is_not_finite_touches_no_other_structure(make):
    """B92: that structure stays where its energy is finite; the others go the way that they go without it."""
    start = molecules(SIZES * 4, spread=0.2)
    end = make(Holed()).sample(x=start, n_steps=30, generator=seeded())
    plain = make(Springs()).sample(x=start, n_steps=30, generator=seeded())
    three = (start.num_nodes_per_graph == 3).index_select(0, start.batch_idx)
    assert torch.equal(end.positions[~three], plain.positions[~three])
    assert not torch.equal(end.positions[three], plain.positions[three])
    assert torch.isfinite(Holed()(end)).all()


@pytest.mark.parametrize("start", [crystals(4, n=6, length=5.0), molecules((3, 1, 7), spread=1.5)], ids=["periodic", "open"])
def test_ways_out_of_the_numbers_are_refused_and_langevin_tells(start):
    """B92: steps so long that positions overflow."""
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(["C"], n_features=8, n_interactions=1, cutoff=3.0, n_rbf=5), energy_scale=1e6)
    end, numbers = HamiltonianMonteCarlo(model, 1e6, 10).sample(x=start, n_steps=3, generator=seeded(), return_diagnostics=True)
    stayed = (end.positions == start.positions).all(1)
    assert stayed.sum() >= len(stayed) - 1 and float(numbers["acceptance_rate"].max()) <= 1 / 3  # one atom alone is free
    with pytest.raises(TrainingError, match=r"left the finite numbers .*[\s\S]*step size 1e\+30"):
        LangevinDynamics(model, 1e30).sample(x=start, n_steps=30, generator=seeded())


def test_what_comes_back_is_a_batch_without_old_labels():
    batch = molecules(SIZES).replace(energy=torch.zeros(3, dtype=torch.float64), forces=torch.zeros(10, 3, dtype=torch.float64))
    before = batch.positions.clone()
    end = LangevinDynamics(Springs(), 0.01).sample(x=batch, n_steps=3, generator=seeded())
    assert isinstance(end, Batch) and "energy" not in end and "forces" not in end
    assert torch.equal(batch.positions, before) and not torch.equal(end.positions, before)
    none = LangevinDynamics(Springs(), 0.01).sample(x=batch, n_steps=0)
    assert torch.equal(none.positions, before)


def test_masses_are_one_an_atom():
    """Masses as numbers are those of the elements; a vector of another length is refused, and a name without atoms."""
    start = molecules(SIZES)
    by_name = UnderdampedLangevin(Springs(), 0.3, mass="atomic").sample(x=start, n_steps=9, generator=seeded())
    by_number = UnderdampedLangevin(Springs(), 0.3, mass=torch.full((10,), 12.011)).sample(x=start, n_steps=9, generator=seeded())
    torch.testing.assert_close(by_name.positions, by_number.positions, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="one value an atom"):
        UnderdampedLangevin(Springs(), 0.3, mass=torch.ones(3)).sample(x=start, n_steps=1)
    with pytest.raises(ConfigError, match="no such mass"):
        UnderdampedLangevin(bumps(), 0.3, mass="atomic").sample(dim=3, n_steps=1)


def test_chains_by_index():
    chains = AtomChains(molecules(SIZES))
    index = torch.tensor([2, 0])
    assert torch.equal(chains.take(chains.start, index), chains.subset(index).start)
    x = chains.start.clone()
    chains.put_(x, index, torch.zeros(7, 3, dtype=torch.float64))
    assert (chains.total(x != 0) == torch.tensor([0, 9, 0])).all()


@pytest.mark.parametrize("make", [lambda m: MetropolisAdjustedLangevin(m, 0.05), lambda m: NoUTurnSampler(m, 0.2)])
def test_conditions_of_structures_and_of_atoms(make):
    """A stiffness for each structure, and the same for each atom: the same chains, also where some leave a tree early."""

    class Stiff(EnergyModel):
        def forward(self, x, k):
            if len(k) == len(x):
                k = k[x.batch_idx]
            return x.positions.new_zeros(len(x)).index_add(0, x.batch_idx, 0.5 * k * x.positions.square().sum(1))

    x, k = molecules((2, 1, 4)), torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64)
    each, every = (
        make(Stiff()).sample(x, n_steps=20, generator=torch.Generator().manual_seed(0), k=values)
        for values in (k, k[x.batch_idx])
    )
    assert torch.equal(each.positions, every.positions)
    with pytest.raises(DataError, match=r"'k' does not fit.*needed: a tensor \(3, ...\)"):
        make(Stiff()).sample(x, n_steps=1, k=torch.ones(4))
