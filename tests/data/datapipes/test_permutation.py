from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.permutation import TABLE_LENGTH, Permutation, splitmix64
from nvalchemi.errors import ConfigError


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 5000), seed=st.integers(-(2**63), 2**64 - 1), table=st.sampled_from([0, TABLE_LENGTH]))
def test_is_a_bijection(n: int, seed: int, table: int) -> None:
    image = Permutation(n, seed, table_length=table)(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))


def test_order_is_fixed_by_the_seed_for_ever() -> None:
    # A stored position is worthless if another version shuffles otherwise: these numbers must never change.
    assert Permutation(10, (7, 0))(np.arange(10)).tolist() == [1, 3, 0, 9, 4, 6, 7, 8, 2, 5]
    assert Permutation(10**9, (7, 3))(np.arange(5)).tolist() == [272127169, 392564551, 438976045, 249220412, 408882565]


def test_the_stream_is_that_of_splitmix64() -> None:
    # the first outputs of the authors' program for the seed 1234567
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert splitmix64(np.uint64(1234567), np.arange(1, 6, dtype=np.uint64)).tolist() == published


def test_seeds_and_epochs_give_different_orders() -> None:
    for n in (1000, 100_000):
        seeds = [(0, 0), (0, 1), (1, 0), (-1, 0), (2**32, 1), (0, 2**32 + 1), 5]
        heads = {tuple(Permutation(n, seed)(np.arange(8)).tolist()) for seed in seeds}
        assert len(heads) == len(seeds)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_tables_reach_every_permutation_equally(n: int) -> None:
    draws = 4000
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(draws):
        key = tuple(Permutation(n, seed)(np.arange(n)).tolist())
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == math.factorial(n)
    assert _chi_square_z(np.array(list(counts.values())), draws / math.factorial(n)) < 4


@pytest.mark.parametrize(("n", "table"), [(7, TABLE_LENGTH), (7, 0), (12, 0), (23, 0)])
def test_every_element_goes_everywhere_equally(n: int, table: int) -> None:
    draws = 3000
    single, pairs = np.zeros((n, n)), np.zeros((n, n))
    for seed in range(draws):
        image = Permutation(n, (seed, 1), table_length=table)(np.arange(n))
        single[np.arange(n), image] += 1
        pairs[image[0], image[1]] += 1
    assert _chi_square_z(single, draws / n, degrees=(n - 1) ** 2) < 4
    assert np.all(np.diag(pairs) == 0)
    off_diagonal = pairs[~np.eye(n, dtype=bool)]
    assert _chi_square_z(off_diagonal, draws / (n * (n - 1))) < 4


def test_neighbours_are_unrelated_in_a_large_range() -> None:
    n = 10**6
    image = Permutation(n, 1)(np.arange(20_000))
    steps = np.diff(image) % n
    counts, _ = np.histogram(steps, bins=100, range=(0, n))
    assert _chi_square_z(counts, len(steps) / 100) < 4
    correlation = np.corrcoef(image[:-1], image[1:])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(steps))


def _chi_square_z(counts: np.ndarray, expected: float, degrees: int | None = None) -> float:
    """Standard deviations by which chi-square exceeds what chance gives."""
    degrees = counts.size - 1 if degrees is None else degrees
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees)


def test_a_billion_costs_no_memory_and_no_time() -> None:
    tracemalloc.start()
    begin = time.perf_counter()
    permutation = Permutation(10**9, (0, 0))
    permutation(np.arange(64))
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.05
    assert peak < 1e6


def test_single_positions_and_wrong_ones() -> None:
    permutation = Permutation(5000, 3)
    assert permutation[17] == permutation(np.array([17]))[0]
    assert len(permutation) == 5000
    assert permutation([]).dtype == np.int64
    for outside in (-1, 5000):
        with pytest.raises(IndexError, match="5000"):
            permutation[outside]
    with pytest.raises(ConfigError):
        Permutation(-1)
