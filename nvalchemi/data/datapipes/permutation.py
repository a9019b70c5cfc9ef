"""A seeded permutation of ``range(n)`` that needs no list of ``n``.

Where is the k-th sample of a shuffled epoch? A list answers, but costs 8 bytes and a swap a sample before the first batch. Here the answer
is computed: a generalised Feistel network on the rectangle ``a x b >= n`` with cycle walking, as in

    J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5,

whose round functions are streams of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). It shuffles; it keeps no secrets. Everything is integer arithmetic of fixed width, so an order is the same on every machine
and with every version of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nvalchemi.errors import ConfigError

#: Up to this length a table is drawn. A Feistel network on few points reaches too few permutations (on an odd by odd rectangle every
#: round is an even one), while a table of this length costs some tens of microseconds.
TABLE_LENGTH = 2048
ROUNDS = 8

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1
_30, _27, _31, _32 = (np.uint64(s) for s in (30, 27, 31, 32))


def splitmix64(key: np.uint64, counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output number ``counter`` of the SplitMix64 stream that starts at ``key``: one 64-bit word for each element."""
    z = counter * _GOLDEN
    z += key
    z ^= z >> _30
    z *= _MIX_1
    z ^= z >> _27
    z *= _MIX_2
    z ^= z >> _31
    return z


def derived_keys(seed: int | Sequence[int], count: int) -> NDArray[np.uint64]:
    """Unrelated 64-bit keys for one integer seed or several, of any size and sign: (count,).

    The seeds go one by one through SplitMix64's mixing, whose stream from there on gives the keys.
    """
    state = 0
    for word in seed if isinstance(seed, Sequence) else [seed]:
        state = _mixed((state + int(_GOLDEN)) & _MASK ^ int(word) & _MASK)
    return splitmix64(np.uint64(state), np.arange(1, count + 1, dtype=np.uint64))


def _mixed(z: int) -> int:
    z = (z ^ z >> 30) * int(_MIX_1) & _MASK
    z = (z ^ z >> 27) * int(_MIX_2) & _MASK
    return z ^ z >> 31


class Permutation:
    """A bijection of ``range(n)`` drawn by ``seed``; the image of any position costs the same, whatever ``n``.

    Parameters
    ----------
    n
        Number of elements, from 0 to 2**62.
    seed
        One integer or several (``(seed, epoch)``); different seeds give unrelated orders.
    table_length
        Up to this ``n`` a table is drawn instead of running the network.

    Notes
    -----
    ``permutation(positions)`` takes an array of positions and returns their images (int64); ``permutation[k]`` takes one.
    """

    def __init__(self, n: int, seed: int | Sequence[int] = 0, *, table_length: int = TABLE_LENGTH) -> None:
        if not 0 <= n <= 2**62:
            raise ConfigError("a permutation has from 0 to 2**62 elements", found=n)
        self.n = n
        self._keys = derived_keys(seed, ROUNDS)
        self._table: NDArray[np.int64] | None = None
        if n <= table_length:
            draws = splitmix64(self._keys[0], np.arange(n, dtype=np.uint64))
            self._table = np.argsort(draws, kind="stable").astype(np.int64)
            return
        # The narrowest rectangle near a square: fewer than one position in sqrt(n) falls outside and has to walk on.
        self._width = math.isqrt(n - 1) + 1
        self._height = -(-n // self._width)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        return int(self(np.array([position], dtype=np.int64))[0])

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Images of ``positions``, an integer array of any length with values in ``range(n)`` (IndexError otherwise)."""
        where = np.asarray(positions, dtype=np.int64)
        if where.size and (where.min() < 0 or where.max() >= self.n):
            raise IndexError(f"positions run from {where.min()} to {where.max()}, but the permutation has {self.n} elements")
        if self._table is not None:
            return self._table[where]
        image = self._network(where.astype(np.uint64))
        limit = np.uint64(self.n)
        outside = np.flatnonzero(image >= limit)
        while outside.size:  # cycle walking: the network permutes the rectangle, so every walk comes back inside
            image[outside] = walked = self._network(image[outside])
            outside = outside[walked >= limit]
        return image.astype(np.int64)

    def _network(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        width, height = np.uint64(self._width), np.uint64(self._height)
        row = x // width
        column = x - row * width
        for number, key in enumerate(self._keys):
            if number % 2:
                column = shifted(column, splitmix64(key, row), width)
            else:
                row = shifted(row, splitmix64(key, column), height)
        row *= width
        row += column
        return row


def shifted(value: NDArray[np.uint64], word: NDArray[np.uint64], modulus: np.uint64) -> NDArray[np.uint64]:
    """``value + draw`` modulo ``modulus``, the draw made from the upper half of ``word`` by a multiplication (sides are below 2**32)."""
    word >>= _32
    word *= modulus
    word >>= _32
    word += value
    word -= modulus * (word >= modulus)
    return word
