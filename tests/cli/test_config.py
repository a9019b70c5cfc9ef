"""The configuration: defaults, overrides, and errors that name the key, the value and what may have been meant."""

from __future__ import annotations

import pytest
import yaml

from nvalchemi.cli.config import TrainConfig, apply_override, check_config, dump_config, load_config, parse_duration
from nvalchemi.errors import ConfigError

MINIMAL = {"data": {"train": "train.zarr"}, "training": {"epochs": 3}}


def with_(**sections):
    return {**MINIMAL, **sections}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def test_defaults(file):
    config = load_config(file)
    assert config.data.train == "train.zarr" and config.data.validation is None
    assert config.loss.energy.per_atom and config.loss.stress is None


def test_overrides(file):
    config = load_config(
        file,
        ["optimizer.lr=1e-3", "loss.energy=null", "model.net.features=32", "training.max_time=10m", "data.train=a=b.zarr"],
    )
    assert config.optimizer.lr == 1e-3
    assert config.loss.energy is None
    assert config.model.net == {"features": 32}
    assert config.training.max_time == 600
    assert config.data.train == "a=b.zarr"


def test_an_override_makes_its_section():
    raw = {"data": None}
    apply_override(raw, "data.train=x.zarr")
    apply_override(raw, "training.early_stop.patience=3")
    assert raw == {"data": {"train": "x.zarr"}, "training": {"early_stop": {"patience": 3}}}


@pytest.mark.parametrize("text", ["train.zarr", "=3", "a..b=3", "a b=3"])
def test_what_is_no_override(text):
    with pytest.raises(ConfigError, match="key=value"):
        apply_override({}, text)


def test_an_override_below_a_value():
    with pytest.raises(ConfigError, match=r"'data\.train' is no section"):
        apply_override({"data": {"train": "x"}}, "data.train.path=3")


def test_saved_and_read_back(file, tmp_path):
    config = load_config(file, ["training.max_time=1h", "loss.forces.kind=huber", "loss.forces.delta=0.1"])
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"data": {"train": "a", "batchsize": 5}, "training": {"epochs": 1}},
            ["unknown key 'data.batchsize' (= 5)", "batch_size"],
        ),
        (with_(optimzer={"lr": 1}), ["unknown key 'optimzer'", "did you mean optimizer?"]),
        (with_(loss={"force": {}}), ["unknown key 'loss.force'", "forces"]),
        (with_(zzz=1), ["unknown key 'zzz'", "there are data, model, loss"]),
        (with_(loss={"energy": {"kind": "msee"}}), ["'loss.energy.kind' is 'msee'", "did you mean mse?"]),
        (with_(loss={"energy": {"delta": 0.1}}), ["'loss.energy'", "delta belongs to kind: huber"]),
        (with_(loss={"energy": None, "forces": None}), ["'loss'", "no term"]),
        (with_(optimizer={"lr": -1}), ["'optimizer.lr' is -1", "greater than 0"]),
        (with_(optimizer={"lr": float("nan")}), ["'optimizer.lr' is nan"]),
        (with_(model={"energy_scale": 0}), ["'model.energy_scale' is 0"]),
        (with_(model={"reference_energies": "fitted"}), ["'model.reference_energies' is 'fitted'", "did you mean fit?"]),
        (with_(training={}), ["'training'", "no end", "max_time"]),
        (with_(training={"max_time": "10 parsecs"}), ["'training.max_time' is '10 parsecs'", "90s, 10m"]),
        (with_(validation={"every_n_steps": 5, "every_n_epochs": 1}), ["'validation'", "exclude each other"]),
        ({"training": {"epochs": 1}}, ["'data' is missing", "data.train=..."]),
    ],
)
def test_errors_name_key_value_and_what_was_meant(raw, words):
    with pytest.raises(ConfigError) as error:
        check_config(raw, "my.yaml")
    assert "my.yaml" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_all_faults_are_told_at_once():
    raw = {"data": {"train": "a", "batch_size": 0}, "training": {"epochs": 0}, "loss": {"forces": {"kind": "l3"}}}
    with pytest.raises(ConfigError) as error:
        check_config(raw, "x")
    for key in ("data.batch_size", "training.epochs", "loss.forces.kind"):
        assert f"'{key}'" in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"), [("a: [1", "no YAML"), ("- 1", "holds no configuration"), ("", "holds no configuration")]
)
def test_files_that_are_no_configuration(tmp_path, text, words):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(path)
    with pytest.raises(ConfigError, match="there is no configuration"):
        load_config(tmp_path / "absent.yaml")


def test_yaml_runs_no_code(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"data: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    with pytest.raises(ConfigError, match="no YAML"):
        load_config(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("0.5h", 1800), ("45", 45), (12.5, 12.5)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "-5m", "1m 30"])
def test_only_plain_durations_pass(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_every_section_is_documented():
    assert all(field.annotation.__doc__ for field in TrainConfig.model_fields.values())
