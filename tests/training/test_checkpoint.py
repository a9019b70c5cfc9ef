import hashlib
import json
import logging

import pytest
import torch

from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.training import ValidationConfig, layout, reading
from nvalchemi.training.hooks import CheckpointHook
from tests.training.hooks.runs import batches, network, strategy


def saved(folder, steps=4):
    strategy(network(), [CheckpointHook(folder)], num_steps=steps).run(batches())
    return layout.latest(folder)


class Marker:
    """Unpickled in full, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("listed", [False, True], ids=["as found", "with a manifest to match"])
@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.pt"])
def test_b112_no_file_of_a_checkpoint_can_run_code(tmp_path, name, listed):
    whole, marker = saved(tmp_path / "run"), tmp_path / "marker"
    path = whole.path / name
    torch.save({"models": Marker(marker)}, path)
    if listed:
        manifest = json.loads((whole.path / layout.MANIFEST).read_text())
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        (whole.path / layout.MANIFEST).write_text(json.dumps(manifest))
    words = rf"{name} is no file of tensors and plain data" if listed else rf"{name} is damaged"
    with pytest.raises(CheckpointError, match=words):
        reading.read_file(layout.read(whole.path), name)
    with pytest.raises(CheckpointError, match=words):
        strategy(network(), num_steps=8, resume_from=whole.path).run(batches())
    with pytest.raises((CheckpointError, ConfigError)):
        strategy(network(), [CheckpointHook(tmp_path / "run")], num_steps=8, resume_from="latest").run(batches())
    assert not marker.exists()


def test_b112_the_manifest_is_data_only(tmp_path):
    whole = saved(tmp_path)
    (whole.path / layout.MANIFEST).write_bytes(b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        strategy(network(), num_steps=8, resume_from=whole.path).run(batches())


def test_b76_nothing_to_resume_from_is_an_error_that_names_the_place(tmp_path):
    def resume(path):
        strategy(network(), [CheckpointHook(tmp_path / "new")], num_steps=8, resume_from=path).run(batches())

    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint in .*empty; found: an empty folder"):
        resume(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"absent does not exist"):
        resume(tmp_path / "absent")
    half = saved(tmp_path / "half")
    (half.path / layout.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"no whole checkpoint in .*half; found: {half.path.name}"):
        resume(tmp_path / "half")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resume(half.path)


def test_b76_the_log_says_what_was_loaded_and_from_which_step(tmp_path, caplog):
    whole = saved(tmp_path, steps=4)
    caplog.set_level(logging.INFO, logger="nvalchemi")
    config = ValidationConfig(validation_data=batches(1))
    hooks = [CheckpointHook(tmp_path)]
    strategy(network(), hooks, num_steps=5, resume_from="latest", validation_config=config).run(batches())
    assert f"resumed from {whole.path} at step 4, epoch 1" in caplog.text
