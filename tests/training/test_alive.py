"""What takes long says so; on a slow disk, while a checkpoint is written, read, or waited for at the end."""

import logging
import re
import threading
import time

import pytest

from nvalchemi.training import Every, alive, layout
from nvalchemi.training.alive import size_text
from nvalchemi.training.hooks import CheckpointHook
from nvalchemi.training.storage import Disk
from tests.training.hooks.runs import batches, network, strategy


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(alive, "FIRST", 0.02)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("still ")]


def slow(monkeypatch, verb, seconds):
    """Each call of a verb of the disk takes so long at least."""
    plain = getattr(Disk, verb)

    def wait_first(disk, *args):
        result = plain(disk, *args)
        time.sleep(seconds)
        return result

    monkeypatch.setattr(Disk, verb, wait_first)


def run(folder, behind=False, **settings):
    return strategy(network(), [CheckpointHook(folder, Every(steps=9), async_save=behind)], num_steps=2, **settings).run(
        batches()
    )


@pytest.mark.parametrize("behind", [False, True], ids=["a save", "the wait for one at the end"])
def test_a_slow_save(tmp_path, caplog, monkeypatch, behind):
    slow(monkeypatch, "write", 0.1)
    run(tmp_path, behind)
    said = lines(caplog)
    pattern = rf"still writing the checkpoint of step 2 to {tmp_path}: (\S+ \w+) (of about \S+ \w+ are written|are written here, .*), for \d+ s now"
    assert said and all(re.fullmatch(pattern, line) for line in said), said
    assert all(record.levelno == logging.WARNING for record in caplog.records)  # shown where no log is set up
    assert re.fullmatch(pattern, said[-1]).group(1) != "0 bytes"
    assert layout.latest(tmp_path).step == 2
    assert not [t for t in threading.enumerate() if t.name.startswith("nvalchemi")]


def test_a_slow_read(tmp_path, caplog, monkeypatch):
    run(tmp_path)
    caplog.clear()
    slow(monkeypatch, "sha256", 0.1)
    run(tmp_path, resume_from="latest")
    run(tmp_path / "other", init_from=tmp_path)
    said = [line for line in lines(caplog) if "reading" in line]
    pattern = (
        rf"still reading a checkpoint of {tmp_path}: (every file is checked|\S+ kB in {tmp_path}/step-00000002), for \d+ s now"
    )
    assert len(said) >= 2 and all(re.fullmatch(pattern, line) for line in said), said


def test_nothing_is_said_of_what_is_quick(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(alive, "FIRST", 10.0)
    run(tmp_path)
    assert lines(caplog) == []


def test_less_and_less_often(caplog):
    with alive.alive("waiting"):
        time.sleep(0.3)
    said = lines(caplog)
    assert 2 <= len(said) <= 4  # after 0.02, 0.06, 0.14 and 0.30 s
    assert not [t for t in threading.enumerate() if t.name == "nvalchemi-alive"]


def test_after_an_error_nothing_is_left(caplog):
    with pytest.raises(RuntimeError), alive.alive("failing"):
        raise RuntimeError
    assert not [t for t in threading.enumerate() if t.name == "nvalchemi-alive"]


def test_another_rank_says_nothing(caplog):
    with alive.alive("waiting", here=False):
        time.sleep(0.1)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1200, "1.2 kB"), (64e6, "64.0 MB"), (512.4e6, "512 MB"), (3e12, "3.0 TB")],
)
def test_sizes_in_words(size, text):
    assert size_text(size) == text
