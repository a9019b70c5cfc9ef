"""Points in the plane: their distributions, their generators, and the way into a store and back."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.data.datapipes import ArrayZarrReader, DataLoader, InMemoryDataset
from nvalchemi.ebm import datasets
from nvalchemi.errors import ConfigError, DataError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", datasets.DATASETS)
def test_points_are_the_generators(name):
    draw = datasets.DATASETS[name]
    torch.manual_seed(1)
    points = draw(100, seeded())
    torch.manual_seed(2)
    assert points.shape == (100, 2) and points.dtype == torch.float32 and points.isfinite().all()
    assert torch.equal(points, draw(100, seeded()))
    assert not torch.equal(points, draw(100, seeded(1)))
    assert draw(3, seeded(), dtype=torch.float64).dtype == torch.float64
    assert draw(0).shape == (0, 2)
    with pytest.raises(ConfigError):
        draw(-1)


def test_eight_gaussians_are_eight_and_equally_likely():
    points = datasets.eight_gaussians(8000, seeded())
    angle = torch.atan2(points[:, 1], points[:, 0]) / (math.pi / 4)
    counts = torch.bincount(angle.round().long() % 8, minlength=8)
    assert ((counts - 1000).abs() < 5 * math.sqrt(8000 * 7 / 64)).all()
    centre = 2 * torch.stack([(angle.round() * math.pi / 4).cos(), (angle.round() * math.pi / 4).sin()], 1)
    assert (points - centre).std() == pytest.approx(0.02, rel=0.03)


def test_shapes_without_noise():
    assert torch.allclose(datasets.circle(50, seeded(), radius=3.0, noise=0.0).norm(dim=1), torch.tensor(3.0))
    moons = datasets.two_moons(500, seeded(), noise=0.0)
    upper = (moons.norm(dim=1) - 1).abs() < 1e-5
    lower = ((moons - torch.tensor([1.0, 0.5])).norm(dim=1) - 1).abs() < 1e-5
    assert (upper | lower).all() and 180 < int(upper.sum()) < 320
    assert (moons[upper & ~lower][:, 1] >= -1e-6).all() and (moons[lower & ~upper][:, 1] <= 0.5 + 1e-6).all()
    side = datasets.grid(500, seeded(), n_per_dim=3, range_limit=2.0, noise=0.0)
    assert side.unique(dim=0).shape == (9, 2) and side.unique().tolist() == [-2.0, 0.0, 2.0]
    roll = datasets.swiss_roll(20_000, seeded(), noise=0.0)
    assert roll.square().mean() == pytest.approx(1.0, rel=0.03)
    wheel = datasets.pinwheel(500, seeded(), noise=0.0, angular_scale=0.0, n_classes=4)
    radius = wheel.norm(dim=1)
    turns = (torch.atan2(wheel[:, 1], wheel[:, 0]) - 5.0 * radius / 2) / (math.pi / 2)
    assert radius.max() <= 2.0 and (turns - turns.round()).abs().max() < 1e-4


def test_a_checkerboard_has_points_on_one_colour_only():
    points = datasets.checkerboard(6400, seeded())
    field = points.floor()
    assert (field.sum(1) % 2 == 1).all() and points.abs().max() <= 4
    counts = torch.unique(field, dim=0, return_counts=True)[1]
    assert len(counts) == 32 and ((counts - 200).abs() < 5 * math.sqrt(200)).all()


def test_into_a_store_and_back(tmp_path):
    assert datasets.write_points(tmp_path / "moons.zarr", "two_moons", 100, seed=3, noise=0.1) == 100
    reader = ArrayZarrReader(tmp_path / "moons.zarr")
    assert reader.metadata == {"name": "two_moons", "seed": 3, "settings": {"noise": 0.1}}
    expected = datasets.two_moons(100, seeded(3), noise=0.1)
    loader = DataLoader(InMemoryDataset(reader), batch_size=40)
    assert torch.equal(torch.cat(list(loader)), expected)
    with pytest.raises(DataError):
        datasets.write_points(tmp_path / "moons.zarr", "two_moons", 1)
    with pytest.raises(ConfigError, match="checkerboard"):
        datasets.write_points(tmp_path / "other.zarr", "three_moons", 1)
