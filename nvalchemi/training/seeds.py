"""Seeds of independent random streams, derived from one number."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *stream: int | str) -> int:
    """A seed in [0, 2^63) for the stream named by ``stream`` (rank, epoch, purpose): equal names give equal seeds.

    Hashing keeps neighbouring seeds and ranks unrelated, which adding them would not.
    """
    text = ":".join(str(part) for part in (seed, *stream))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
