"""Weights as functions of the step."""

from __future__ import annotations

import math
import pickle

import pytest

from nvalchemi.errors import ConfigError
from nvalchemi.training.losses import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight


def test_constant():
    assert [ConstantWeight(2.5)(s) for s in (0, 7, 10**9)] == [2.5] * 3


def test_linear():
    weight = LinearWeight(1.0, 3.0, 4)
    assert [weight(s) for s in (0, 1, 2, 3, 4, 5, 1000)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]


def test_cosine():
    weight = CosineWeight(10.0, 0.0, 4)
    assert [weight(s) for s in (0, 4, 9)] == [10.0, 0.0, 0.0]
    assert weight(1) == pytest.approx(5 * (1 + math.cos(math.pi / 4)))
    assert weight(2) == pytest.approx(5.0)


def test_piecewise():
    weight = PiecewiseWeight([10, 20], [1.0, 2.0, 3.0])
    assert [weight(s) for s in (0, 9, 10, 19, 20, 500)] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert PiecewiseWeight([], [4.0])(3) == 4.0


@pytest.mark.parametrize(
    "weight", [ConstantWeight(1.0), LinearWeight(0, 1, 5), CosineWeight(0, 1, 5), PiecewiseWeight([3], [0, 1])]
)
def test_weights_are_plain_values(weight):
    assert pickle.loads(pickle.dumps(weight)) == weight
    assert hash(weight) == hash(pickle.loads(pickle.dumps(weight)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ConstantWeight(float("nan")), "finite"),
        (lambda: LinearWeight(0.0, 1.0, 0), "num_steps"),
        (lambda: CosineWeight(0.0, "1", 5), "finite"),
        (lambda: PiecewiseWeight([1, 2], [0.0, 1.0]), "one value more"),
        (lambda: PiecewiseWeight([2, 2], [0.0, 1.0, 2.0]), "rising"),
    ],
)
def test_what_cannot_be_a_weight(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
