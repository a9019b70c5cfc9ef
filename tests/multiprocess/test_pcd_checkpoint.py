"""Persistent chains of ranks: each gets its own back, and on another number of ranks none is lost and none is doubled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvalchemi.distributed import single_process
from nvalchemi.training import layout
from tests.multiprocess import pcd_cases as cases
from tests.multiprocess.standing import Ranks

CASES = "tests.multiprocess.pcd_cases"


def alone(*arguments: Any) -> list[Any]:
    state = torch.get_rng_state()
    try:
        return [cases.train(single_process("cpu"), *arguments)]
    finally:
        torch.set_rng_state(state)


def pool(parts: list[Tensor]) -> list[list[float]]:
    return sorted(torch.cat(parts).tolist())


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("mix", [None, 3])
def test_each_rank_gets_its_own_back(ranks: Any, tmp_path: Any, mix: int | None, sharded: bool) -> None:
    settings = {"mix_every": mix}
    whole = ranks.call(f"{CASES}:train", str(tmp_path / "whole"), 7, None, settings, sharded)
    first = ranks.call(f"{CASES}:train", str(tmp_path / "parts"), 4, None, settings, sharded)
    rest = ranks.call(f"{CASES}:train", str(tmp_path / "parts"), 7, "latest", settings, sharded)
    assert [run["error"] for run in (*whole, *first, *rest)] == [None] * 6
    for unbroken, before, after in zip(whole, first, rest, strict=True):
        assert after["start"] is not None and torch.equal(before["end"], after["start"])
        assert torch.equal(unbroken["end"], after["end"])
        assert sharded or all(torch.equal(a, b) for a, b in zip(unbroken["weights"], after["weights"], strict=True))
    assert not torch.equal(whole[0]["end"], whole[1]["end"])
    saved = layout.latest(tmp_path / "parts")
    assert saved is not None and {"rank-00000.pt", "rank-00001.pt"} <= saved.manifest["files"].keys()


def test_they_are_dealt_out_to_another_number_of_ranks(ranks: Any, tmp_path: Any) -> None:
    two = ranks.call(f"{CASES}:train", str(tmp_path / "two"), 4)
    (one,) = alone(str(tmp_path / "one"), 6, str(tmp_path / "two"))
    assert one["error"] is None
    assert len(one["start"]) == 2 * cases.SLOTS and pool([one["start"]]) == pool([run["end"] for run in two])
    back = ranks.call(f"{CASES}:train", str(tmp_path / "back"), 9, str(tmp_path / "one"), {"mix_every": 2})
    assert [run["error"] for run in back] == [None, None]
    assert [len(run["start"]) for run in back] == [cases.SLOTS] * 2
    assert pool([run["start"] for run in back]) == pool([one["end"]])


@pytest.mark.slow
def test_two_ranks_then_four(ranks: Any, tmp_path: Any) -> None:
    two = ranks.call(f"{CASES}:train", str(tmp_path / "two"), 4)
    group = Ranks(4)
    try:
        four = group.call(f"{CASES}:train", str(tmp_path / "four"), 9, str(tmp_path / "two"), {"mix_every": 2})
        again = group.call(f"{CASES}:train", str(tmp_path / "four"), 11, "latest", {"mix_every": 2})
    finally:
        group.close()
    assert [run["error"] for run in (*four, *again)] == [None] * 8
    assert [len(run["start"]) for run in four] == [3, 3, 2, 2]
    assert pool([run["start"] for run in four]) == pool([run["end"] for run in two])
    for before, after in zip(four, again, strict=True):
        assert torch.equal(before["end"], after["start"])


def test_or_begin_anew_or_are_refused(ranks: Any, tmp_path: Any) -> None:
    ranks.call(f"{CASES}:train", str(tmp_path / "two"), 4)
    path = str(tmp_path / "two")
    (anew,) = alone(str(tmp_path / "a"), 5, path, {"on_world_size_change": "reinitialize"})
    assert anew["error"] is None and anew["start"] is None and len(anew["end"]) == cases.SLOTS
    assert "the chains of 2 ranks are left out: those of 1 ranks begin anew" in anew["said"]
    (refused,) = alone(str(tmp_path / "b"), 5, path, {"on_world_size_change": "error"})
    assert "the chains are those of another number of ranks; found: 1 now; needed: 2" in refused["error"]
    (unsaid,) = alone(str(tmp_path / "c"), 5, path, None, False, False)
    assert "nothing says what becomes of them" in unsaid["error"] and "add PCDCheckpointHook()" in unsaid["error"]


def test_the_hook_is_asked_for(ranks: Any, tmp_path: Any) -> None:
    for run in ranks.call(f"{CASES}:train", str(tmp_path), 4, None, None, False, False):
        assert (
            "ConfigError: each rank has persistent chains" in run["error"] and "add PCDCheckpointHook() to hooks" in run["error"]
        )
    (one,) = alone(str(tmp_path / "one"), 4, None, None, False, False)  # one process keeps them in any case
    assert one["error"] is None
    (rest,) = alone(str(tmp_path / "one"), 6, "latest")
    assert torch.equal(one["end"], rest["start"])


@pytest.mark.parametrize("structures", [False, True], ids=["vectors", "structures"])
@pytest.mark.parametrize("total", [7, 8, 2])
def test_unequal_shares_are_mixed_and_none_is_lost(ranks: Any, total: int, structures: bool) -> None:
    first, second = ranks.call(f"{CASES}:mixed", total, 6, structures)
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(total))
        assert len(ours) - len(theirs) in (0, 1)
    assert total == 2 or len({frozenset(chains) for chains in first}) > 1
    if total == 7:  # the one that is over is not always the same
        assert len({chains[-1] for chains in first}) > 1
