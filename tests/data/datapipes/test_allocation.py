from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.data.datapipes.allocation import apportion, batch_composition, counts_before, epoch_length, shares_of
from nvalchemi.errors import ConfigError

weights = st.lists(st.one_of(st.integers(0, 20), st.floats(0, 10).map(lambda x: round(x, 3))), min_size=1, max_size=6).filter(any)


@settings(max_examples=100, deadline=None)
@given(total=st.integers(0, 500), weights=weights)
def test_largest_remainders(total: int, weights: list[float]) -> None:
    shares = shares_of(weights, [1] * len(weights), "abcdef"[: len(weights)])
    counts = apportion(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share) < 1 for count, share in zip(counts, shares, strict=True))


@settings(max_examples=100, deadline=None)
@given(quotas=st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_counts_rise_evenly_and_end_on_the_quotas(quotas: list[int]) -> None:
    total = sum(quotas)
    positions = np.arange(2 * total + 1)
    counts = np.array(counts_before(positions, quotas))
    assert np.array_equal(counts.sum(0), positions if total else np.zeros(1))
    assert np.all(np.diff(counts, axis=1) >= 0)
    assert counts[:, total].tolist() == quotas
    if total:
        exact = np.outer(quotas, positions) / total
        assert np.abs(counts - exact).max() < len(quotas)


def test_counts_of_a_very_long_epoch_do_not_overflow() -> None:
    quotas = [10**15, 3 * 10**15]
    before = counts_before(np.array([4 * 10**15, 2 * 10**15]), quotas)
    assert [list(map(int, counts)) for counts in before] == [[10**15, 5 * 10**14], [3 * 10**15, 15 * 10**14]]


def test_ratios_are_exact_decimals() -> None:
    assert shares_of([0.1, 0.2], [1, 1], "ab") == [Fraction(1, 3), Fraction(2, 3)]
    assert epoch_length([10, 1000], shares_of([0.1, 0.9], [1, 1], "ab"), "min_size") == 100
    assert epoch_length([10, 1000], shares_of([0.5, 0.5], [1, 1], "ab"), "max_size") == 2000
    assert epoch_length([10, 1000], shares_of([0.5, 0.5], [1, 1], "ab"), "dataset_size") == 1010


@settings(max_examples=60, deadline=None)
@given(batch_size=st.integers(1, 64), ratios=st.lists(st.floats(0.01, 5), min_size=1, max_size=5))
def test_compositions(batch_size: int, ratios: list[float]) -> None:
    sizes, names = [7] * len(ratios), "abcde"[: len(ratios)]
    try:
        counts = batch_composition(batch_size, ratios, sizes, names)
    except ConfigError as error:
        assert "too small" in str(error)
        return
    assert sum(counts) == batch_size and min(counts) > 0
    assert batch_composition(batch_size, counts, sizes, names) == counts


WRONG = [
    (lambda: batch_composition(8, [4, 3], [9, 9], "ab"), "does not fill the batch"),
    (lambda: batch_composition(8, [4, 4, 0], [9, 9], "ab"), "one number a data set"),
    (lambda: batch_composition(8, [9, -1], [9, 9], "ab"), "of b is no share"),
    (lambda: batch_composition(8, [4, 4], [9, 0], "ab"), "b is empty"),
    (lambda: batch_composition(8, [0.99, 0.01], [9, 9], "ab"), "too small to hold any of b"),
    (lambda: shares_of([0, 0.0], [9, 9], "ab"), "all zero"),
    (lambda: shares_of([1, float("nan")], [9, 9], "ab"), "of b is no share"),
    (lambda: epoch_length([9], [Fraction(1)], "largest"), "no such epoch_policy"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=itertools.count())
def test_wrong_settings_are_named(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
