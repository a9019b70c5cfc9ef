"""The summary of a set of structures: counts, ranges, duplicates; the same from batches and from a reader."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from nvalchemi.data import AtomicData, Batch
from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter
from nvalchemi.data.summary import Summary


def structures() -> list[AtomicData]:
    cell = [[5.0, 0, 0], [0, 5.0, 0], [0, 0, 5.0]]
    larger = [[6.0, 0, 0], [0, 6.0, 0], [0, 0, 6.0]]
    stress = [[0.1, 0, 0], [0, 0.2, 0], [0, 0, -0.3]]
    return [
        AtomicData([[0, 0, 0], [0, 0, 0.75]], [1, 1], energy=-32.0, forces=[[0, 0, 3.0], [0, 0, -3.0]]),
        AtomicData([[0, 0, 0.0]], [6], cell=cell, energy=-1029.0, stress=stress),
        AtomicData([[0, 0, 0.0]], [6], cell=larger, energy=np.nan, forces=[[np.nan, 0.0, 4.0]]),
        AtomicData([[0, 0, 0], [0, 0, 0.75]], [1, 1], charge=-1.0),
    ]


def summary_of(data: list[AtomicData], size: int = 2) -> Summary:
    summary = Summary()
    for start in range(0, len(data), size):
        summary.add(Batch.from_data_list(data[start : start + size]))
    return summary


@pytest.mark.parametrize("size", [1, 2, 4])
def test_counts_and_ranges(size):
    data = summary_of(structures(), size).as_dict()
    assert (data["structures"], data["atoms"], data["periodic"], data["unlabelled"], data["duplicates"]) == (4, 6, 2, 1, 1)
    assert data["atoms_per_structure"] == {"min": 1, "mean": 1.5, "max": 2}
    assert data["elements"] == {"H": 4, "C": 2}
    energy, forces, stress = (data["fields"][name] for name in ("energy", "forces", "stress"))
    assert energy == {
        "level": "system",
        "structures": 2,
        "unit": "eV/atom",
        "min": -1029.0,
        "max": -16.0,
        "mean": -522.5,
        "rms": pytest.approx(np.sqrt((1029**2 + 16**2) / 2)),
    }
    assert forces["structures"] == 2  # one of them in part
    assert forces["rms"] == pytest.approx(np.sqrt((9 + 9 + 16) / 8))
    assert (stress["structures"], stress["min"], stress["max"]) == pytest.approx((1, -0.3, 0.2))
    assert stress["rms"] == pytest.approx(np.sqrt((0.01 + 0.04 + 0.09) / 9))
    assert data["fields"]["charge"]["structures"] == 1


def test_a_different_cell_is_no_duplicate_and_the_first_one_is_named():
    summary = summary_of(structures())
    assert summary.first_duplicate == 3


def test_a_reader_gives_the_same(tmp_path):
    AtomicDataZarrWriter(tmp_path / "a.zarr").write(structures())
    done = []
    summary = Summary.of(AtomicDataZarrReader(tmp_path / "a.zarr"), batch_size=3, progress=done.append)
    assert summary.as_dict() == summary_of(structures(), 3).as_dict()
    assert done == [3, 4]


def test_nothing_at_all_is_json():
    data = Summary().as_dict()
    assert data["structures"] == 0
    json.dumps(data, allow_nan=False)


def test_labels_that_are_all_nan_count_for_nothing():
    data = summary_of([AtomicData([[0.0, 0, 0]], [1], energy=np.nan, forces=[[np.nan] * 3])]).as_dict()
    assert data["fields"]["energy"] == {"level": "system", "structures": 0, "unit": "eV/atom"}
    assert data["unlabelled"] == 1
    json.dumps(data, allow_nan=False)


def test_float32_sums_are_taken_in_float64():
    data = [AtomicData(torch.zeros(1, 3), [1], energy=-13.6, forces=torch.full((1, 3), 0.1)) for _ in range(3)]
    assert summary_of(data).as_dict()["fields"]["forces"]["rms"] == pytest.approx(0.1, rel=1e-7)
