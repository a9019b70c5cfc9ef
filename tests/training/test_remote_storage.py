"""Checkpoints at an address: fsspec's memory file system stands for an object store."""

import logging
import tempfile
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from nvalchemi.data.address import Address, where
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models import MLPEnergy, load_model
from nvalchemi.testing import state_differences
from nvalchemi.training import Every, TrainingStage, checkpoint, layout, on, reading
from nvalchemi.training.draft import Draft
from nvalchemi.training.export import export
from nvalchemi.training.hooks import CheckpointHook, EMAHook
from nvalchemi.training.storage import Disk, storage
from tests.training.hooks.runs import batches, network, strategy

WAYS = pytest.mark.parametrize("behind", [False, True], ids=["waiting", "behind"])


@pytest.fixture
def place():
    """An address of this test's own, as a user writes it."""
    return f"memory://{uuid.uuid4().hex}/runs"


def run(place, *hooks, steps=6, every=2, behind=False, keep_last=None, **settings):
    hook = CheckpointHook(place, Every(steps=every), async_save=behind, keep_last=keep_last)
    return strategy(network(), [EMAHook(0.9), *hooks, hook], num_steps=steps, **settings).run(batches())


def steps(place):
    return [saved.step for saved in layout.list_checkpoints(place)]


@WAYS
def test_a_run_goes_on_from_it_bit_for_bit(place, tmp_path, behind):
    whole = run(tmp_path, steps=9)
    run(place, behind=behind, resume_from="latest")  # nothing is there yet
    assert steps(place) == [2, 4, 6]
    again = run(place, steps=9, behind=behind, resume_from="latest")
    assert list(state_differences(checkpoint.gather(whole), checkpoint.gather(again))) == []
    from_one = run(f"{place}-2", steps=9, resume_from=f"{place}/step-00000004")
    assert list(state_differences(checkpoint.gather(whole), checkpoint.gather(from_one))) == []


@WAYS
def test_it_has_the_files_of_one_on_a_disk(place, tmp_path, caplog, behind):
    run(tmp_path, behind=behind)
    run(place, behind=behind)
    assert "ignored" not in caplog.text
    for folder in ("step-00000002", "step-00000006"):
        here, there = layout.read(tmp_path / folder), layout.read(f"{place}/{folder}")
        assert there.store.names() == here.store.names()
        there.verify()
        assert list(state_differences(reading.read_own(here, 0), reading.read_own(there, 0))) == []


@WAYS
def test_the_last_few_are_kept(place, behind):
    run(place, steps=9, keep_last=2, behind=behind)
    assert storage(place).names() == ["step-00000008", "step-00000009"]


def test_weights_alone(place, caplog):
    ctx = run(place)
    caplog.set_level(logging.INFO, logger="nvalchemi")
    seen = {}

    @on(TrainingStage.TRAINING_START)
    def look(fresh):
        seen.update({name: value.clone() for name, value in fresh.model.state_dict().items()})

    strategy(network(seed=9), [look], num_steps=1, init_from=place).run(batches())
    assert list(state_differences(ctx.model.state_dict(), seen)) == []
    assert f"tensors from {place}/step-00000006" in caplog.text


@WAYS
def test_the_manifest_is_written_last(place, monkeypatch, behind):
    """What appears at once in an object store is one object."""
    written, put_file, pipe_file = [], MemoryFileSystem.put_file, MemoryFileSystem.pipe_file

    def put(self, source, path, *args, **kwargs):
        written.append(path.rpartition("/")[2])
        assert layout.list_checkpoints(place) == []
        put_file(self, source, path, *args, **kwargs)

    def pipe(self, path, *args, **kwargs):
        written.append(path.rpartition("/")[2])
        pipe_file(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    monkeypatch.setattr(MemoryFileSystem, "mv", None)
    run(place, steps=2, behind=behind)
    assert written[-1] == "manifest.json" and written.count("manifest.json") == 1
    assert {"shared.pt", "rank-00000.pt"} <= set(written)


def test_b62_a_torn_one_is_passed_over_then_cleared_away(place, caplog):
    run(place)
    fs, root = fsspec.core.url_to_fs(place)
    fs.rm_file(f"{root}/step-00000006/manifest.json")
    assert layout.latest(place).step == 4
    assert "step-00000006 holds no checkpoint" in caplog.text
    caplog.clear()
    run(place, steps=7, resume_from="latest")
    assert f"removed {place}/step-00000006, left by a save that did not finish" in caplog.text
    assert storage(place).names() == [f"step-0000000{step}" for step in (2, 4, 6, 7)]


def test_b62_a_run_that_was_killed_in_its_first_save_starts_afresh(place):
    run(place, steps=2)
    fs, root = fsspec.core.url_to_fs(place)
    fs.rm_file(f"{root}/step-00000002/manifest.json")
    assert run(place, steps=4, resume_from="latest").progress.samples == 16
    assert steps(place) == [2, 4]


@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.pt", "index.json", "shared-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["cut", "gone", "one bit"])
def test_a_damaged_newest_is_passed_over_and_named(place, caplog, name, kind):
    run(place, behind=True)
    fs, root = fsspec.core.url_to_fs(place)
    path = f"{root}/step-00000006/{name}"
    content = fs.cat_file(path)
    if kind == "gone":
        fs.rm_file(path)
    else:
        fs.pipe_file(path, content[: len(content) // 2] if kind == "cut" else content[:-3] + b"\xff" + content[-2:])
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") if (name, kind) != ("manifest.json", "gone") else "whole"):
        run(f"{place}-2", steps=7, resume_from=f"{place}/step-00000006")
    assert layout.latest(place).step == 4
    assert f"{place}/step-00000006" in caplog.text


class Refused(Exception):
    """As the packages of object stores have: no OSError."""


@WAYS
def test_what_refuses_is_told_and_leaves_the_earlier_ones(place, monkeypatch, behind):
    run(place, steps=2)
    put_file = MemoryFileSystem.put_file

    def refuse(self, source, path, *args, **kwargs):
        if path.endswith("rank-00000.pt"):
            raise Refused("no such credentials")
        put_file(self, source, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with pytest.raises(CheckpointError, match=rf"{place}/step-00000004/rank-00000.pt cannot be reached.*no such credentials"):
        run(place, resume_from="latest", behind=behind)
    assert storage(place).names() == ["step-00000002"]


@pytest.mark.parametrize("call", ["cat_file", "ls", "get_file"])
def test_what_cannot_be_reached_is_not_taken_for_absent(place, monkeypatch, call):
    """A run does not start afresh because the network was down."""
    run(place)

    def broken(*args, **kwargs):
        raise Refused("connection lost")

    monkeypatch.setattr(MemoryFileSystem, call, broken)
    with pytest.raises(CheckpointError, match=r"cannot be reached; found: Refused: connection lost"):
        run(place, steps=9, resume_from="latest")
    monkeypatch.undo()
    assert steps(place) == [2, 4, 6]


def test_a_run_is_not_mixed_with_anothers(place):
    run(place, steps=2)
    with pytest.raises(ConfigError, match=r"another run.*step-00000002"):
        run(place, steps=2)


@pytest.mark.parametrize("address", ["memory://absent/x", "memory://absent/x/step-00000001"])
def test_nothing_there(address):
    with pytest.raises(CheckpointError, match=rf"{address} does not exist"):
        strategy(network(), num_steps=1, resume_from=address).run(batches())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("unheardof://x/y", r"unheardof://x/y is an address of an unknown kind.*such as s3://bucket/runs"),
        (
            "notinstalled://x/y",
            r"needs a package that is not installed.*needed: surely_absent; do this: pip install surely_absent",
        ),
    ],
)
def test_what_is_missing_for_an_address_is_said_before_the_first_step(monkeypatch, address, words):
    entry = {"class": "surely_absent.FS", "err": "Install surely_absent"}
    monkeypatch.setitem(known_implementations, "notinstalled", entry)
    taken = []

    @on(TrainingStage.STEP_END)
    def note(ctx):
        taken.append(ctx.progress.step)

    with pytest.raises(ConfigError, match=words):
        run(address, note)
    assert taken == []


def test_where(tmp_path):
    assert where(f"file://{tmp_path}") == tmp_path == where(tmp_path)
    assert isinstance(storage(f"file://{tmp_path}"), Disk)
    address = where("s3://bucket/runs/")
    assert address / "step-1" == Address("s3://bucket/runs/step-1") and address.name == "runs"
    assert where("memory://") / "a" == "memory://a" and where("hdfs:///runs") / "a" == "hdfs:///runs/a"
    with pytest.raises(ConfigError, match="a path was made from an address"):
        CheckpointHook(Path("s3://bucket/runs"))


def test_a_file_address_is_a_path(tmp_path):
    run(f"file://{tmp_path}/runs")
    assert steps(tmp_path / "runs") == [2, 4, 6]
    assert [p.name for p in (tmp_path / "runs").iterdir() if p.name.startswith(".")] == []
    assert run(f"file://{tmp_path}/runs", steps=7, resume_from="latest").progress.step == 7


@WAYS
def test_export_from_it_and_to_it(place, behind):
    torch.manual_seed(0)
    model = MLPEnergy(3, 8)
    hook = CheckpointHook(place, Every(steps=2), async_save=behind)
    strategy(model, [hook], training_fn=lambda m, b: m(b[0])[:, None], num_steps=2).run(batches())
    said = export(layout.latest(place), f"{place}/model.safetensors", model.config(), "float32")
    assert said["step"] == "2"
    found = load_model(f"{place}/model.safetensors")
    assert list(state_differences(model.state_dict(), found.state_dict())) == []
    with pytest.raises(CheckpointError, match=rf"{place}/absent is no file of tensors"):
        load_model(f"{place}/absent")


def test_what_is_fetched_is_gone_afterwards(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(place)
    run(place, steps=7, resume_from="latest")
    saved = layout.latest(place)
    reading.read_shared(saved)
    assert list(tmp_path.iterdir())
    del saved
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_of_files_that_are_not_there_is_not_written(place):
    """Where each process has a memory of its own, rank 0 does not see what the others have written."""
    draft = Draft.begin(place, 3)
    files = {"shared.pt": draft.write("shared.pt", lambda path: path.write_text("x"))}
    with pytest.raises(CheckpointError, match=r"rank-00001\.pt not there; needed: a place that all ranks see"):
        draft.finish({"progress": {"step": 3}}, files | {"rank-00001.pt": {"bytes": 4, "sha256": "0"}})
    draft.discard()
    assert storage(place).names() == []
