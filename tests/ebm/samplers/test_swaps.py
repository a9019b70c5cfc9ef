"""Exchanges of species: which pairs are tried, and that they leave exp(-E / T) as it is."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm.losses import ContrastiveDivergence
from nvalchemi.ebm.samplers import LangevinDynamics, MetropolisAdjustedLangevin, SpeciesSwaps, UnderdampedLangevin
from nvalchemi.ebm.structures import AtomChains
from nvalchemi.errors import ConfigError
from nvalchemi.models import EnergyModel, InteratomicPotential, PaiNN

SITES = torch.tensor([[0.0, 0, 0], [1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5]], dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class OnSites(EnergyModel):
    """Every species has an energy on every site; nothing pulls an atom, so only exchanges change anything."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Module()
        self.net.table = torch.nn.Parameter(torch.randn(10, len(SITES), generator=seeded(5), dtype=torch.float64))

    def forward(self, batch):
        site = torch.cdist(batch.positions.detach(), SITES).argmin(1)
        values = self.net.table[batch.atomic_numbers, site]
        return values.new_zeros(len(batch)).index_add(0, batch.batch_idx, values)


def structure(numbers):
    return AtomicData(SITES[: len(numbers)], torch.tensor(numbers))


def still(model, temperature=1.0):
    """A sampler that moves nothing."""
    return LangevinDynamics(model, step_size=0.0, temperature=temperature)


def occupation(batch):
    """The species on each site, one tuple a structure."""
    order = torch.cdist(batch.positions, SITES).argmin(1)
    found = []
    for begin, end in zip(batch.atom_offsets[:-1].tolist(), batch.atom_offsets[1:].tolist(), strict=True):
        placed = torch.zeros(end - begin, dtype=torch.long)
        placed[order[begin:end]] = batch.atomic_numbers[begin:end]
        found.append(tuple(placed.tolist()))
    return found


@pytest.mark.parametrize("temperature", [1.5, 5.0])
def test_every_occupation_comes_as_often_as_it_weighs(temperature):
    """Detailed balance: from one occupation, chains reach exp(-E / T) over all twelve of two like and two unlike atoms."""
    model, chains = OnSites(), 6000
    start = Batch.from_data_list([structure([1, 1, 6, 8])] * chains)
    end = SpeciesSwaps(still(model, temperature), every=1, n_swaps=3).sample(x=start, n_steps=12, generator=seeded())
    assert torch.equal(end.atomic_numbers, start.atomic_numbers)
    states = sorted(set(permutations([1, 1, 6, 8])))
    energies = torch.stack([model.net.table[list(state), range(4)].sum() for state in states]).detach()
    wanted = torch.softmax(-energies / temperature, 0)
    found = occupation(end)
    shares = torch.tensor([found.count(state) for state in states], dtype=torch.float64) / chains
    assert float(shares.sum()) == pytest.approx(1.0)
    assert ((shares - wanted).abs() < 3.5 * (wanted * (1 - wanted) / chains).sqrt()).all(), (shares, wanted)
    assert (shares - 1 / len(states)).abs().max() > 0.05  # even shares would not pass


def test_pairs_are_drawn_evenly():
    """Of H, H, C and O the pairs H-C, H-O (two each) and C-O, in both orders; a structure of one species has none."""
    batch = Batch.from_data_list([structure([1, 1, 6, 8]), structure([6, 6, 6])] * 4000)
    generator = seeded()
    draws = [torch.rand(8000, generator=generator) for _ in range(2)]
    first, second, there = AtomChains(batch).unlike_pair(*draws)
    assert there.tolist() == [True, False] * 4000
    begins = batch.atom_offsets[:-1]
    assert torch.equal(first[1::2], begins[1::2]) and torch.equal(second[1::2], begins[1::2])
    pairs = torch.stack([first - begins, second - begins], 1)[::2].tolist()
    wanted = [(i, j) for i in range(4) for j in range(4) if i != j and {i, j} != {0, 1}]
    shares = torch.tensor([pairs.count(list(pair)) for pair in wanted]) / 4000
    assert float(shares.sum()) == pytest.approx(1.0) and (shares - 0.1).abs().max() < 3.5 * (0.1 * 0.9 / 4000) ** 0.5
    edge = torch.full((8000,), 1.0)  # rounding may give it
    assert all((at < len(batch.positions)).all() for at in AtomChains(batch).unlike_pair(edge, edge)[:2])


def test_temperatures_of_chains_and_noise_scales_count():
    """One temperature a structure; a noise scale s of Langevin dynamics is a temperature s² T. Cold structures only go down."""
    model = OnSites()
    start = Batch.from_data_list([structure([1, 6])] * 400)
    cold = torch.tensor([1e-9, 2.0], dtype=torch.float64).repeat_interleave(200)
    for sampler in (still(model, cold), LangevinDynamics(model, step_size=0.0, noise_scale=cold.sqrt())):
        end = model(SpeciesSwaps(sampler, every=1).sample(x=start, n_steps=20, generator=seeded())).detach()
        low, high = model(Batch.from_data_list([structure([1, 6]), structure([6, 1])])).detach().sort()[0].tolist()
        wanted = 200 / (1 + math.exp((high - low) / 2.0))
        assert torch.allclose(end[:200], torch.tensor(low, dtype=end.dtype))
        assert abs(int((end[200:] > low + 1e-6).sum()) - wanted) < 3.5 * wanted**0.5 and wanted < 80


def test_between_moves_of_atoms_with_numbers_and_a_trajectory():
    torch.manual_seed(0)
    model = InteratomicPotential(PaiNN(["H", "C", "O"], n_features=8, n_interactions=1, cutoff=3.0))
    start = Batch.from_data_list([structure([1, 1, 6, 8]), structure([6, 8, 1]), structure([1, 1])]).cast(torch.float32)
    for inner in (MetropolisAdjustedLangevin(model, 1e-3), UnderdampedLangevin(model, 0.01, mass="atomic")):
        sampler = SpeciesSwaps(inner, every=2)
        path, numbers = sampler.sample(x=start, n_steps=5, return_trajectory=True, return_diagnostics=True, generator=seeded())
        assert len(path) == 5 and all(torch.equal(b.atomic_numbers, start.atomic_numbers) for b in path)
        rates = numbers["swap_rate"]
        assert rates[0].isnan() and not rates[1:].isnan().any() and rates.shape == (5,)
        assert torch.allclose(numbers["energy"], torch.stack([model(b).mean() for b in path]).detach())
        again = sampler.sample(x=start, n_steps=5, generator=seeded())
        assert torch.equal(again.positions, path[-1].positions)
    loss, negatives = ContrastiveDivergence(model, sampler, k_steps=4)(start, generator=seeded())
    loss.backward()
    assert loss.isfinite() and negatives.num_graphs == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda m: SpeciesSwaps(m),
        lambda m: SpeciesSwaps(still(m), every=0),
        lambda m: SpeciesSwaps(still(m), n_swaps=0),
        lambda m: SpeciesSwaps(still(m, lambda step: 1.0)),
        lambda m: SpeciesSwaps(SpeciesSwaps(still(m))),
        lambda m: SpeciesSwaps(still(m)).sample(x=torch.zeros(3, 2), n_steps=1),
        lambda m: SpeciesSwaps(still(m)).compile(),
        lambda m: SpeciesSwaps(LangevinDynamics(m, 0.0, noise_scale=0.0), every=1).sample(
            x=Batch.from_data_list([structure([1, 2])]), n_steps=1
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ConfigError):
        make(OnSites())
