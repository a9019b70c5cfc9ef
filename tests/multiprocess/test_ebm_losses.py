"""Energy-based losses on two ranks take the steps of one process on the same global batch with the same noise."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess.ebm_loss_cases import ATOMS, CASES, POOLED, SHARES, by_hand, decayed, pooled_by_hand

HERE = "tests.multiprocess.ebm_loss_cases"


def assert_same(got, wanted):
    assert len(got["gradients"]) == len(wanted["gradients"])
    for ours, theirs in zip(got["gradients"], wanted["gradients"], strict=True):
        scale = max(float(g.abs().max()) for g in theirs)
        assert scale > 0
        assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-12 * scale
    assert got["losses"] == pytest.approx(wanted["losses"], rel=1e-11)
    for a, b in zip(got["weights"], wanted["weights"], strict=True):
        assert float((a - b).abs().max()) <= 1e-12


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_process(ranks, name, share):
    """B36, B40: each rank has noise of its own; a bias in the head gets its gradient, zero or not."""
    accumulate, sizes = SHARES[share]
    wanted = by_hand(name, accumulate, sizes)
    for got in ranks.call(f"{HERE}:train", name, accumulate, sizes):
        assert_same(got, wanted)


@pytest.mark.parametrize("name", ATOMS)
def test_atoms_too(ranks, name):
    """Structures are counted, whatever their sizes."""
    accumulate, sizes = SHARES["unequal micro-batches"]
    wanted = by_hand(name, accumulate, sizes)
    for got in ranks.call(f"{HERE}:train", name, accumulate, sizes):
        assert_same(got, wanted)


def test_a_coupling_of_all_ranks_waits_for_none_in_validation(ranks):
    """Ranks with two batches and with one to validate on: there each rank's rows are coupled by themselves."""
    first, second = ranks.call(f"{HERE}:coupled_together")
    assert first["validation"] == second["validation"] and first["validation"]
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


@pytest.mark.parametrize("name", POOLED)
def test_chains_of_all_ranks_are_ranked_together(ranks, name):
    """Which chains are left out, and whether the bound holds, is then the same as in one process; validation waits for nobody."""
    sizes = [[2, 7, 4], [6, 3, 4]]
    wanted = pooled_by_hand(name, sizes)
    for got in ranks.call(f"{HERE}:pooled", name, sizes):
        assert_same(got, wanted)


@pytest.mark.parametrize("kind", ["DDPHook", "FSDP2Hook"])
def test_a_bias_without_a_gradient_decays_alike(ranks, kind):
    """Replicas put zeros where a backward pass gives nothing, and weights of gradient zero decay; one process and shards do the same."""
    wanted = decayed(single_process("cpu"), kind)
    assert float(wanted[-1]) == pytest.approx(0.95**3)
    for got in ranks.call(f"{HERE}:decayed", kind):
        for a, b in zip(got, wanted, strict=True):
            assert float((a - b).abs().max()) <= 1e-12
