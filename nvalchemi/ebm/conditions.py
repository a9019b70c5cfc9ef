"""What an energy is told beside its samples, such as labels, where a loss draws further samples for the same labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import DataError


def repeated(conditions: Mapping[str, Any], count: int, times: int) -> dict[str, Any]:
    """Conditions (count, ...) for ``times`` sets of as many samples, one after the other.

    Raises
    ------
    DataError
        For a condition that is not one value a sample.
    """
    for name, value in conditions.items():
        if not isinstance(value, Tensor) or value.ndim < 1 or len(value) != count:
            raise DataError(
                f"the condition {name!r} does not fit the samples",
                found=tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__,
                needed=f"a tensor ({count}, ...)",
            )
    return {name: torch.cat([value] * times) for name, value in conditions.items()}
