import json
from functools import partial

import pytest
import torch

from nvalchemi.distributed import single_process
from nvalchemi.errors import CheckpointError
from nvalchemi.training import layout
from nvalchemi.training.draft import Draft
from nvalchemi.training.saving import NewFiles, write


def save(directory, step, metrics=None, text="state"):
    draft = Draft.begin(directory, step)
    files = {layout.SHARED: draft.write(layout.SHARED, lambda path: path.write_text(text))}
    draft.finish({"progress": {"step": step}, "metrics": metrics}, files)
    return layout.list_checkpoints(directory)[-1]


class Killed:
    """Stops whoever saves it."""

    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        assert layout.list_checkpoints(self.directory) == []
        raise KeyboardInterrupt


def test_b62_a_checkpoint_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        files = NewFiles({layout.SHARED: partial(torch.save, Killed(tmp_path))}, 0)
        write(tmp_path, files, {"progress": {"step": 1}}, single_process("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_the_latest_is_the_last_saved_not_the_highest_step(tmp_path):
    for step in (10, 20, 5, 5):
        save(tmp_path, step)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [10, 20, 5, 5]
    assert layout.latest(tmp_path).path.name == "step-00000005-2"


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip", "manifest"])
def test_a_damaged_newest_is_passed_over_and_named(tmp_path, caplog, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    shared = newest.path / layout.SHARED
    if damage == "truncate":
        shared.write_text("st")
    elif damage == "delete":
        shared.unlink()
    elif damage == "flip":
        shared.write_text("stabe")
    else:
        (newest.path / layout.MANIFEST).write_text("{")
    assert layout.latest(tmp_path).step == 1
    assert str(newest.path) in caplog.text
    if damage != "manifest":
        with pytest.raises(CheckpointError, match=r"shared\.pt is (missing|damaged)"):
            newest.verify()


def test_b62_debris_of_a_dead_process_is_cleared_and_never_counts(tmp_path):
    debris = tmp_path / ".writing-999999999"
    debris.mkdir()
    (debris / layout.MANIFEST).write_text("{}")
    assert layout.latest(tmp_path) is None
    save(tmp_path, 1)
    assert not debris.exists()


def test_retention_keeps_the_last_and_the_best(tmp_path):
    for step, loss in enumerate((0.5, 0.4, 0.9, 0.8, 0.7), start=1):
        save(tmp_path, step, {"loss": loss})
        layout.prune(tmp_path, keep_last=1, keep_best=2)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [1, 2, 5]
    assert layout.best(tmp_path, "loss").step == 2
    assert layout.best(tmp_path, "loss", "max").step == 5
    assert layout.best(tmp_path, "other") is None


def test_retention_never_deletes_the_last_whole_one(tmp_path):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest.path / layout.SHARED).write_text("")
    layout.prune(tmp_path, keep_last=1)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [1, 2]


def test_a_nan_metric_is_never_the_best(tmp_path):
    save(tmp_path, 1, {"loss": float("nan")})
    save(tmp_path, 2, {"loss": 3.0})
    assert layout.best(tmp_path, "loss").step == 2


def test_foreign_and_newer_formats_are_refused(tmp_path):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        layout.read(folder)
    (folder / layout.MANIFEST).write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="no manifest of this package"):
        layout.read(folder)
    (folder / layout.MANIFEST).write_text(json.dumps({"format": layout.FORMAT, "version": 99}))
    with pytest.raises(CheckpointError, match=r"newer format.*update"):
        layout.read(folder)
    (folder / layout.MANIFEST).write_text(json.dumps({"format": layout.FORMAT, "version": 1}))
    with pytest.raises(CheckpointError, match="incomplete"):
        layout.read(folder)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 0}, "version"),
        ({"serial": "x"}, "serial"),
        ({"serial": None}, "serial"),
        ({"progress": []}, "progress"),
        ({"progress": {}}, "progress"),
        ({"progress": {"step": None}}, "progress"),
        ({"progress": {"step": 2, "samples": "8"}}, "progress"),
        ({"metrics": [1.0]}, "metrics"),
        ({"metrics": {"loss": "low"}}, "metrics"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": "two"}, "world_size"),
        ({"files": []}, "every file"),
        ({"files": {"shared.pt": {"bytes": "9", "sha256": "0"}}}, "every file"),
        ({"files": {"shared.pt": {"bytes": 9}}}, "every file"),
    ],
)
def test_a_manifest_of_other_kinds_is_damaged_and_in_nobodys_way(tmp_path, caplog, change, word):
    save(tmp_path, 1, {"loss": 2.0})
    other = save(tmp_path, 2, {"loss": 1.0}).path
    manifest = json.loads((other / layout.MANIFEST).read_text())
    (other / layout.MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged; found: .*{word}"):
        layout.read(other)
    assert layout.latest(tmp_path).step == 1
    assert layout.best(tmp_path, "loss").step == 1
    assert save(tmp_path, 3).step == 3
    layout.prune(tmp_path, 1, 1)
    assert [c.step for c in layout.list_checkpoints(tmp_path)] == [1, 3]
    assert str(other) in caplog.text
