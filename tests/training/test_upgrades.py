"""Checkpoints of every earlier format, written by the code of their time, go on as if they were of today."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nvalchemi.errors import CheckpointError
from nvalchemi.training import OptimizerConfig, checkpoint, layout, upgrades
from nvalchemi.training.hooks import EMAHook
from tests.training.hooks.runs import batches, strategy

FOLDER = Path(__file__).parent / "old_checkpoints"
CONFIG = OptimizerConfig(torch.optim.AdamW, {"lr": 1e-2}, torch.optim.lr_scheduler.StepLR, {"step_size": 3})


def run(steps, **settings):
    """What the files in the folder were made by, with four steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Linear(4, 1))
    hooks = [EMAHook(0.9)]
    return strategy(model, hooks, optimizer_configs=CONFIG, num_steps=steps, **settings).run(batches())


def test_there_is_a_file_of_every_earlier_version():
    assert sorted(upgrades.UPGRADES) == list(range(1, layout.VERSION))
    for version in upgrades.UPGRADES:
        (path,) = (FOLDER / f"v{version}").iterdir()
        assert layout.read(path).manifest["version"] == version


def leaves(state, where=""):
    """Every tensor, number and word of a state, by where it is."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, (list, tuple)) else None
    if items is None:
        return {where: state}
    return {place: leaf for key, value in items for place, leaf in leaves(value, f"{where}.{key}").items()}


@pytest.mark.parametrize("version", sorted(upgrades.UPGRADES))
def test_it_goes_on_to_the_same_end(version):
    """Up to rounding: the files were written on another machine. A bias before a batch norm has a gradient of nothing but rounding."""
    whole, resumed = (
        leaves(checkpoint.gather(run(8))[0]),
        leaves(checkpoint.gather(run(8, resume_from=FOLDER / f"v{version}"))[0]),
    )
    assert list(whole) == list(resumed)
    for place, expected in whole.items():
        if ".0.bias" in place or "running_mean" in place:
            assert resumed[place].shape == expected.shape
        elif isinstance(expected, torch.Tensor):
            torch.testing.assert_close(resumed[place], expected, rtol=1e-3, atol=1e-5, msg=lambda text, p=place: f"{p}: {text}")
        else:
            assert resumed[place] == expected, place


def test_a_newer_version_is_refused(tmp_path):
    saved = checkpoint.save(run(2), tmp_path)
    manifest = saved / layout.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"version": {layout.VERSION}', f'"version": {layout.VERSION + 1}'))
    with pytest.raises(CheckpointError, match=r"has a newer format; .* update nvalchemi"):
        run(8, resume_from=saved)
