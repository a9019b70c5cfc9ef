"""Data in stores on two ranks: torch's worker processes, and a store for each rank."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.data.datapipes import ArrayZarrWriter

CASES = "tests.multiprocess.data_cases"


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """16 rows; and the same in two parts of 5 and 11."""
    folder = tmp_path_factory.mktemp("data")
    rows = torch.arange(32, dtype=torch.float64).reshape(16, 2) / 2
    rows[:, 0] = torch.arange(16)
    paths = {}
    for name, part in (("all", rows), ("first", rows[:5]), ("second", rows[5:])):
        ArrayZarrWriter(folder / f"{name}.zarr", chunk_rows=4).write(part)
        paths[name] = str(folder / f"{name}.zarr")
    return paths


@pytest.mark.parametrize(("drop_last", "accumulate"), [(False, 1), (True, 1), (False, 2)])
def test_b25_b27_each_rank_has_its_own_store(ranks, stores, drop_last, accumulate):
    """B25: 5 and 11 rows, the same number of steps, all counted; B27: validation counts each row once."""
    paths = [stores["first"], stores["second"]]
    results = ranks.call(f"{CASES}:own_stores", paths, drop_last, accumulate, limit=115.0)
    each = 5 if drop_last else 11
    batches = -(-each // 2)
    for got, rows in zip(results, (set(range(5)), set(range(5, 16))), strict=True):
        assert got["steps"] == 2 * -(-batches // accumulate)
        assert got["samples"] == 2 * 2 * each
        assert {i for batch in got["seen"] for i in batch} <= rows
    w, b = results[0]["weights"]
    assert all(torch.equal(x, y) for x, y in zip(*(got["weights"] for got in results), strict=True))
    rows = torch.arange(32, dtype=torch.float64).reshape(16, 2) / 2
    rows[:, 0] = torch.arange(16)
    exact = ((rows @ w.T).squeeze(1) + b - rows[:, 1]).square().mean()
    for got in results:
        assert got["validation"]["loss"] == pytest.approx(float(exact), rel=1e-12)


def test_a_rank_that_opens_anothers_store_is_told(ranks, stores):
    first, second = ranks.call(f"{CASES}:wrong_store", [stores["first"], stores["second"]])
    assert first == ""
    assert "not that of owner 1" in second


def check_workers(ranks, stores, folder, *arguments):
    results = ranks.call(f"{CASES}:workers", stores["all"], str(folder), *arguments, limit=115.0)
    for epoch in (slice(0, 4), slice(4, 8)):
        rows = [i for got in results for batch in got["whole"][epoch] for i in batch]
        assert sorted(rows) == list(range(16))  # disjoint, and all
    for got in results:
        assert len(got["whole"]) == 8
        assert got["whole"][:4] != got["whole"][4:]
        assert got.get("parts", got["whole"]) == got["whole"]
    return [got["whole"] for got in results]


def test_b05_b60_k05_forked_workers_of_two_ranks(ranks, stores, tmp_path):
    """B05, B60, K05: with torch's loader, batches are disjoint, and a resume within the second epoch goes on in its order, as without workers."""
    plain = check_workers(ranks, stores, tmp_path / "0", 0, None, False)
    assert check_workers(ranks, stores, tmp_path / "1", 1, "fork", False) == plain
    assert check_workers(ranks, stores, tmp_path / "2", 1, "fork", True) == plain


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_spawned_workers_of_two_ranks(ranks, stores, tmp_path):
    plain = check_workers(ranks, stores, tmp_path / "0", 0, None, False)
    assert check_workers(ranks, stores, tmp_path / "1", 1, "spawn", True) == plain
