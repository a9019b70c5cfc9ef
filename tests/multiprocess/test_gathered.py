"""Gathered calls on two ranks against one unsharded model: gradients of losses of second order and higher, in float64."""

from __future__ import annotations

import pytest

from tests.multiprocess.standing import Ranks

CASES = "tests.multiprocess.gathered_cases:"


@pytest.mark.parametrize("loss", ["score", "with_energy", "own_call", "trace", "two_phases", "two_phases_turned"])
@pytest.mark.parametrize("how", ["blocks", "whole", "layers only"])
def test_the_gradients_are_those_of_the_unsharded_model(ranks, loss, how):
    """B78: storage that the second backward still needs is never freed, for there is none."""
    if how == "layers only" and loss != "score":
        pytest.skip("what lies outside the layers is the user's to average: one loss shows it")
    errors = ranks.call(CASES + "gradients_agree", loss, how, 1, False)
    if how == "layers only":
        assert max(errors) < 10  # it runs; the parameters outside have this rank's gradient
    else:
        assert max(errors) < 1e-12


@pytest.mark.parametrize("loss", ["score", "two_phases"])
def test_micro_batches_add_up(ranks, loss):
    assert max(ranks.call(CASES + "gradients_agree", loss, "blocks", 3, False)) < 1e-12


def test_replicas_of_shards(ranks):
    assert max(ranks.call(CASES + "gradients_agree", "score", "blocks", 1, True)) < 1e-12


@pytest.mark.parametrize("loss", ["score", "two_phases"])
def test_twenty_steps_are_those_of_the_unsharded_model(ranks, loss):
    assert max(ranks.call(CASES + "training_agrees", loss)) < 1e-9


@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_energies_and_forces_of_a_potential(ranks, how):
    assert max(ranks.call(CASES + "potential_agrees", how)) < 1e-9


def test_unsharded_gathers_once_and_leaves_nothing(ranks):
    for found in ranks.call(CASES + "sampling"):
        assert found["gradient"] < 1e-14
        assert found["later"] < 1e-14
        assert found["kinds"]
        assert found["constants"]


def test_dropout_is_the_same_in_everything_computed_again(ranks):
    for first, norm, second, other in ranks.call(CASES + "dropout"):
        assert max(first, second) < 1e-12
        assert norm != other


def test_short_weights_and_long_gradients(ranks):
    for found in ranks.call(CASES + "short"):
        assert found["dtypes"] == ["torch.float32"]
        assert found["angle"] > 0.99


def test_a_gradient_of_parameters_is_not_differentiated_again(ranks):
    for said in ranks.call(CASES + "parameters_twice"):
        assert said.startswith("TrainingError: a gradient of sharded parameters is to be differentiated again")


def test_weights_of_one_block_at_a_time(ranks):
    for found in ranks.call(CASES + "held")[0]:
        # the root's own vector is there for the whole pass
        assert found["most"] <= found["block"] + 6
        assert found["left"] == 0
        assert found["most"] < 0.6 * found["total"]


@pytest.mark.slow
def test_more_ranks():
    """Four ranks on a mesh of replicas times shards."""
    group = Ranks(4)
    try:
        assert max(group.call(CASES + "gradients_agree", "score", "blocks", 1, True)) < 1e-12
        assert max(group.call(CASES + "gradients_agree", "two_phases", "blocks", 2, False)) < 1e-12
        assert max(group.call(CASES + "potential_agrees", "blocks")) < 1e-9
    finally:
        group.close()
