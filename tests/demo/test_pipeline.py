"""The demonstration in small: all of its steps, in seconds."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nvalchemi.cli import app
from nvalchemi.cli.demo import unused
from nvalchemi.cli.run_dir import RunDir
from nvalchemi.demo.plan import Plan
from nvalchemi.errors import ConfigError

pytest.importorskip("tblite")

SMALL = Plan(
    seconds=1.0,
    seen=("CH4", "H2O", "CH3OH"),
    unseen=("C2H6", "CH3CH2OH"),
    train_frames=8,
    valid_frames=2,
    test_frames=2,
    unseen_frames=2,
    labellers=1,
    dynamics_steps=40,
    reserve=0.0,
    settings={
        "model": {"name": "painn", "cutoff": 4.0, "net": {"n_features": 8, "n_interactions": 1}},
        "training": {"steps": 30, "max_time": 60.0, "ema_decay": 0.5},
    },
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A whole demonstration: its folder, its words and its numbers."""
    from nvalchemi.demo.pipeline import Demonstration

    run = RunDir.new(tmp_path_factory.mktemp("demo") / "run")
    console = Console(record=True, width=200)
    result = Demonstration(SMALL, run, seed=3, console=console)()
    return run, console.export_text(), result


def test_everything_is_written(done):
    run, _, result = done
    assert json.loads((run.path / "demo.json").read_text()) == json.loads(json.dumps(result))
    for path in ("config.yaml", "model.json", "metrics.jsonl", "plots/loss.png", "plots/parity_forces.png", "plots/dynamics.png"):
        assert (run.path / path).is_file(), path
    assert result["structures"] == {"train": 24, "valid": 6, "new_motion": 6, "new_molecules": 4}
    assert result["steps"] == 30


def test_scores_stand_beside_a_trivial_model(done):
    for score in done[2]["scores"].values():
        assert 0.0 < score["forces"] < 5000.0
        assert 100.0 < score["trivial_forces"] < 3000.0
        assert score["structures"] in (4, 6)
    assert done[2]["dynamics"]["molecule"] == "ethanol"


def test_it_is_told_in_plain_words(done):
    text = " ".join(done[1].split())
    for words in (
        "methane, water and methanol",
        "Kept back from it: ethane and ethanol",
        "molecules it never saw",
        "at constant energy",
    ):
        assert words in text, words


def test_the_run_is_one_like_any_other(done):
    run, _, _ = done
    found = CliRunner().invoke(app, ["evaluate", str(run.path), str(run.path / "data" / "new_motion.zarr"), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["forces_mae_meV_per_A"] == pytest.approx(done[2]["scores"]["new_motion"]["forces"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_train(tmp_path):
    from nvalchemi.demo.pipeline import Demonstration

    run = RunDir.new(tmp_path / "run")
    console = Console(record=True, width=200)
    result = Demonstration(SMALL, run, seed=3, console=console, processes=2)()
    assert result["processes"] == 2 and result["steps"] == 30
    (saved,) = [path for path in run.checkpoints.iterdir() if path.name.endswith("30")]
    assert json.loads((saved / "manifest.json").read_text())["world_size"] == 2
    train = [record for record in run.records() if record["kind"] == "train"]
    assert train[-1]["step"] == 30
    assert result["scores"]["new_motion"]["forces"] > 0
    assert "torchrun --standalone --nproc-per-node=2 -m nvalchemi resume" in console.export_text()


def test_too_little_time_is_refused():
    with pytest.raises(ConfigError, match=r"at least 0\.5"):
        Plan.of(0.1)


def test_less_time_means_less_of_everything():
    short, usual, long = Plan.of(1), Plan.of(5), Plan.of(20)
    assert short.train_frames < usual.train_frames < long.train_frames
    assert (usual.train_frames, usual.seconds) == (Plan().train_frames, Plan().seconds)


def test_a_second_demonstration_has_a_folder_of_its_own(tmp_path):
    folder = tmp_path / "runs" / "demo"
    assert unused(folder) == folder
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "demo-2").mkdir()
    assert unused(folder) == tmp_path / "runs" / "demo-3"
