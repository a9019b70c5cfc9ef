"""DDPHook with mixed precision, several models, parts that are not always used, and torch's options: two ranks against one process."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import model_cases as cases

CASES = "tests.multiprocess.model_cases"


def both(ranks, case, *arguments):
    """What one process gives, and the ranks."""
    return getattr(cases, case)(single_process("cpu"), *arguments), ranks.call(f"{CASES}:{case}", *arguments)


def assert_close(got, wanted, tolerance):
    """Gradients of every step, losses and the weights after them; a gradient's scale is that of its model's largest."""
    assert got["error"] is None and wanted["error"] is None
    for a, b in zip(got["gradients"], wanted["gradients"], strict=True):
        assert a.keys() == b.keys()
        scale = max(float(g.abs().max()) for g in b.values())
        assert max(float((a[key] - b[key]).abs().max()) for key in b) <= tolerance * scale
    assert got["losses"] == pytest.approx(wanted["losses"], rel=max(tolerance, 1e-12))
    for key, value in wanted["weights"].items():
        assert torch.allclose(got["weights"][key], value, rtol=max(tolerance, 1e-11), atol=tolerance), key


def assert_same_weights(first, second):
    assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_mixed_precision(ranks, dtype, tolerance, accumulate):
    alone, (first, second) = both(ranks, "mixed", dtype, accumulate)
    assert_close(first, alone, tolerance)
    assert_same_weights(first, second)
    assert alone["step"] == 3 and first["metrics"] == second["metrics"] == alone["metrics"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_norms_and_losses_are_the_true_ones(ranks, dtype, tolerance, accumulate):
    """B46, B48: neither the loss scale, nor the number of ranks, nor that of micro-batches is in what is told or cut."""
    alone, (first, second) = both(ranks, "clipped", dtype, accumulate)
    assert first["told"] == second["told"] and len(alone["told"]) == 3
    for got, wanted in zip(first["told"], alone["told"], strict=True):
        assert got == pytest.approx(wanted, rel=tolerance)
    for gradients in (alone["gradients"], first["gradients"]):
        for step in gradients:
            assert float(torch.stack([g.norm() for g in step.values()]).norm()) == pytest.approx(0.01, rel=1e-5)
    assert_same_weights(first, second)


def test_an_overflow_on_one_rank_is_agreed_on(ranks):
    """B44 on ranks: both skip the step, lower the scale and leave the average alone, though rank 0 saw finite gradients."""
    first, second = ranks.call(f"{CASES}:overflow")
    for got in (first, second):
        assert got["error"] is None
        assert [reason is not None for reason in got["skips"]] == [False, False, True, False, False]
        assert (got["step"], got["ema"], got["metrics"]["loss_scale"]) == (4, 4, 128.0)
    assert all(g.isfinite().all() for g in first["gradients"][2].values())
    assert not all(g.isfinite().all() for g in second["gradients"][2].values())
    assert_same_weights(first, second)


@pytest.mark.parametrize(
    ("case", "arguments"), [("distilled", ()), ("two_trained", (1,)), ("two_trained", (2,)), ("adversarial", ())]
)
def test_several_models(ranks, case, arguments):
    alone, (first, second) = both(ranks, case, *arguments)
    assert_close(first, alone, 1e-12)
    assert_same_weights(first, second)
    if case == "distilled":
        assert not any(key.startswith("teacher") for key in first["gradients"][0])


UNUSED = {
    "another head on each rank": ([["a", "a"], ["b", "b"]], 1),
    "another head in each step": ([["a", "b"], ["a", "b"]], 1),
    "B82: a head first used in the last micro-batch": ([["a", "b"], ["a", "b"]], 2),
}


@pytest.mark.parametrize("name", UNUSED)
def test_unused_parameters_are_found(ranks, name):
    used, accumulate = UNUSED[name]
    alone, (first, second) = both(ranks, "two_heads", used, accumulate, {"find_unused_parameters": True})
    assert_close(first, alone, 1e-12)  # also that a head has no gradient, rather than zeros, in a step in which no rank used it
    assert_same_weights(first, second)


@pytest.mark.parametrize(("dtype", "precision", "tolerance"), [("float32", "bf16", 3e-2), ("float32", "fp16", 4e-3)])
def test_b82_in_mixed_precision(ranks, dtype, precision, tolerance):
    """B82: the right gradients, where a head is used in micro-batch 2 of 2 only."""
    used, accumulate = UNUSED["B82: a head first used in the last micro-batch"]
    arguments = (used, accumulate, {"find_unused_parameters": True}, dtype, precision)
    alone, (first, second) = both(ranks, "two_heads", *arguments)
    assert_close(first, alone, tolerance)
    assert_same_weights(first, second)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_unused_parameters_that_nobody_looks_for_are_named(ranks, accumulate):
    """B82: before any weight moves apart, and not at the next forward, which a last step does not have."""
    used = [["a"] * accumulate, ["a"] * accumulate] if accumulate == 1 else [["a", "b"], ["a", "b"]]
    for got in ranks.call(f"{CASES}:two_heads", used, accumulate, {}):
        assert "find_unused_parameters=True" in got["error"] and got["gradients"] == []
        assert ("b.weight, b.bias" if accumulate == 1 else "a.weight, a.bias") in got["error"]


def test_a_model_that_only_earlier_micro_batches_use_is_named(ranks):
    for got in ranks.call(f"{CASES}:half_used"):
        assert "model 'sometimes' was used in earlier micro-batches" in got["error"] and got["gradients"] == []


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("bf16_compress", 2e-2),
        ("fp16_compress", 2e-3),
        ("bucket view", 1e-12),
        ("static graph", 1e-12),
        ("unused, bucket view", 1e-12),
        ("a group of all", 1e-12),
    ],
)
def test_options(ranks, name, tolerance):
    alone, (first, second) = both(ranks, "with_options", name)
    assert_close(first, alone, tolerance)
    assert_same_weights(first, second)


def test_static_graph_excludes_accumulation(ranks):
    for got in ranks.call(f"{CASES}:accumulated_static_graph"):
        assert got["error"].startswith("ConfigError: static_graph excludes accumulation")


def test_running_means_are_those_of_rank_0(ranks):
    first, second = ranks.call(f"{CASES}:normalised", True)
    assert first["error"] is None
    assert_same_weights(first, second)  # buffers are among them
    assert first["validation"] == second["validation"]


def test_running_means_are_each_ranks_own_without_broadcast(ranks):
    first, second = ranks.call(f"{CASES}:normalised", False)
    different = {key for key, value in first["weights"].items() if not torch.equal(value, second["weights"][key])}
    assert different == {"model.1.running_mean", "model.1.running_var"}
    assert first["validation"] == second["validation"]
