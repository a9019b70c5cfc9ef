"""Two real ranks, one process, and back, in the middle of an epoch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nvalchemi.distributed import single_process
from tests.multiprocess import resplit_cases as cases

CASES = "tests.multiprocess.resplit_cases"


def by_epoch(*runs: Any) -> dict[int, list[int]]:
    """The rows of all ranks' steps, by epoch."""
    found: dict[int, list[int]] = {}
    for run in runs:
        for epoch, rows in run["seen"]:
            found.setdefault(epoch, []).extend(rows)
    return found


@pytest.mark.parametrize("kind", ["one", "several", "torch's"])
def test_two_ranks_one_process_two_ranks_one_process(ranks: Any, tmp_path: Any, kind: str) -> None:
    """K02, B29: each row once an epoch; as a global batch stays 8 rows, the weights and the records are those of one unbroken run."""
    alone = single_process("cpu")
    whole = cases.train(alone, str(tmp_path / "whole"), kind, 8, 10, records=str(tmp_path / "whole"))
    records = str(tmp_path / "records")

    def saved(part: str, step: int) -> str:
        return str(tmp_path / part / f"step-{step:08d}")

    # Each part makes a step more than the next one takes from it, so that the next goes on within a window of the records.
    first = ranks.call(f"{CASES}:train", str(tmp_path / "a"), kind, 4, 3, records)
    second = cases.train(alone, str(tmp_path / "b"), kind, 8, 4, records, saved("a", 2))
    third = ranks.call(f"{CASES}:train", str(tmp_path / "c"), kind, 4, 6, records, saved("b", 3))
    last = cases.train(alone, str(tmp_path / "d"), kind, 8, 10, records, saved("c", 4))
    parts = [*first, second, *third, last]
    assert [run["starts"] for run in parts] == [[0], [0], [], [1], [1], [1]]
    for run, steps in zip(parts, (2, 2, 1, 1, 1, 6), strict=True):
        del run["seen"][steps:]
    rows = by_epoch(*parts)
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(40)) and rows[0] != rows[1]
    assert last["progress"] == whole["progress"]
    assert [run["calls"] for run in parts] == [(3, 3)] * 2 + [(4, 4), (6, 6), (3, 3), (10, 10)]  # a new rank begins afresh
    for weight, expected in zip(last["weights"], whole["weights"], strict=True):
        assert torch.allclose(weight, expected, rtol=1e-12, atol=1e-14)
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "whole", tmp_path / "records")
    ]
    assert [record["step"] for record in lines[1]] == [4, 8, 10]
    assert [record["loss"] for record in lines[1]] == pytest.approx([record["loss"] for record in lines[0]], rel=1e-12)


def test_ranks_that_were_there_keep_their_streams_and_new_ones_begin(ranks: Any, tmp_path: Any) -> None:
    """B64: the rule for another number of ranks."""
    alone = single_process("cpu")

    def run(folder: str, *, through: int) -> Any:
        state = torch.get_rng_state()
        try:
            cases.train(alone, str(tmp_path / folder), "one", 4, 2)
            return ranks.call(f"{CASES}:train", str(tmp_path / folder), "one", 4, through)
        finally:
            torch.set_rng_state(state)

    unbroken = cases.train(alone, str(tmp_path / "alone"), "one", 4, 4)
    first, second = run("a", through=4)
    assert first["noise"] == unbroken["noise"][4:]
    assert not set(second["noise"]) & set(first["noise"])
    assert run("b", through=4)[1]["noise"] == second["noise"]


@pytest.mark.parametrize("stop", [13, 10], ids=["within epoch 2", "at the end of epoch 1"])
def test_workers_of_torchs_loader_go_on_in_the_unbroken_order(ranks: Any, tmp_path: Any, stop: int) -> None:
    """K05, K06, B60: 20 rows, 2 ranks, batch 2, 2 workers each: 5 steps an epoch, three epochs."""
    whole = ranks.call(f"{CASES}:train", str(tmp_path / "whole"), "workers", 2, 15)
    before = ranks.call(f"{CASES}:train", str(tmp_path / "parts"), "workers", 2, stop)
    after = ranks.call(f"{CASES}:train", str(tmp_path / "parts"), "workers", 2, 15)
    for unbroken, first, second in zip(whole, before, after, strict=True):
        assert first["seen"] + second["seen"] == unbroken["seen"]
    rows = by_epoch(*whole)
    assert [sorted(rows[epoch]) for epoch in range(3)] == [list(range(20))] * 3
    assert len({tuple(rows[epoch]) for epoch in range(3)}) == 3


def test_what_is_left_out_or_repeated_is_told_once(ranks: Any, tmp_path: Any) -> None:
    """B25: 41 rows on 2 ranks, and 1, which both ranks train on: more than a tenth is a warning."""
    first, second = ranks.call(f"{CASES}:logged", str(tmp_path / "a"), "41")
    assert first == ["INFO epoch 0 has 1 of 41 samples twice: 2 ranks take as many each"] and second == []
    first, _ = ranks.call(f"{CASES}:logged", str(tmp_path / "b"), "41, dropped")
    assert first == ["INFO epoch 0 leaves out 1 of 41 samples: the last ones of its order"]
    assert cases.logged(single_process("cpu"), str(tmp_path / "c"), "41") == []
    first, second = ranks.call(f"{CASES}:logged", str(tmp_path / "d"), "1")
    assert first == ["WARNING epoch 0 has 1 of 1 samples twice: 2 ranks take as many each"] and second == []
