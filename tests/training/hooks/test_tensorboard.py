"""What TensorBoard itself reads of the files."""

import json

import pytest

from nvalchemi.errors import ConfigError
from nvalchemi.training import Every, TrainingStage, ValidationConfig, on
from nvalchemi.training.hooks import CheckpointHook, MetricsHook, TensorBoardHook
from tests.training.hooks.runs import batches, network, strategy

pytest.importorskip("tensorboard")


def shown(folder):
    """Tag -> [(step, value)], as TensorBoard's own reader gives it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_scalars_are_those_of_the_metrics(tmp_path):
    config = ValidationConfig(validation_data=batches(1), every_n_steps=4)
    hooks = [MetricsHook(tmp_path, Every(steps=2)), TensorBoardHook(tmp_path / "events", Every(steps=2))]
    strategy(network(), hooks, validation_config=config, num_steps=7).run(batches())
    scalars = shown(tmp_path / "events")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"train/loss", "train/lr", "train/samples_per_s", "train/skipped", "validation/loss"} <= set(scalars)
    for kind in ("train", "validation"):
        wanted = [(line["step"], pytest.approx(line["loss"])) for line in lines if line["kind"] == kind]
        assert scalars[f"{kind}/loss"] == wanted and len(wanted) >= 2


def test_a_run_that_is_resumed_shows_no_step_twice(tmp_path):
    """Killed at step 7 with a checkpoint of step 5: what was written of steps 6 and 7 is not shown, that of the resumed run is."""

    @on(TrainingStage.STEP_END)
    def kill(ctx):
        if ctx.progress.step == 7:
            raise KeyboardInterrupt

    def run(folder, *more, **settings):
        hooks = [
            TensorBoardHook(folder / "events", Every(steps=1)),
            CheckpointHook(folder / "checkpoints", Every(steps=5)),
            *more,
        ]
        return strategy(network(), hooks, num_steps=9, **settings).run(batches())

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", kill)
    assert [step for step, _ in shown(tmp_path / "cut" / "events")["train/loss"]] == [1, 2, 3, 4, 5, 6, 7]
    run(tmp_path / "cut", resume_from="latest")
    whole, cut = shown(tmp_path / "whole" / "events"), shown(tmp_path / "cut" / "events")
    assert cut["train/loss"] == whole["train/loss"] and len(cut["train/loss"]) == 9


def test_events_of_an_older_run_are_moved_aside(tmp_path):
    for steps in (3, 5):
        strategy(network(), [TensorBoardHook(tmp_path, Every(steps=1))], num_steps=steps).run(batches())
    assert len(shown(tmp_path)["train/loss"]) == 5
    assert len(shown(tmp_path / "old-1")["train/loss"]) == 3


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="TensorBoard's files cannot be written to"):
        strategy(network(), [TensorBoardHook(tmp_path / "file" / "a")], num_steps=1).run(batches())


def test_without_its_package(monkeypatch, tmp_path):
    monkeypatch.setattr("nvalchemi.training.hooks.tensorboard.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package tensorboard.*nvalchemi\[tensorboard\]"):
        TensorBoardHook(tmp_path)
