"""Checkpoints of networks that are divided between ranks: saved by all, and loaded into any other division and number of ranks."""

from __future__ import annotations

import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nvalchemi.data.address import where
from nvalchemi.data.tensor_file import TensorFile
from nvalchemi.distributed import single_process
from nvalchemi.errors import CheckpointError
from nvalchemi.testing import state_differences
from nvalchemi.training import export, layout, reading
from nvalchemi.training.shards import placed
from nvalchemi.training.storage import storage
from tests.multiprocess import sharded_cases as cases
from tests.multiprocess.standing import Ranks

CASES = "tests.multiprocess.sharded_cases"
COUNTERS = ("progress.batch", "progress.divided_at")  # another number of ranks divides the rest of an epoch anew


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: Any) -> dict[str, tuple[str, Any]]:
    """By kind of run: a checkpoint after 4 steps, and the whole of the shared state then."""
    found = {}
    for how in ("sharded", "replicated", "alone"):
        folder = tmp_path_factory.mktemp(how)
        if how == "alone":
            results = [cases.train(single_process("cpu"), how, str(folder), 4)]
        else:
            results = ranks.call(f"{CASES}:train", how, str(folder), 4)
        assert all(not list(state_differences(results[0]["end"], other["end"])) for other in results[1:])
        found[how] = (str(layout.latest(folder).path), results[0])
    return found


def test_the_network_is_divided(saved: Any) -> None:
    _, sharded = saved["sharded"]
    assert sharded["divided"] == ["0.bias", "0.weight", "2.weight", "5.bias", "5.weight"]
    assert saved["replicated"][1]["divided"] == []


def test_each_number_is_written_once(saved: Any) -> None:
    for how in ("sharded", "replicated"):
        path = Path(saved[how][0])
        index = json.loads((path / layout.INDEX).read_text())
        blocks = {(file, name): sizes for entry in index for file, name, _, sizes in entry["blocks"]}
        numbers = sum(torch.Size(sizes).numel() for sizes in blocks.values())
        twice = 2 * 49 + 1  # tied weights, in the model and in its average, and the model's buffer, which the average has too
        assert numbers == sum(torch.Size(entry["shape"]).numel() for entry in index) - twice
        written = {file for file, _ in blocks}
        assert written == (
            {"shared-00000.safetensors", "shared-00001.safetensors"} if how == "sharded" else {"shared-00000.safetensors"}
        )
        manifest = layout.read(path).manifest
        assert manifest["meshes"] == ([{"shape": [2], "names": ["shard"]}] if how == "sharded" else [])
        assert set(manifest["files"]) == {*written, "shared.pt", "index.json", "rank-00000.pt", "rank-00001.pt"}


@pytest.mark.parametrize("before", ["sharded", "replicated", "alone"])
@pytest.mark.parametrize("after", ["sharded", "replicated", "alone"])
def test_it_goes_on_in_any_division(ranks: Any, tmp_path: Any, saved: Any, before: str, after: str) -> None:
    """What is loaded is what was saved, bit for bit; where the division is the same, the run ends as the unbroken one."""
    path, expected = saved[before]
    if after == "alone":
        results = [cases.train(single_process("cpu"), after, str(tmp_path), 8, path, seed=9)]
        whole = cases.train(single_process("cpu"), after, str(tmp_path / "whole"), 8)
    else:
        results = ranks.call(f"{CASES}:train", after, str(tmp_path), 8, path, 2, 9)
        whole = ranks.call(f"{CASES}:train", after, str(tmp_path / "whole"), 8)[0]
    for result in results:
        ignore = COUNTERS if "alone" in (before, after) and before != after else ()
        assert list(state_differences(expected["end"], result["start"], ignore)) == []
        assert result["end"]["progress"]["step"] == 8
        if before == after:
            assert list(state_differences(whole["end"], result["end"])) == []
        for name, weight in whole["end"]["models"]["model"].items():
            torch.testing.assert_close(result["end"]["models"]["model"][name], weight, rtol=1e-4, atol=1e-5)


def test_one_process_reads_it_without_a_group(saved: Any) -> None:
    path, expected = saved["sharded"]
    shared = reading.read_shared(layout.read(Path(path)))
    weights = placed(shared["models"]["model"])
    model = cases.Tied(3)
    model.load_state_dict(weights)
    assert list(state_differences(expected["end"]["models"]["model"], model.state_dict())) == []
    average = cases.Tied(4)
    average.load_state_dict(placed(shared["hooks"]["ema"]["models"]["model"]))
    assert not torch.equal(average[0].weight, model[0].weight)


@pytest.mark.parametrize("how", ["alone, compiled", "replicated, compiled", "sharded, compiled"])
def test_b74_wrappers_leave_no_mark(ranks: Any, tmp_path: Any, how: str) -> None:
    """Weights and averages load strictly into a plain model, and a plain run goes on with all of it."""
    if how.startswith("alone"):
        end = cases.train(single_process("cpu"), how, str(tmp_path), 4)["end"]
    else:
        end = ranks.call(f"{CASES}:train", how, str(tmp_path), 4)[0]["end"]
    saved = layout.latest(tmp_path)
    assert saved is not None
    shared = reading.read_shared(saved)
    for state, expected in (
        (shared["models"]["model"], end["models"]["model"]),
        (shared["hooks"]["ema"]["models"]["model"], end["hooks"]["ema"]["models"]["model"]),
    ):
        model = cases.Tied(3)
        model.load_state_dict(placed(state))
        assert list(state_differences(expected, model.state_dict())) == []
    rest = cases.train(single_process("cpu"), "alone", str(tmp_path / "rest"), 6, str(tmp_path))
    assert list(state_differences(end, rest["start"], COUNTERS)) == []


@pytest.mark.parametrize("how", ["sharded", "replicated", "alone"])
def test_its_weights_are_exported_one_tensor_at_a_time(saved: Any, tmp_path: Any, how: str, monkeypatch: Any) -> None:
    path, expected = saved[how]
    there: list[weakref.ref[Any]] = []

    def watched(value: Any) -> Any:
        assert sum(tensor() is not None for tensor in there) <= 1
        tensor = placed(value)
        there.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(export, "placed", watched)
    for raw in (False, True):
        facts = export.export(layout.read(Path(path)), tmp_path / f"{raw}", {"model": "own"}, "float32", raw=raw)
        assert facts["weights"] == ("raw" if raw else "ema") and facts["step"] == "4" and facts["checkpoint"] == "step-00000004"
        file = TensorFile(tmp_path / f"{raw}")
        assert file.metadata == facts
        state = expected["end"]["models"]["model"] if raw else expected["end"]["hooks"]["ema"]["models"]["model"]
        assert (
            list(
                state_differences(
                    state,
                    {name: file.read(name) for name in file.names()},
                )
            )
            == []
        )
    assert len(there) == 2 * 7


@pytest.mark.parametrize("damage", ["cut", "emptied", "exchanged", "pickle", "pickle, listed", "header, listed", "index, listed"])
def test_a_damaged_or_unsafe_file_is_refused(saved: Any, tmp_path: Any, damage: str) -> None:
    """B112: nothing is executed, and the message names the file."""
    import hashlib
    import shutil

    path, marker = tmp_path / "step-00000004", tmp_path / "marker"
    shutil.copytree(saved["sharded"][0], path)
    name = "index.json" if damage.startswith("index") else "shared-00001.safetensors"
    file = path / name
    content = {
        "cut": file.read_bytes()[:-1],
        "emptied": b"",
        "exchanged": (path / "shared-00000.safetensors").read_bytes(),
        "pickle": pickle.dumps(Marker(str(marker))),
        "header": b"\xff" * 7 + b"\x7f" + file.read_bytes()[8:],
        "index": file.read_bytes().replace(b"[7,5]", b"[9,5]"),
    }[damage.partition(",")[0]]
    file.write_bytes(content)
    if damage.endswith("listed"):
        manifest = json.loads((path / layout.MANIFEST).read_text())
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / layout.MANIFEST).write_text(json.dumps(manifest))
    words = "index of the tensors does not fit" if name == "index.json" else name.replace(".", r"\.")
    with pytest.raises(CheckpointError, match=words):
        placed(reading.read_shared(layout.read(path)))
    with pytest.raises(CheckpointError, match=words):
        cases.train(single_process("cpu"), "alone", str(tmp_path / "new"), 8, str(path))
    assert not marker.exists()


class Marker:
    """Unpickled in full, it would make a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sum", "is a sum that was not carried out"),
        ("complex128", "a dtype that no file can hold; found: torch.complex128"),
        ("other", 'differs from rank to rank; found: only on some: ["hooks", "holder", "x"]'),
        ("object", "the state hooks.holder.x is no plain data; found: object"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_on_all_ranks(ranks: Any, tmp_path: Any, what: str, words: str) -> None:
    for said, left in ranks.call(f"{CASES}:with_a_hook_that_holds", str(tmp_path), what):
        assert words in said
        assert left == []


def test_what_an_optimizer_keeps_of_other_shapes_is_on_every_rank(ranks: Any) -> None:
    """Moments of a parameter's shape are sharded like it, rows of moments are whole on its mesh, and counters are the host's."""
    whole = torch.arange(12.0).reshape(4, 3).tolist()
    for rank, found in enumerate(ranks.call(f"{CASES}:odd_state")):
        assert found["step"] == (False, 7.0, 7.0) and found["beta"] == 0.9
        assert found["row"] == (True, [[0.0, 1.0, 2.0]], [[0.0, 1.0, 2.0]])
        assert found["whole"] == (True, whole, whole[2 * rank : 2 * rank + 2])


def test_a_save_behind_the_run_is_a_save(ranks: Any, tmp_path: Any, saved: Any) -> None:
    for how in ("sharded", "replicated"):
        path, _ = saved[how]
        ranks.call(f"{CASES}:train", how, str(tmp_path / how), 4, None, 2, 1, True)
        expected, found = (
            placed(reading.read_shared(one))
            for one in (layout.read(Path(path)), layout.latest(tmp_path / how))
            if one is not None
        )
        assert list(state_differences(expected, found)) == []
        assert sorted(p.name for p in (tmp_path / how).iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("behind", [False, True], ids=["waiting", "behind"])
@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_in_an_object_store(ranks: Any, tmp_path: Any, saved: Any, how: str, behind: bool) -> None:
    """As on a disk: the same state, taken up by the ranks that wrote it and by one process, and exported from there."""
    path, expected = saved[how]
    address = f"bucket://{tmp_path}/runs"
    ranks.call(f"{CASES}:train", how, address, 4, None, 2, 1, behind)
    assert storage(address).names() == ["step-00000002", "step-00000004"]
    there = layout.latest(address)
    assert there is not None and there.store.names() == sorted(p.name for p in Path(path).iterdir())
    assert list(state_differences(expected["end"], placed(reading.read_shared(there)))) == []
    for result in ranks.call(f"{CASES}:train", how, address, 5, "latest", 2, 9, behind):
        assert list(state_differences(expected["end"], result["start"])) == []
    alone = cases.train(single_process("cpu"), "alone", f"bucket://{tmp_path}/alone", 7, address, 2, 9)
    assert list(state_differences(result["end"], alone["start"], COUNTERS)) == []
    export.export(there, f"{address}/model.safetensors", {"model": "own"}, "float32", raw=True)
    assert TensorFile(where(f"{address}/model.safetensors")).names()


WHOLE = ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize(("late", "broken"), [(0, None), (1, None), (None, 0), (None, 1), (0, 1)])
def test_ranks_write_in_their_own_time(ranks: Any, tmp_path: Any, late: int | None, broken: int | None) -> None:
    """Where one cannot, no checkpoint appears, and all ranks end with the reason."""
    for error, left in ranks.call(f"{CASES}:behind", str(tmp_path), late, broken):
        assert left == (WHOLE if broken is None else [])
        assert (error is None) == (broken is None)
        assert error is None or ("could not" in error and "No space left" in error)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "in replicas"])
def test_two_ranks_then_four_then_one(ranks: Any, tmp_path: Any, saved: Any, how: str) -> None:
    path, expected = saved["sharded"]
    four = Ranks(4)
    try:
        for result in four.call(f"{CASES}:train", how, str(tmp_path / "four"), 5, path, 2, 9):
            assert list(state_differences(expected["end"], result["start"], COUNTERS)) == []
            end = result["end"]
    finally:
        four.close()
    alone = cases.train(single_process("cpu"), "alone", str(tmp_path / "one"), 8, str(tmp_path / "four"), 2, 9)
    assert list(state_differences(end, alone["start"], COUNTERS)) == []
    for result in ranks.call(f"{CASES}:train", "sharded", str(tmp_path / "two"), 10, str(tmp_path / "one"), 2, 9):
        assert list(state_differences(alone["end"], result["start"], COUNTERS)) == []
