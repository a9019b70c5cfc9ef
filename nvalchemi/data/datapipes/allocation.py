"""How many samples each data set gives: to a batch, to an epoch, and up to any position of an epoch. Pure functions of integers.

Shares are fractions, so that 0.1 means one tenth and counts are exact on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from nvalchemi.errors import ConfigError

EpochPolicy = Literal["dataset_size", "min_size", "max_size"]


def as_fraction(value: Any) -> Fraction:
    """A number as the fraction that its shortest decimal form says: 0.1 is one tenth."""
    return Fraction(value) if isinstance(value, int | Fraction) else Fraction(repr(float(value)))


def shares_of(weights: Sequence[Any], sizes: Sequence[int], names: Sequence[str], what: str = "weights") -> list[Fraction]:
    """Weights, one a data set, as shares that sum to one.

    Raises
    ------
    ConfigError
        Another number of weights than of data sets, a weight that is negative or not finite, no weight above zero, or one above zero
        for a data set that is empty.
    """
    if len(weights) != len(sizes):
        raise ConfigError(f"{what} has one number a data set", found=f"{len(weights)} numbers", needed=f"{len(sizes)}")
    for name, size, weight in zip(names, sizes, weights, strict=True):
        if isinstance(weight, bool) or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{what} of {name} is no share", found=weight, needed="a number that is not negative")
        if weight and not size:
            raise ConfigError(
                f"{name} is empty and cannot give samples", found=f"{what} {weight}", fix="give it 0, or leave it out"
            )
    exact = [as_fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise ConfigError(f"{what} are all zero, so there is nothing to draw from", found=list(weights))
    return [weight / total for weight in exact]


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """``total`` divided by shares (that sum to one) into whole numbers that sum to it: the method of largest remainders.

    Each is its exact share rounded up or down; of equal remainders the first comes first.
    """
    exact = [total * share for share in shares]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda d: (counts[d] - exact[d], d))
    for d in order[: total - sum(counts)]:
        counts[d] += 1
    return counts


def batch_composition(
    batch_size: int, samples_per_dataset: Sequence[Any], sizes: Sequence[int], names: Sequence[str]
) -> list[int]:
    """Samples of each data set in every batch.

    Parameters
    ----------
    batch_size
        Samples a batch.
    samples_per_dataset
        Whole numbers are counts, and sum to ``batch_size``; with any other number among them, they are ratios.
    sizes, names
        Of the data sets.

    Raises
    ------
    ConfigError
        Counts that do not sum to the batch size, or a ratio above zero that gives no sample a batch.
    """
    shares = shares_of(samples_per_dataset, sizes, names, "samples_per_dataset")
    if all(isinstance(value, int | np.integer) for value in samples_per_dataset):
        counts = [int(value) for value in samples_per_dataset]
        if sum(counts) != batch_size:
            raise ConfigError(
                "samples_per_dataset does not fill the batch",
                found=f"{counts}, in all {sum(counts)}",
                needed=f"batch_size={batch_size}",
                fix="change either, or give ratios as floats",
            )
        return counts
    counts = apportion(batch_size, shares)
    for name, share, count in zip(names, shares, counts, strict=True):
        if share and not count:
            raise ConfigError(
                f"a batch is too small to hold any of {name} at this ratio",
                found=f"batch_size={batch_size}, ratio {float(share):.4g}",
                needed=f"a batch of about {math.ceil(1 / share)}",
                fix="use weights=, which hold over many batches",
            )
    return counts


def epoch_length(sizes: Sequence[int], shares: Sequence[Fraction], policy: str) -> Fraction:
    """Samples of an epoch, before rounding to whole ones.

    ``"dataset_size"``: as many as there are. ``"min_size"``: until the first data set has been gone through. ``"max_size"``: until every
    one has been gone through at least once.
    """
    if policy not in get_args(EpochPolicy):
        raise ConfigError("there is no such epoch_policy", found=repr(policy), needed=" or ".join(get_args(EpochPolicy)))
    if policy == "dataset_size":
        return Fraction(sum(sizes))
    whole = [size / share for size, share in zip(sizes, shares, strict=True) if share]
    return Fraction((min if policy == "min_size" else max)(whole, default=0))


def counts_before(positions: NDArray[np.int64], quotas: Sequence[int]) -> list[NDArray[Any]]:
    """How many samples each data set has given before each position of a sequence in which they alternate evenly.

    Parameters
    ----------
    positions
        (k,) not negative; the sequence goes on beyond the sum of the quotas, at the same rates.
    quotas
        Samples of each data set among the first ``sum(quotas)``.

    Returns
    -------
    list
        For each data set a (k,) array. At a position they sum to it, none ever falls, each stays within ``len(quotas)`` of its exact
        share, and at ``sum(quotas)`` they are the quotas.
    """
    rest, total = np.asarray(positions), sum(quotas)
    if rest.size and int(rest.max()) * max(total, 1) >= 2**62:
        rest = rest.astype(object)  # Python's integers, which have no largest
    counts: list[NDArray[Any]] = []
    for quota in quotas:
        # One data set takes its part of what those before it left: a chain of floors, each of which only rises by what its input rises.
        given = rest * quota // total if total else np.zeros_like(rest)
        counts.append(given)
        rest, total = rest - given, total - quota
    return counts
