"""Checkpoints of every earlier format, written by the code of their time, go on as if they were of today."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nvalchemi.errors import CheckpointError
from nvalchemi.testing import state_differences
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


@pytest.mark.parametrize("version", sorted(upgrades.UPGRADES))
def test_it_goes_on_to_the_same_end(version):
    whole, _ = checkpoint.gather(run(8))
    resumed, _ = checkpoint.gather(run(8, resume_from=FOLDER / f"v{version}"))
    assert list(state_differences(whole, resumed)) == []


def test_a_newer_version_is_refused(tmp_path):
    saved = checkpoint.save(run(2), tmp_path)
    manifest = saved / layout.MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"version": {layout.VERSION}', f'"version": {layout.VERSION + 1}'))
    with pytest.raises(CheckpointError, match=r"has a newer format; .* update nvalchemi"):
        run(8, resume_from=saved)
