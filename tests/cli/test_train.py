"""train, resume, evaluate and plot, one after the other, on a store of copper."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from nvalchemi.cli import app, recipe
from nvalchemi.cli.config import load_config
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.cli.trained import load_trained
from nvalchemi.models import load_model
from nvalchemi.training import TrainingStage, on
from tests.cli.stores import make_stores

runner = CliRunner()


def call(*words, code=0):
    result = runner.invoke(app, [str(w) for w in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_stores(folder)
    return folder


@pytest.fixture(autouse=True)
def _inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def trained(folder):
    """A finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call("train", "config.yaml", "--run-dir", "done")
    return folder / "done"


def test_what_a_run_leaves(trained):
    run = RunDir.existing(trained)
    config = run.config()
    assert config.training.steps == 6 and config.data.train == str(trained.parent / "train.zarr")
    kinds = [(r["kind"], r["step"]) for r in run.records()]
    assert [k for k in kinds if k[0] == "train"] == [("train", s) for s in range(1, 7)]
    assert ("validation", 3) in kinds and ("validation", 6) in kinds
    assert {"loss", "loss/energy", "loss/forces", "lr", "samples_per_s", "time", "epoch"} <= run.records()[0].keys()
    assert run.model_config()["reference_energies"].keys() == {"Cu"}


def test_a_second_run_does_not_overwrite_the_first(trained):
    result = call("train", "config.yaml", "--run-dir", trained, code=2)
    assert "holds a run already" in result.stderr and "nvalchemi resume" in result.stderr


def test_a_run_that_a_signal_has_ended_says_so_by_its_status(tmp_path, monkeypatch):
    made = recipe.make_hooks

    @on(TrainingStage.STEP_START)
    def signalled(ctx):
        if ctx.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "make_hooks", lambda *args, **settings: [*made(*args, **settings), signalled])
        said = " ".join(call("train", "config.yaml", "--run-dir", tmp_path / "run", code=75).stderr.split())
    assert f"not done; go on with it: nvalchemi resume {tmp_path / 'run'}" in said and "3 steps" in said
    assert "6 steps" in call("resume", tmp_path / "run").stderr


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"TORCHELASTIC_RUN_ID": "a1"}, {"TORCHELASTIC_RUN_ID": "a1"}),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"TORCHELASTIC_RUN_ID": "none"}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
        (
            {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a1"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "b2"},
        ),
    ],
)
def test_a_launcher_that_starts_train_again_means_the_same_run(tmp_path, monkeypatch, first, again):
    def train(environment, *words, code=0):
        for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return " ".join(call("train", "config.yaml", "--run-dir", tmp_path / "run", *words, code=code).stderr.split())

    train(first, "training.steps=4")
    for other in ({}, {"TORCHELASTIC_RUN_ID": "c3"}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}):
        if other != again:
            assert "holds a run already" in train(other, code=2)
    assert "the model of a run stays as it is" in train(again, "model.cutoff=4.5", code=2)
    said = train(again, "training.steps=6")
    assert "started again: the run in" in said and "6 steps" in said
    assert [r["step"] for r in RunDir.existing(tmp_path / "run").records() if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_evaluate(trained):
    report = json.loads(call("evaluate", trained, "test.zarr", "--json").stdout)
    assert (report["n"], report["n_atoms"], report["weights"], report["step"]) == (4, 16, "ema", 6)
    with np.load(trained / "evaluation" / "test.npz") as data:
        force = data["forces"] - data["forces_label"]
        energy = data["energy"] - data["energy_label"]
    assert report["forces_mae_meV_per_A"] == pytest.approx(1000 * np.abs(force).mean())
    assert report["forces_rmse_meV_per_A"] == pytest.approx(1000 * np.sqrt((force**2).mean()))
    assert report["energy_mae_meV"] == pytest.approx(1000 * np.abs(energy).mean())
    assert report["energy_per_atom_mae_meV"] == pytest.approx(1000 * np.abs(energy / 4).mean())
    assert report["stress_mae_meV_per_A3"] > 0
    assert json.loads((trained / "evaluation" / "test.json").read_text()) == report


def test_evaluate_other_weights(trained):
    averaged = json.loads(call("evaluate", trained, "test.zarr", "--json").stdout)
    raw = json.loads(call("evaluate", trained, "test.zarr", "--json", "--raw", "--checkpoint", "last").stdout)
    assert raw["weights"] == "raw" and raw["forces_mae_meV_per_A"] != averaged["forces_mae_meV_per_A"]
    table = call("evaluate", trained, "test.zarr").stdout
    assert "force component" in table and "meV/Å" in table and "averaged weights" in table


def test_the_validation_at_the_end_is_what_evaluate_finds(trained):
    last = RunDir(trained).records()[-1]
    last = [r for r in RunDir(trained).records() if r["kind"] == "validation"][-1]
    report = json.loads(call("evaluate", trained, "valid.zarr", "--json", "--checkpoint", "last").stdout)
    assert report["forces_mae_meV_per_A"] == pytest.approx(1000 * last["forces_mae"], rel=1e-5)


def test_plot(trained):
    call("evaluate", trained, "test.zarr", "--json")
    names = [line.rsplit("/", 1)[1] for line in call("plot", trained).stdout.split()]
    assert names == ["loss.png", "errors.png", "learning_rate.png", "parity_energy.png", "parity_forces.png"]
    for name in names:
        assert (trained / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_store_that_was_not_evaluated(trained):
    assert "was not evaluated" in call("plot", trained, "--evaluation", "other", code=2).stderr


def test_resumed_in_two_sittings_is_bitwise_one_run(folder):
    call("train", "config.yaml", "--run-dir", "whole", "training.steps=10")
    call("train", "config.yaml", "--run-dir", "parts", "training.steps=4")
    call("resume", "parts", "training.steps=10")
    whole, parts = (RunDir(folder / name) for name in ("whole", "parts"))
    for raw in (True, False):
        a, b = (load_trained(run, raw=raw, which="last").model.state_dict() for run in (whole, parts))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a if isinstance(a[k], torch.Tensor))
    records = [[(r["step"], r["loss"]) for r in run.records() if r["kind"] == "train"] for run in (whole, parts)]
    assert records[0] == records[1]
    assert parts.config().training.steps == 10


def test_a_run_ends_with_its_time(folder):
    call("train", "config.yaml", "--run-dir", "timed", "--max-time", "2s", "training.steps=null", "schedule.kind=linear")
    records = RunDir(folder / "timed").records()
    rates = [r["lr"] for r in records if r["kind"] == "train"]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.05 * rates[0]
    steps = records[-1]["step"]
    result = call("resume", "timed")
    assert RunDir(folder / "timed").records()[-1]["step"] == steps  # nothing left
    assert "time budget" in result.stderr
    call("resume", "timed", "--max-time", "4s")
    assert RunDir(folder / "timed").records()[-1]["step"] > steps


def test_labels_that_the_data_lack(folder):
    from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter

    batch = AtomicDataZarrReader("train.zarr").read_many([0, 1, 2])
    AtomicDataZarrWriter("energies.zarr").write(batch.replace(forces=None, stress=None))
    result = call("train", "config.yaml", "--run-dir", "lacking", "data.train=energies.zarr", code=2)
    assert "forces" in result.stderr and "Traceback" not in result.output
    call("train", "config.yaml", "--run-dir", "lacking", "data.train=energies.zarr", "loss.forces=null", "training.steps=1")


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        (["train", "absent.yaml"], "there is no configuration absent.yaml"),
        (["train", "config.yaml", "--max-time", "soon"], "'training.max_time' is 'soon'"),
        (["train", "config.yaml", "optimizer.learning_rate=1"], "unknown key 'optimizer.learning_rate'"),
        (["train", "config.yaml", "--run-dir", "x1", "data.train=absent.zarr"], "absent.zarr"),
        (["train", "config.yaml", "--run-dir", "x2", "model.net.n_feature=8"], "n_features"),
        (["train", "config.yaml", "--run-dir", "x3", "optimizer.options.beta=8"], "betas"),
        (["train", "config.yaml", "--run-dir", "x4", "model.name=panin"], "painn"),
        (["train", "config.yaml", "--run-dir", "config.yaml"], "is no folder"),
        (["train", "config.yaml", "--run-dir", "x5", "data.batch_size=100", "data.drop_last=true"], "data.drop_last=false"),
        (["train", "config.yaml", "--run-dir", "x6", "optimizer.options.betas=[2, 3]"], "Invalid beta parameter"),
        (
            ["train", "config.yaml", "--run-dir", "x7", "training.early_stop.patience=2", "data.validation=null"],
            "cannot be used: training.early_stop looks at the validation",
        ),
        (["resume", "nowhere"], "nowhere is no run folder"),
        (["evaluate", "train.zarr", "test.zarr"], "is no run folder"),
        (["plot", "nowhere"], "is no run folder"),
    ],
)
def test_errors_are_plain(words, telling):
    result = call(*words, code=2)
    assert telling in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_run_without_a_checkpoint_is_no_trained_model(folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "config.yaml").write_text((folder / "config.yaml").read_text())
    assert "no checkpoints yet" in call("evaluate", "empty", "test.zarr", code=2).stderr
    assert "has no checkpoint to go on from" in call("resume", "empty", code=2).stderr


def test_a_resume_that_cannot_be_leaves_the_run_as_it_was(folder):
    call("train", "config.yaml", "--run-dir", "changed", "training.steps=5")  # in the middle of an epoch
    config = (folder / "changed" / "config.yaml").read_text()
    for change, telling in (
        ("model.cutoff=2.5", "the model of a run stays as it is"),
        ("model.net.n_features=16", "the model of a run stays as it is"),
        ("optimizer.name=SGD", "another kind of optimizer"),
        ("data.train=valid.zarr", "another loader: samples would be left out"),
    ):
        told = call("resume", "changed", change, "training.steps=8", code=2).stderr
        assert telling in " ".join(told.split())
        assert (folder / "changed" / "config.yaml").read_text() == config
    call("resume", "changed", "training.steps=7")
    assert RunDir(folder / "changed").config().training.steps == 7


def test_a_resume_may_add_hooks(folder):
    call("train", "config.yaml", "--run-dir", "grown", "training.ema_decay=null", "training.steps=3")
    call("resume", "grown", "training.ema_decay=0.9", "--max-time", "10m", "training.steps=4")
    assert load_trained(RunDir(folder / "grown"), which="last").weights == "ema"


def test_a_run_may_write_for_tensorboard(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    call("train", "config.yaml", "--run-dir", "shown", "tensorboard=true", "training.steps=3")
    call("resume", "shown", "training.steps=5")
    events = EventAccumulator(str(folder / "shown" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert "validation/forces_mae" in events.Tags()["scalars"]


def test_the_network_computes_in_the_dtype_of_the_data(folder):
    call("train", "config.yaml", "--run-dir", "double", "data.dtype=float64", "training.steps=2")
    call("resume", "double", "training.steps=3")
    model = load_trained(RunDir(folder / "double"), which="last").model
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_a_store_without_labels_is_not_evaluated(trained):
    from nvalchemi.data.datapipes import AtomicDataZarrReader, AtomicDataZarrWriter

    batch = AtomicDataZarrReader("test.zarr").read_many([0, 1])
    AtomicDataZarrWriter("bare.zarr").write(batch.replace(energy=None, forces=None, stress=None))
    assert "bare.zarr has no label to compare with" in call("evaluate", trained, "bare.zarr", "--json", code=2).stderr
    assert not (trained / "evaluation" / "bare.npz").exists()


def test_what_the_disk_refuses_is_told_in_plain_words(trained, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    result = call("evaluate", trained, "test.zarr", code=2)
    assert "No space left on device" in result.stderr and "Traceback" not in result.output


def test_a_damaged_evaluation_is_named(trained):
    (trained / "evaluation").mkdir(exist_ok=True)
    (trained / "evaluation" / "torn.npz").write_bytes(b"PK")
    told = call("plot", trained, "--evaluation", "torn", code=2).stderr
    assert "torn.npz is damaged" in " ".join(told.split())
    (trained / "evaluation" / "torn.npz").unlink()


def test_the_example_configurations_are_valid():
    from pathlib import Path

    import nvalchemi

    examples = Path(nvalchemi.__file__).parents[1] / "examples" / "configs"
    found = sorted(examples.glob("*.yaml"))
    assert found
    for path in found:
        load_config(path)
        assert yaml.safe_load(path.read_text())


@pytest.mark.parametrize("raw", [False, True], ids=["ema", "raw"])
def test_export(trained, tmp_path, raw):
    """K04: the file says which weights it has, and they are those."""
    file = tmp_path / "model.safetensors"
    said = json.loads(call("export", trained, file, "--json", *(["--raw"] if raw else [])).stdout)
    expected = load_trained(RunDir.existing(trained), raw=raw)
    assert said["weights"] == expected.weights == ("raw" if raw else "ema")
    assert said["step"] == expected.step and said["checkpoint"] == expected.checkpoint.name
    assert said["bytes"] == file.stat().st_size
    model = load_model(file)
    assert model.config() == expected.model.config()
    found, wanted = model.state_dict(), expected.model.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert "there already" in call("export", trained, file, code=2).stderr
    assert "is no folder" in " ".join(call("export", trained, tmp_path / "absent" / "m", code=2).stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_checkpoints_elsewhere(folder, tmp_path):
    """The settings name an address: train, resume, evaluate and export find the checkpoints there."""
    address = f"memory://{tmp_path.name}/run"
    there = ("--run-dir", tmp_path / "run", f"checkpoint.directory={address}")
    call("train", "config.yaml", *there, "training.steps=4")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "holds a run already" in " ".join(call("train", "config.yaml", *there, code=2).stderr.split())
    other = ("--run-dir", tmp_path / "other", f"checkpoint.directory={address}")
    assert "holds another run's checkpoints" in " ".join(call("train", "config.yaml", *other, code=2).stderr.split())
    call("resume", tmp_path / "run", "training.steps=6")
    assert json.loads(call("evaluate", tmp_path / "run", "test.zarr", "--json").stdout)["step"] == 6
    target = f"{address}/model.safetensors"
    said = json.loads(call("export", tmp_path / "run", target, "--json").stdout)
    assert said["file"] == target and said["step"] == 6 and said["bytes"] > 1000
    assert "there already" in " ".join(call("export", tmp_path / "run", target, code=2).stderr.split())
    expected = load_trained(RunDir.existing(tmp_path / "run")).model.state_dict()
    found = load_model(target).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


CALL = "os.system:touch {}"


@pytest.mark.parametrize(
    "places",
    [
        [("config.yaml", "optimizer", "name")],
        [("config.yaml", "model", "name")],
        [("config.yaml", "loss", "energy", "kind")],
        [("config.yaml", "schedule", "kind")],
        [("config.yaml", "training", "training_fn")],
        [("config.yaml", "data", "dtype")],
        [("model.json", "model")],
        [("model.json", "net", "net")],
        [("model.json", "net", "net"), ("config.yaml", "model", "name")],
    ],
    ids=lambda places: " and ".join(".".join(place) for place in places),
)
def test_b114_a_recipe_that_names_a_call_is_refused(trained, tmp_path, places):
    """Names are looked up in lists of the package's own: nothing that they name is imported."""
    run, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(trained, run)
    for file, *place in places:
        recipe = yaml.safe_load((run / file).read_text())  # which JSON is too
        section = recipe
        for key in place[:-1]:
            section = section.setdefault(key, {})
        section[place[-1]] = CALL.format(marker)
        (run / file).write_text(yaml.safe_dump(recipe) if file.endswith("yaml") else json.dumps(recipe))
    for words in (("resume", run, "training.epochs=9"), ("export", run, tmp_path / "out"), ("evaluate", run, "test.zarr")):
        said = call(*words, code=2)
        assert "os.system:touch" in said.output and "Traceback" not in said.output
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_b114_another_network_than_the_runs_is_named(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    recipe["model"]["name"] = "my.package.Net"
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
    said = " ".join(call("resume", run, "training.epochs=9", code=2).stderr.split())
    assert "names another network than model.json" in said and "model.name='my.package.Net'" in said
    assert "needed: 'painn'" in said and "nothing is imported" in said
