"""Sharded energies in a loop of one's own, without any strategy."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import own_loop_cases as cases

CASES = "tests.multiprocess.own_loop_cases"


@pytest.mark.parametrize("name", cases.LOSSES)
def test_losses_averages_and_checkpoints_by_hand(ranks, name, tmp_path):
    """The settings of other libraries for sharded scores are taken, and nothing hangs on them."""
    wanted = cases.loop(single_process("cpu"), name, str(tmp_path / "alone"))
    for got in ranks.call(f"{CASES}:loop", name, str(tmp_path / "ranks")):
        assert got["restored"]
        for kind in ("weights", "average"):
            for a, b in zip(got[kind], wanted[kind], strict=True):
                assert float((a - b).abs().max()) <= 1e-9 * max(1.0, float(b.abs().max()))


def test_chains_move_on_shards_as_on_the_whole(ranks):
    for got in ranks.call(f"{CASES}:samples"):
        assert max(got["errors"].values()) < 1e-12
        assert got["left"] == []


@pytest.mark.parametrize("layers", [False, True])
def test_an_energy_that_is_sharded_itself(ranks, layers):
    assert max(max(errors) for errors in ranks.call(f"{CASES}:whole_energy", layers)) < 1e-12


def test_a_potential_that_is_sharded_itself_is_told(ranks):
    for said in ranks.call(f"{CASES}:whole_potential"):
        assert "fully_shard(model.net)" in said


def test_memory_after_sharding(ranks):
    first, second = ranks.call(f"{CASES}:from_meta")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(g.isfinite().all()) for g in first) and any(bool(g.any()) for g in first)


def test_short_weights(ranks):
    for got in ranks.call(f"{CASES}:in_bf16"):
        assert got["dtypes"] == {"torch.float32"}
        assert min(got["angles"]) > 0.99


def test_scores_do_not_grow_with_the_number_of_ranks(ranks):
    """B84."""
    assert max(ranks.call(f"{CASES}:replicated_operand")) < 1e-12


def test_an_average_that_is_not_sharded_alike_is_refused(ranks):
    for said in ranks.call(f"{CASES}:not_alike"):
        assert said.startswith("ConfigError: the two models are not sharded alike; found: 'net.0.weight': (8, 3) and (4, 3)")


def test_the_whole_state_is_on_rank_0_alone(ranks):
    first, second = ranks.call(f"{CASES}:whole_state")
    model = cases.energy()
    assert second == {} and list(first) == list(model.state_dict())
    assert all(torch.equal(first[name], tensor) for name, tensor in model.state_dict().items())
    fresh = cases.energy(1)
    fresh.load_state_dict(first)
    with torch.no_grad():
        assert torch.equal(fresh(torch.ones(2, 3).double()), model(torch.ones(2, 3).double()))


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("whole", "whole weights are loaded into a sharded model; found: 'net.0.weight'"),
        ("assigned", "whole weights are loaded into a sharded model; found: 'net.0.weight'"),
        ("into a network", "whole weights are loaded into a sharded model; found: '0.weight'"),
        ("shards", "weights of a sharded model are loaded into one that is not; found: 'net.0.weight'"),
        ("gathered", "inside unsharded"),
    ],
)
def test_a_state_that_is_divided_otherwise_is_refused_with_the_cure(ranks, what, found):
    cure = {"shards": "full_state(model, manager)", "gathered": "leave the with block"}.get(
        what, "set_model_state_dict(model, state"
    )
    for said in ranks.call(f"{CASES}:loaded", what):
        assert said.startswith("weights are loaded inside" if what == "gathered" else found) and found in said and cure in said


def test_the_cure_loads_rank_0_s_whole_state(ranks):
    assert ranks.call(f"{CASES}:loaded", "as told") == [True, True]
