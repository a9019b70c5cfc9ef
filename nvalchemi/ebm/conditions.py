"""What an energy is told beside its samples, such as labels, where a loss draws further samples for the same labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import DataError


def check_rows(conditions: Mapping[str, Any], *rows: int) -> None:
    """Refuse tensors that have not one row for each sample (or, of structures, for each atom): they would be broadcast without notice.

    Parameters
    ----------
    conditions
        By name. Tensors of no dimension, and what is no tensor, are the same for all.
    rows
        How many there may be, the number of samples first.

    Raises
    ------
    DataError
        For these.
    """
    for name, value in conditions.items():
        if isinstance(value, Tensor) and value.ndim and len(value) not in rows:
            raise DataError(
                f"the condition {name!r} does not fit the samples", found=tuple(value.shape), needed=f"a tensor ({rows[0]}, ...)"
            )


def rows_of(conditions: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """The conditions of the samples ``index`` alone."""
    return {
        name: value.index_select(0, index.to(value.device)) if isinstance(value, Tensor) and value.ndim else value
        for name, value in conditions.items()
    }


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
