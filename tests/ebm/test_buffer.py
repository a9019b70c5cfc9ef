"""Chains by slot: drawn, written back, saved whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data import AtomicData, Batch
from nvalchemi.ebm.buffer import ReplayBuffer
from nvalchemi.errors import CheckpointError, ConfigError, DataError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(size: int = 10, dim: int = 3) -> ReplayBuffer:
    buffer = ReplayBuffer(size)
    buffer.initialize(torch.arange(size * dim, dtype=torch.float64).view(size, dim))
    return buffer


def structures(count: int) -> Batch:
    generator = seeded(5)
    data = [
        AtomicData(3.0 * torch.randn(2 + i % 3, 3, generator=generator, dtype=torch.float64), [1 + i % 5] * (2 + i % 3))
        for i in range(count)
    ]
    return Batch.from_data_list(data)


@given(size=st.integers(1, 20), draws=st.lists(st.integers(0, 50), max_size=8), seed=st.integers(0, 99))
def test_a_draw_repeats_no_slot_before_it_must(size, draws, seed):
    buffer, generator = started(size), seeded(seed)
    for n in draws:
        slots, samples = buffer.draw(n, generator)
        counts = torch.bincount(slots, minlength=size)
        assert slots.shape == (n,) and samples.shape == (n, 3)
        assert n // size <= counts.min() and counts.max() <= n // size + (n % size > 0) + (n > size)
        assert n > size or counts.max() <= 1
        assert torch.equal(samples, buffer.samples[slots])


@given(size=st.integers(1, 12), draws=st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_a_chain_is_a_slot(size, draws):
    """Every step adds one to the chains that were drawn: each slot holds its own start and the number of its own steps."""
    buffer, generator = started(size), seeded()
    start, steps = buffer.samples, torch.zeros(size, dtype=torch.long)
    for n in draws:
        slots, samples = buffer.draw(min(n, size), generator)
        buffer.write(slots, samples + 1)
        steps[slots] += 1
    assert torch.equal(buffer.samples, start + steps[:, None])


def test_all_chains_are_moved_about_equally_often():
    buffer, generator, counts = started(100), seeded(), torch.zeros(100)
    for _ in range(200):
        counts += torch.bincount(buffer.draw(30, generator)[0], minlength=100)
    assert counts.min() > 40 and counts.max() < 80


def test_draws_are_the_generators():
    first, second, other = (started().draw(4, seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_samples_are_copies_and_keep_dtype_and_no_graph():
    start = torch.zeros(4, 2, dtype=torch.float64)
    buffer = ReplayBuffer(4)
    buffer.initialize(start)
    start += 1
    slots, samples = buffer.draw(4)
    samples += 2
    slots_before = slots.clone()
    slots += 100
    assert torch.equal(buffer.samples, torch.zeros(4, 2, dtype=torch.float64))
    buffer.write(slots_before, torch.ones(4, 2, requires_grad=True) * 3)
    assert buffer.samples.dtype == torch.float64 and not buffer.samples.requires_grad
    assert torch.equal(buffer.samples, torch.full((4, 2), 3.0, dtype=torch.float64))


def test_the_last_of_repeated_slots_stays():
    buffer = started(3)
    slots, _ = buffer.draw(8, seeded())
    ends = torch.arange(8.0)[:, None].expand(8, 3)
    buffer.write(slots, ends)
    expected = [max(k for k in range(8) if slots[k] == slot) for slot in range(3)]
    assert buffer.samples[:, 0].tolist() == expected


def test_what_does_not_fit_is_refused():
    buffer = ReplayBuffer(4)
    with pytest.raises(ConfigError, match="initialize"):
        buffer.draw(1)
    with pytest.raises(ConfigError, match="initialize"):
        buffer.mix_across_ranks()
    with pytest.raises(DataError, match="needed: 4"):
        buffer.initialize(torch.zeros(3, 2))
    assert not buffer.is_initialized
    buffer.initialize(torch.zeros(4, 2))
    with pytest.raises(DataError, match="3 samples, 2 slots"):
        buffer.write(torch.tensor([0, 1]), torch.zeros(3, 2))
    with pytest.raises(DataError, match="another kind"):
        buffer.write(torch.tensor([0, 1]), torch.zeros(2, 1))
    with pytest.raises(DataError, match="another kind"):
        buffer.write(torch.tensor([0, 1]), structures(2))
    with pytest.raises(ConfigError, match="slot"):
        ReplayBuffer(0)


@pytest.mark.parametrize("start", [torch.arange(24.0).view(6, 2, 2), structures(6)], ids=["vectors", "atoms"])
def test_state_is_whole_and_loads_into_a_buffer_that_has_no_chains(start):
    buffer = ReplayBuffer(6)
    buffer.initialize(start)
    generator = seeded(3)
    buffer.draw(4, generator)
    state = buffer.state_dict()
    expected = [buffer.draw(2, generator)[0] for _ in range(2)]
    buffer.write(torch.arange(6), buffer.draw(6, generator)[1])  # must not reach into the saved state
    resumed = ReplayBuffer(6)
    resumed.load_state_dict(state)
    assert resumed.is_initialized
    if isinstance(start, Batch):
        assert torch.equal(resumed.samples.positions, start.positions)
        assert torch.equal(resumed.samples.atomic_numbers, start.atomic_numbers)
    else:
        assert torch.equal(resumed.samples, start)
    generator = seeded(3)
    torch.randperm(6, generator=generator)
    assert all(torch.equal(resumed.draw(2, generator)[0], slots) for slots in expected)


def test_state_needs_no_code_to_load(tmp_path):
    for start in (torch.zeros(6, 2), structures(6)):
        buffer = ReplayBuffer(6)
        buffer.initialize(start)
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other = ReplayBuffer(6)
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.is_initialized


def test_state_without_chains_is_a_state():
    state = ReplayBuffer(5).state_dict()
    buffer = started(5)
    buffer.load_state_dict(state)
    assert not buffer.is_initialized
    with pytest.raises(CheckpointError, match="found: 5; needed: 6"):
        started(6).load_state_dict(state)


def test_structures_of_unequal_sizes_go_back_to_their_slots():
    start = structures(6)
    buffer = ReplayBuffer(6)
    buffer.initialize(start)
    slots, batch = buffer.draw(4, seeded())
    assert batch.num_nodes_per_graph.tolist() == start.num_nodes_per_graph[slots].tolist()
    buffer.write(slots, batch.replace(positions=(batch.positions + 1).float().requires_grad_()))
    moved = torch.zeros(6, dtype=torch.bool).index_fill(0, slots, True)
    shift = moved[start.batch_idx].double()[:, None]
    assert torch.allclose(buffer.samples.positions, start.positions + shift, atol=1e-5)
    assert buffer.samples.positions.dtype == torch.float64 and not buffer.samples.positions.requires_grad
    other = structures(7).index_select([6, 6, 6, 6])  # a chain that starts anew may be of another structure
    buffer.write(slots, other)
    assert buffer.samples.num_nodes_per_graph[slots].tolist() == other.num_nodes_per_graph.tolist()


@settings(max_examples=5)
@given(st.integers(1, 5))
def test_mixing_in_one_process_changes_nothing(size):
    buffer = started(size)
    before = buffer.samples
    buffer.mix_across_ranks(generator=seeded())
    assert torch.equal(buffer.samples, before)
