"""Sharded networks of kinds that people write give what they give in one piece."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import odd_net_cases as cases

OLD = torch.__version__ < "2.9"
CASES = "tests.multiprocess.odd_net_cases"


@pytest.mark.parametrize("each", [False, True], ids=["as it comes", "each layer"])
@pytest.mark.parametrize("loss", cases.LOSSES)
@pytest.mark.parametrize("name", cases.NETS)
def test_same_gradients_and_buffers(ranks, name, loss, each):
    """Hooks of a user's own run; buffers that a forward moves move once, and what is computed again sees them as they were."""
    if name in ("Waves", "Numbers") and OLD:
        pytest.skip("this torch sends no complex numbers through gloo, and shards no whole ones")
    assert max(ranks.call(f"{CASES}:agrees", name, loss, each)) < 1e-11


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "by hand"])
def test_parameters_without_entries_are_trained_averaged_saved_and_loaded(ranks, how, tmp_path):
    if how == "by hand" and OLD:
        pytest.skip("this torch cannot add up shards without entries, which FSDP2Hook leaves whole")
    wanted = cases.vacant_run(single_process("cpu"), how, str(tmp_path / "alone"))
    for got in ranks.call(f"{CASES}:vacant_run", how, str(tmp_path / "ranks")):
        assert [(name, tensor.shape) for name, tensor in got] == [(name, tensor.shape) for name, tensor in wanted]
        for (_, a), (_, b) in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("forward", "read by the network itself, whose parts are into, out"),
        ("validation", "read by the network itself, whose parts are into, out"),
        ("penalty", "use the optimizer's weight_decay"),
    ],
)
def test_a_shard_read_as_if_it_were_whole_is_told_with_the_cure(ranks, what, said):
    for found in ranks.call(f"{CASES}:misread", what):
        assert said in found and ("FSDP2Hook(wrap=...)" in found) == (what != "penalty")
        assert "test" not in found or "odd_net_cases.py" in found
    assert ranks.call(f"{CASES}:read_within") == ["nothing"] * 2


def test_running_means_are_those_of_rank_0_on_every_rank(ranks):
    first, second = ranks.call(f"{CASES}:running_means")
    assert first["moved"] and first["validation"] == second["validation"]
    assert all(a.equal(b) for a, b in zip(first["buffers"], second["buffers"], strict=True))


@pytest.mark.parametrize("each", [False, True], ids=["as it comes", "each layer"])
def test_an_energy_may_call_parts_of_its_network(ranks, each):
    assert max(ranks.call(f"{CASES}:agrees", "parts", "scores", each)) < 1e-11
    assert max(ranks.call(f"{CASES}:agrees", "method", "scores", each)) < 1e-11


@pytest.mark.parametrize("each", [False, True], ids=["as it comes", "each layer"])
@pytest.mark.parametrize("loss", cases.LOSSES)
def test_a_method_of_a_network_may_read_its_own_parameters(ranks, loss, each):
    """The first call finds that out and is made again, as if it had not been."""
    assert max(ranks.call(f"{CASES}:agrees", "own", loss, each)) < 1e-11


@pytest.mark.parametrize("loss", cases.LOSSES)
def test_so_may_one_of_a_network_that_has_no_parts(ranks, loss):
    assert max(ranks.call(f"{CASES}:agrees", "alone", loss, False)) < 1e-11


def test_a_part_that_is_called_by_somebody_else_and_differentiated_twice(ranks):
    for found in ranks.call(f"{CASES}:alone"):
        assert "it could not be seen" in found and "model 'model'" in found and "model(...)" in found


def test_tensors_that_reach_a_part_past_its_arguments_lose_no_gradient_in_silence(ranks):
    for found in ranks.call(f"{CASES}:hidden", "attribute"):
        assert found.startswith("Conditioned reads a tensor that requires a gradient and is no argument")
    for found in ranks.call(f"{CASES}:hidden", "object"):
        assert "not inside objects" in found


@pytest.mark.parametrize("how", ["scores", "energies", "looked at"])
def test_ranks_that_call_a_model_unlike_often_are_told_when_their_time_is_over(ranks, how):
    if how == "looked at" and OLD:
        pytest.skip("this torch cannot compare the messages of gloo's ranks")
    for found in ranks.call(f"{CASES}:unlike_calls", how, breaks=True):
        assert "waited in vain for each other" in found and "unsharded(model)" in found
        assert ("Detected mismatch between collectives" in found) == (how == "looked at")
