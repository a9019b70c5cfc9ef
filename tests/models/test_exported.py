"""A model in one file."""

import json

import pytest
import torch

from nvalchemi.data.tensor_file import Entry, write_tensors
from nvalchemi.errors import CheckpointError, ConfigError
from nvalchemi.models import MLPEnergy, load_model
from nvalchemi.models.exported import CONFIG, DTYPE


def write(path, state, **metadata):
    write_tensors(path, [Entry(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in state.items()], metadata)
    return path


def facts(config, dtype="float32"):
    return {CONFIG: json.dumps(config), DTYPE: dtype}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_model_is_what_it_was(tmp_path, dtype):
    model = MLPEnergy(3, 8).to(getattr(torch, dtype))
    found = load_model(write(tmp_path / "m", model.state_dict(), **facts(model.config(), dtype)))
    x = torch.randn(5, 3, dtype=getattr(torch, dtype))
    assert torch.equal(found(x), model(x)) and not found.training


def test_b114_a_name_that_is_no_model_is_refused(tmp_path):
    model = MLPEnergy(3, 8)
    for name in ("os.system", "posix:system", "nvalchemi.models.mlp.MLPEnergy"):
        with pytest.raises(ConfigError, match="no such model"):
            load_model(write(tmp_path / "m", model.state_dict(), **facts({**model.config(), "model": name})))


def test_what_is_no_export_is_refused(tmp_path):
    model = MLPEnergy(3, 8)
    with pytest.raises(CheckpointError, match="does not say of which model"):
        load_model(write(tmp_path / "m", model.state_dict()))
    with pytest.raises(CheckpointError, match="does not say of which model"):
        load_model(write(tmp_path / "m", model.state_dict(), **{CONFIG: "{", DTYPE: "float32"}))
    with pytest.raises(CheckpointError, match="do not fit its model"):
        load_model(write(tmp_path / "m", model.state_dict(), **facts({**model.config(), "hidden": 9})))
    (tmp_path / "m").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is no file of tensors"):
        load_model(tmp_path / "m")
