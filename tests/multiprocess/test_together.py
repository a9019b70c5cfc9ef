"""Ranks stop, skip, fail and report together, and none waits for ever."""

from __future__ import annotations

import json

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.training import layout
from tests.multiprocess import together_cases as cases

CASES = "tests.multiprocess.together_cases"


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a["weights"], b["weights"], strict=True))


def test_ranks_that_the_strategy_does_not_know_of_are_no_runs_of_their_own(ranks):
    for said in ranks.call(f"{CASES}:unknown"):
        assert "DDPHook divides the work" in said and "2 processes, and no distributed_manager" in said


@pytest.mark.parametrize("what", ["num_steps", "num_epochs", "accumulate", "samples", "seed"])
def test_ranks_with_unlike_declarations_are_told(ranks, what):
    """They waited for each other in vain, or trained on the same samples."""
    for said in ranks.call(f"{CASES}:unlike", what):
        word = "order shuffled by seed" if what == "seed" else what
        assert said.startswith("ConfigError: the ranks were declared unlike runs") and f"rank 1: {word}" in said


def test_what_went_round_is_held_beyond_the_end_of_its_collective(ranks):
    """A thread of gloo that lets go of it last needs the interpreter, and a worker that is forked then waits for ever."""
    assert ranks.call(f"{CASES}:held") == [True, True]


def test_a_loader_that_ends_early_ends_the_epoch_on_all_ranks(ranks):
    """B25."""
    (first, after), (second, _) = ranks.call(f"{CASES}:exhausted")
    assert (first["steps"], second["steps"]) == (10, 10)
    assert first["epoch"] == second["epoch"] == 2
    assert first["error"] is None and same(first, second)
    assert after["steps"] == 2


def test_a_spike_on_one_rank_is_skipped_on_all(ranks):
    first, second = ranks.call(f"{CASES}:spoilt", True)
    assert first["skips"] == second["skips"]
    assert [reason is not None for reason in first["skips"]] == [False, False, True, False, False, False]
    assert same(first, second)


def test_a_loss_that_is_not_finite_ends_all(ranks):
    first, second = ranks.call(f"{CASES}:spoilt", False)
    assert first["error"] == second["error"]
    assert first["error"].startswith("TrainingError: the loss of the step after 2 is nan")
    assert first["plain"] and second["plain"]


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("stage", ["LOSS_READY", "MICROBATCH", "GRADIENTS_READY"])
def test_a_skip_on_one_rank_is_everybodys(ranks, stage, spoilt):
    first, second = ranks.call(f"{CASES}:skipped", stage, spoilt)
    assert first["error"] is None and second["error"] is None
    assert first["skips"] == second["skips"]
    assert first["skips"] == [None, None, "rank 1: rank 1 does not like it", None, None, None]
    assert same(first, second)


def test_a_skip_that_nobody_else_hears_of_is_an_error(ranks):
    first, second = ranks.call(f"{CASES}:skipped_alone", breaks=True)
    assert second["error"].startswith("TrainingError: one rank asked to skip the step when the ranks had told each other already")
    assert "rank 1: TrainingError: one rank asked" in first["error"]


@pytest.mark.parametrize(
    ("how", "read"),
    [
        ("free", [2, 3, 4, 5, 6, 6]),
        ("loss", [2, 3, 4]),
        ("agreed", [2, 3, 4]),
        ("late", [1, 2, 3]),  # it may stop at the end of a step, so that nothing is asked before
        ("drawing", [1, 2, 3, 4, 5, 6]),  # its batches may draw on the streams of the training
    ],
)
def test_a_batch_is_read_and_asked_for_ahead_where_that_changes_nothing(ranks, how, read):
    """The answer comes during the step before; all ranks end with the step in which one says so."""
    first, second = ranks.call(f"{CASES}:read_ahead", how)
    assert first["error"] is None and second["error"] is None
    assert first["read"] == second["read"] == read
    assert first["steps"] == second["steps"] == len(read)
    assert (first["stop"] is None) == (len(read) == 6) and first["stop"] == second["stop"]
    assert same(first, second)


@pytest.mark.parametrize(
    ("hooks", "count"), [((), 1), (("spike", "clip", "signals"), 1), (("undeclared",), 3)], ids=["none", "ours", "undeclared"]
)
def test_a_step_asks_as_seldom_as_can_be(ranks, hooks, count):
    """Once, during the backward: the loss, with skips and stops, and whether to go on, with the counts of the next step."""
    for per_step in ranks.call(f"{CASES}:collectives", *hooks):
        assert per_step[1:] == [count] * 3


@pytest.mark.parametrize(("case", "steps"), [("stopped", 3), ("signalled", 3), ("early", 3)])
def test_stops_are_everybodys(ranks, case, steps):
    first, second = ranks.call(f"{CASES}:{case}")
    assert (first["steps"], second["steps"]) == (steps, steps)
    assert first["stop"] == second["stop"] is not None
    assert same(first, second)


def test_a_batch_that_cannot_be_read_ends_all_with_the_cause(ranks):
    (first, after), (second, again) = ranks.call(f"{CASES}:unreadable")
    assert "rank 1: OSError: the disk is gone" in first["error"]
    assert second["error"] == "OSError: the disk is gone"
    assert after["error"] is None and again["error"] is None  # the group is still good


@pytest.mark.parametrize(
    ("stage", "rank"),
    [("forward", 1), ("GRADIENTS_READY", 1), ("STEP_END", 0), ("EPOCH_END", 1)],
)
def test_an_exception_on_one_rank_ends_all_with_the_cause(ranks, stage, rank):
    """B25: in the forward or in a hook; the others are waiting by then, and hear of it when the rank leaves."""
    seen = ranks.call(f"{CASES}:broken", stage, rank, breaks=True)
    own = "ValueError: a forward that fails" if stage == "forward" else "KeyError: 'a hook that fails'"
    assert seen[rank]["error"] == own
    assert seen[1 - rank]["error"].startswith("TrainingError: another rank ended the run")
    assert f"rank {rank}: {own}" in seen[1 - rank]["error"]
    assert seen[0]["plain"] and seen[1]["plain"]
    first, second = ranks.call(f"{CASES}:stopped")  # the processes are still good
    assert first["error"] is None and same(first, second)


def test_reports_are_of_all_ranks(ranks, tmp_path):
    first, second = ranks.call(f"{CASES}:metrics", str(tmp_path))
    assert first["losses"] == second["losses"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in records] == pytest.approx([sum(first["losses"][i : i + 2]) / 2 for i in (0, 2)])


@pytest.mark.parametrize("size", [1, 2])
def test_validation_counts_every_sample_once(ranks, size):
    """B27."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    alone = cases.validated(single_process("cpu"), values, size)["validation"]
    assert alone["n"] == 5
    assert alone["loss"] == pytest.approx(3.0 - 0.01)  # one step has moved the bias
    for got in ranks.call(f"{CASES}:validated", values, size):
        assert got["validation"] == pytest.approx(alone, rel=1e-14)


def test_a_rank_without_validation_data(ranks):
    for got in ranks.call(f"{CASES}:validated", [7.0], 2):
        assert got["validation"]["n"] == 1


def test_two_ranks_resume(ranks, tmp_path):
    (whole, rest), (whole_too, rest_too) = ranks.call(f"{CASES}:resumed", str(tmp_path))
    assert [seen["error"] for seen in (whole, rest, whole_too, rest_too)] == [None] * 4
    assert (whole["steps"], rest["steps"], rest_too["steps"]) == (4, 2, 2)
    assert same(whole, rest) and same(whole, rest_too)
    assert rest["noise"] == whole["noise"][2:] and rest_too["noise"] == whole_too["noise"][2:]
    assert whole["noise"] != whole_too["noise"]  # B36: each rank has its own stream
    saved = layout.latest(tmp_path / "whole")
    assert sorted(saved.manifest["files"]) == [
        "index.json",
        "rank-00000.pt",
        "rank-00001.pt",
        "shared-00000.safetensors",
        "shared.pt",
    ]
    assert saved.manifest["progress"]["samples"] == 4 * 5
    assert not list((tmp_path / "whole").glob(".*"))


def test_random_streams_are_each_ranks_own_and_go_on_over_a_resume(ranks, tmp_path):
    """B64, B36: noise and dropout differ between ranks, repeat with the seed, and go on where they were; the first weights are equal."""
    results = ranks.call(f"{CASES}:random_streams", str(tmp_path))
    for whole, again, rest in results:
        assert whole["error"] is None and rest["error"] is None
        for kind in ("own", "torch", "losses"):
            assert again[kind] == whole[kind]
            assert rest[kind] == whole[kind][5:]
        assert same(whole, rest)
    (first, _, _), (second, _, _) = results
    for kind in ("own", "torch"):
        assert not set(first[kind]) & set(second[kind])
    assert all(torch.equal(a, b) for a, b in zip(first["at_start"], second["at_start"], strict=True))
    assert same(first, second)


def test_one_process_does_not_resume_what_two_ranks_saved_in_silence(ranks, tmp_path):
    ranks.call(f"{CASES}:resumed", str(tmp_path))
    got = cases.run(single_process("cpu"), cases.batches(4, 0), resume_from=tmp_path / "whole")
    assert got["error"] is None  # the end of an epoch is a place in any loader
    got = cases.run(single_process("cpu"), cases.batches(4, 0), resume_from=tmp_path / "parts" / "step-00000003")
    assert "another number of processes" in got["error"] and "processes 1" in got["error"] and "processes 2" in got["error"]


def test_a_rank_that_cannot_save_ends_all(ranks, tmp_path):
    first, second = ranks.call(f"{CASES}:unsaveable", str(tmp_path))
    assert "no plain data" in second["error"]
    assert "rank 1" in first["error"] and "no plain data" in first["error"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rates_of_a_time_budget_are_those_of_the_first_ranks_clock(ranks, accumulate):
    """The other's runs four times as fast; the budget is used up at the first rank's 0.8 s, at one step on both."""
    first, second = ranks.call(f"{CASES}:clocked", accumulate)
    assert first["error"] is None and second["error"] is None
    assert first["rates"] == second["rates"] and len(first["rates"]) == first["steps"] == second["steps"] > 3
    assert all(a >= b for a, b in zip(first["rates"], first["rates"][1:], strict=False))
    assert first["rates"][0] > 0.008 and first["rates"][-1] < 0.003
    assert same(first, second)
