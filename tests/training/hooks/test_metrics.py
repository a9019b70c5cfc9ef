import csv
import json
import math
import shutil

import pytest
import torch
from torch import nn

from nvalchemi.errors import ConfigError, TrainingError
from nvalchemi.objective import LossOutput, LossPart, Objective
from nvalchemi.training import Every, OptimizerConfig, TrainingStage, ValidationConfig, on
from nvalchemi.training.hooks import CheckpointHook, GradientClipHook, MetricsHook, SpikeHook
from tests.training.hooks.runs import SGD, batches, linear, network, rows, strategy, weight_row

TIMES = ("time", "samples_per_s")


def records(folder):
    return [json.loads(line, parse_constant=no_constant) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def timeless(items):
    return [{k: v for k, v in item.items() if k not in TIMES} for item in items]


def test_what_a_record_holds(tmp_path):
    config = ValidationConfig(validation_data=batches(1), every_n_steps=4)
    hooks = [MetricsHook(tmp_path, Every(steps=2)), GradientClipHook(1.0)]
    strategy(network(), hooks, validation_config=config, num_steps=4).run(batches())
    lines = records(tmp_path)
    assert [(r["kind"], r["step"], r["epoch"]) for r in lines] == [("train", 2, 0), ("validation", 4, 0), ("train", 4, 0)]
    assert set(lines[0]) == {
        *("kind", "step", "epoch", "time", "loss", "loss/loss", "lr", "samples_per_s", "skipped", "grad_norm"),
    }
    assert lines[0]["lr"] == 0.01 and lines[0]["samples_per_s"] > 0 and lines[0]["time"] >= 0
    assert {"loss", "n"} <= set(lines[1])


def test_the_table_says_the_same(tmp_path):
    config = ValidationConfig(validation_data=batches(1), every_n_steps=2)
    strategy(network(), [MetricsHook(tmp_path, Every(steps=1))], validation_config=config, num_steps=5).run(batches())
    lines, table_rows = records(tmp_path), table(tmp_path)
    assert len(lines) == len(table_rows) == 8  # five of training, validations at 2, 4 and the end
    for line, row in zip(lines, table_rows, strict=True):
        assert {k: v for k, v in row.items() if v != ""} == {k: str(v) for k, v in line.items()}


def levels(*values):
    """A loss of two parts that is what the data say; the second part is labelled in every other batch only."""

    def loss(prediction, batch):
        value = batch[1][0, 0] + 0 * prediction.sum()
        labelled = float(batch[1][0, 0] % 2 == 0)
        return LossOutput.from_parts({"a": LossPart(value, 1), "b": LossPart(value * labelled, labelled, 2.0)}, 1)

    return loss, [(torch.zeros(1, 1), torch.tensor([[v]])) for v in values]


def test_values_are_means_over_the_window_each_over_its_own_count(tmp_path):
    loss, data = levels(1.0, 2.0, 3.0, 4.0)
    hook = MetricsHook(tmp_path, Every(steps=4))
    strategy(weight_row(0.0), [hook], optimizer_configs=SGD, loss_fn=loss, num_epochs=1).run(data)
    (record,) = records(tmp_path)
    assert record["loss/a"] == 2.5
    assert record["loss/b"] == 3.0
    assert record["loss"] == (1 + 6 + 3 + 12) / 4


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_b48_the_true_loss_is_logged(tmp_path, accumulate):
    class Constant(Objective):
        def __call__(self, model, batch, *, generator, step):
            value = (0 * model(batch[0])).sum() + 2.0 * len(batch[0])
            return LossOutput.from_parts({name: LossPart(value, len(batch[0]), 0.5) for name in "ab"}, len(batch[0]))

        def counts(self, batch):
            return {"a": len(batch[0]), "b": len(batch[0])}

    hook = MetricsHook(tmp_path, Every(steps=1))
    model = weight_row(0.0, 0.0, 0.0)
    strategy(model, [hook], loss_fn=Constant(), training_fn=None, accumulate=accumulate, num_epochs=1).run(batches(4))
    lines = records(tmp_path)
    assert len(lines) == 4 // accumulate
    assert all(r["loss"] == r["loss/a"] == r["loss/b"] == 2.0 for r in lines)


def test_samples_weigh_the_mean(tmp_path):
    data = [(torch.full((n, 1), v), torch.zeros(n, 1)) for n, v in ((1, 10.0), (4, 1.0))]
    model = weight_row(1.0)
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.0})
    strategy(model, [MetricsHook(tmp_path, Every(steps=2))], optimizer_configs=config, loss_fn=linear, num_epochs=1).run(data)
    assert records(tmp_path)[0]["loss"] == pytest.approx(14 / 5)


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    loss, data = levels(1.0, 3.0, 5.0)
    given = iter([float("nan"), float("inf"), torch.tensor(1.0)])

    @on(TrainingStage.OPTIMIZER_STEPPED)
    def note(ctx):
        ctx.metrics["x"] = next(given)

    hooks = [note, MetricsHook(tmp_path, Every(steps=1))]
    strategy(weight_row(0.0), hooks, optimizer_configs=SGD, loss_fn=loss, num_epochs=1).run(data)
    lines = records(tmp_path)
    assert [r["x"] for r in lines] == ["nan", "inf", 1.0]
    assert math.isnan(float(lines[0]["x"])) and float(lines[1]["x"]) == math.inf
    assert lines[2]["loss/b"] == "nan"  # no label in the window


@pytest.mark.parametrize(("value", "found"), [(torch.ones(3), r"shape \(3,\)"), ("high", "'high'")])
def test_a_metric_that_is_no_number_is_named(tmp_path, value, found):
    @on(TrainingStage.OPTIMIZER_STEPPED)
    def note(ctx):
        ctx.metrics["mine"] = value

    with pytest.raises(TrainingError, match=rf"ctx.metrics\['mine'\] is no number; found: {found}"):
        strategy(network(), [note, MetricsHook(tmp_path, Every(steps=2))], num_steps=2).run(batches())


def test_a_skipped_step_counts_as_skipped_and_in_no_mean(tmp_path):
    data = rows((1.0,), (float("nan"),), (3.0,))
    hooks = [SpikeHook(), MetricsHook(tmp_path, Every(steps=2))]
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.0})
    strategy(weight_row(1.0), hooks, optimizer_configs=config, loss_fn=linear, num_epochs=1).run(data)
    (record,) = records(tmp_path)
    assert (record["loss"], record["skipped"], record["step"]) == (2.0, 1, 2)


def test_what_is_left_of_a_window_is_written_at_the_end(tmp_path):
    strategy(network(), [MetricsHook(tmp_path, Every(steps=3))], num_steps=5).run(batches())
    assert [r["step"] for r in records(tmp_path)] == [3, 5]


def test_by_epochs_and_with_several_optimizers(tmp_path):
    models = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    configs = {name: OptimizerConfig(torch.optim.SGD, {"lr": lr}) for name, lr in (("a", 0.1), ("b", 0.2))}
    strategy(
        models,
        [MetricsHook(tmp_path, Every(epochs=1))],
        optimizer_configs=configs,
        training_fn=lambda m, batch: m["a"](batch[0]) + m["b"](batch[0]),
        num_epochs=2,
    ).run(batches())
    assert [(r["step"], r["epoch"], r["lr/a"], r["lr/b"]) for r in records(tmp_path)] == [(4, 1, 0.1, 0.2), (8, 2, 0.1, 0.2)]


class Killed(Exception):
    pass


def run_to(folder, steps, kill_at=None, **kwargs):
    @on(TrainingStage.STEP_END)
    def kill(ctx):
        if ctx.progress.step == kill_at:
            raise Killed

    hooks = [MetricsHook(folder, Every(steps=3)), CheckpointHook(folder / "checkpoints", Every(steps=5)), kill]
    config = ValidationConfig(validation_data=batches(1), every_n_steps=4)
    torch.manual_seed(0)
    strategy(network(), hooks, validation_config=config, num_steps=steps, resume_from="latest", **kwargs).run(batches())


@pytest.mark.parametrize("kill_at", [3, 6, 9, 12, 13])
@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_goes_on_without_gaps_or_doubles(tmp_path, kill_at, torn):
    run_to(tmp_path / "whole", 14)
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        run_to(broken, 14, kill_at)
    if torn:
        with (broken / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
        (broken / "metrics.csv").write_bytes((broken / "metrics.csv").read_bytes()[:-7])
    run_to(broken, 14)
    assert timeless(records(broken)) == timeless(records(tmp_path / "whole"))
    assert timeless(table(broken)) == timeless(table(tmp_path / "whole"))
    times = [r["time"] for r in records(broken)]
    assert times == sorted(times)


def test_records_that_are_lost_are_told(tmp_path, caplog):
    with pytest.raises(Killed):
        run_to(tmp_path, 14, 11)
    (tmp_path / "metrics.jsonl").unlink()
    run_to(tmp_path, 14)
    assert "holds 0 records, the checkpoint knows of 5" in caplog.text
    assert [r["step"] for r in records(tmp_path) if r["kind"] == "train"] == [12, 14]


def test_a_fresh_run_puts_an_older_file_aside(tmp_path, caplog):
    for steps in (2, 3, 4):
        strategy(network(), [MetricsHook(tmp_path, Every(steps=1))], num_steps=steps).run(batches())
    assert [len(p.read_text().splitlines()) for p in sorted(tmp_path.glob("metrics*.jsonl"))] == [4, 2, 3]
    assert "it is now metrics.old-1.jsonl" in caplog.text


def test_each_record_is_on_its_way_when_written(tmp_path):
    seen = []

    @on(TrainingStage.STEP_END)
    def look(ctx):
        seen.append((len(records(tmp_path)), len(table(tmp_path))))

    strategy(network(), [MetricsHook(tmp_path, Every(steps=1)), look], num_steps=3).run(batches())
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_b110_the_first_validation_is_the_validation_sets(tmp_path):
    seen = []

    @on(TrainingStage.VALIDATED)
    def look(ctx):
        seen.append((ctx.progress.step, ctx.validation["loss"]))

    model = weight_row(1.0)
    config = OptimizerConfig(torch.optim.SGD, {"lr": 0.0})
    validation = ValidationConfig(validation_data=rows((7.0,)), every_n_steps=2, at_start=True)
    hooks = [MetricsHook(tmp_path, Every(steps=1)), look]
    strategy(model, hooks, optimizer_configs=config, loss_fn=linear, validation_config=validation, num_steps=2).run(
        rows((3.0,), (3.0,))
    )
    lines = records(tmp_path)
    assert [(r["kind"], r["step"], r["loss"]) for r in lines] == [
        *(("validation", 0, 7.0), ("train", 1, 3.0), ("validation", 2, 7.0), ("train", 2, 3.0)),
    ]
    assert seen == [(0, 7.0), (2, 7.0)]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        strategy(network(), [MetricsHook(tmp_path / "file" / "runs")]).run(batches())


def test_a_folder_that_is_removed_in_mid_run_is_told_and_begun_anew(tmp_path, caplog):
    """Records that come later are not lost too."""
    folder = tmp_path / "run"

    @on(TrainingStage.STEP_START)
    def remove(ctx):
        if ctx.progress.step == 3:
            shutil.rmtree(folder)

    strategy(network(), [remove, MetricsHook(folder, Every(steps=1))], num_steps=5).run(batches())
    assert [r["step"] for r in records(folder)] == [4, 5]
    assert [row["step"] for row in table(folder)] == ["4", "5"]
    assert "was removed while the run wrote to it: its 3 records are lost" in caplog.text
