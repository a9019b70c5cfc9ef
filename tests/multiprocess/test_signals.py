"""B70: a signal to one rank or to all ends the run on all of them at one step, with one checkpoint, and a resume goes on from there."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.multiprocess.signal_cases import SHARE

CASES = "tests.multiprocess.signal_cases"


def check(results, step):
    """Both ranks stopped after ``step`` steps, saved once, and the resumed run ended as the undisturbed one."""
    for broken, rest, whole in results:
        assert broken["error"] is None and rest["error"] is None and whole["error"] is None
        assert broken["interrupted"] and not rest["interrupted"] and not whole["interrupted"]
        assert broken["saved"] == [(step, f"step-{step:08d}")]
        assert broken["steps"] == step and rest["steps"] == whole["steps"] - step
        assert broken["validations"] + rest["validations"] == whole["validations"]
        assert all(torch.equal(a, b) for a, b in zip(rest["weights"], whole["weights"], strict=True))
    assert results[0][0]["stop"] == results[1][0]["stop"]
    return results[0][0]["stop"]


@pytest.mark.parametrize("whom", [(1,), (0, 1)], ids=["one", "all"])
@pytest.mark.parametrize(
    ("number", "stage", "step", "stops_at"),
    [
        (signal.SIGTERM, "LOSS_READY", 1, 2),
        (signal.SIGUSR1, "LOSS_READY", 0, 1),  # in the first step
        (signal.SIGINT, "LOSS_READY", 2, 3),  # a validation is due after that step
        (signal.SIGUSR1, "EPOCH_END", 4, 4),
    ],
)
def test_ranks_stop_together(ranks, tmp_path, number, stage, step, stops_at, whom):
    assert number.name in check(ranks.call(f"{CASES}:signalled", str(tmp_path), number, stage, step, whom), stops_at)


def test_before_the_first_step_nothing_is_saved(ranks, tmp_path):
    for broken, rest, whole in ranks.call(f"{CASES}:signalled", str(tmp_path), signal.SIGTERM, "SETUP", 0, (0,)):
        assert broken["interrupted"] and broken["error"] is None
        assert broken["steps"] == 0 and broken["saved"] == []
        assert all(torch.equal(a, b) for a, b in zip(rest["weights"], whole["weights"], strict=True))


@pytest.mark.parametrize("whom", [(1,), (0, 1)], ids=["one", "all"])
def test_a_validation_is_cut_short_and_made_up_for(ranks, tmp_path, whom):
    results = ranks.call(f"{CASES}:in_validation", str(tmp_path), whom)
    check(results, 3)
    for broken, _, _ in results:
        assert broken["validations"] == []
        assert 5 <= broken["batches"] < SHARE // 2


@pytest.mark.parametrize("whom", [(1,), (0, 1)], ids=["one", "all"])
def test_ranks_save_together_and_go_on(ranks, tmp_path, whom):
    for error, steps, saved in ranks.call(f"{CASES}:asked_to_save", str(tmp_path), whom):
        assert error is None and steps == 8
        assert saved == [2, 8]
