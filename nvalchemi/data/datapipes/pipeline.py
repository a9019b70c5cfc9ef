"""What happens to samples between a source and the loader: where they came from, dtype, transforms, checks.

Samples are a `Batch` of structures or, for energy-based models, dense: a tensor (n, ...) or a dict of such tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.permutation import derived_keys, splitmix64
from nvalchemi.data.fields import Level, missing_value
from nvalchemi.data.transforms import NeighborList, Transform, apply
from nvalchemi.errors import DataError

Samples = Batch | Tensor | dict[str, Tensor]
Transforms = Sequence[Callable[..., Any]]


def add_provenance(samples: Samples, idx: NDArray[np.int64], name: str) -> Samples:
    """Note in a batch where its structures came from, unless it knows already."""
    if isinstance(samples, Batch):
        if samples.sample_index is None:
            samples.sample_index = torch.from_numpy(idx)
        if not samples.dataset_names:
            samples.dataset_names = (name,)
    return samples


def cast(samples: Samples, dtype: torch.dtype) -> Samples:
    """Samples with floating numbers of ``dtype``; a batch's energies stay float64."""
    if isinstance(samples, Batch):
        return samples if samples.dtype == dtype else samples.cast(dtype)
    return map_dense(samples, lambda t: t.to(dtype) if t.is_floating_point() else t)


def map_dense(samples: Tensor | dict[str, Tensor], function: Callable[[Tensor], Tensor]) -> Tensor | dict[str, Tensor]:
    """Apply ``function`` to the tensor, or to every tensor of the dict."""
    return function(samples) if isinstance(samples, Tensor) else {name: function(value) for name, value in samples.items()}


# -- transforms ------------------------------------------------------------------------------------------------------------------------


def takes_batches(transform: Callable[..., Any]) -> bool:
    """Whether a per-sample transform gives the same when it is called on the whole batch, which is faster."""
    return isinstance(transform, NeighborList)


def transformed(samples: Samples, transforms: Transforms, idx: NDArray[np.int64], key: tuple[int, ...]) -> Samples:
    """Apply per-sample transforms in order.

    Parameters
    ----------
    samples
        What was read at ``idx``.
    transforms
        See `BaseDataset`.
    idx
        (n,) index of each sample in its data set.
    key
        What the random numbers depend on beside the index: seed, epoch, and which data set.
    """
    if not isinstance(samples, Batch):
        return _dense_transformed(samples, transforms, sample_seeds(idx, key))
    batch = samples
    for number, (whole, group) in enumerate(groupby(transforms, takes_batches)):
        if whole:
            for transform in group:
                batch = transform(batch)
        else:
            batch = _one_by_one(batch, list(group), sample_seeds(idx, (*key, number)))
    return batch


def sample_seeds(idx: NDArray[np.int64], key: tuple[int, ...]) -> list[int]:
    """One 64-bit seed a sample: unrelated between samples and keys, and the same wherever and whenever it is computed."""
    (start,) = derived_keys(key, 1)
    return splitmix64(start, idx.astype(np.uint64)).tolist()


def _one_by_one(batch: Batch, transforms: list[Callable[..., Any]], seeds: list[int]) -> Batch:
    generator = torch.Generator()
    data = batch.to_data_list()
    for i, seed in enumerate(seeds):
        generator.manual_seed(seed)
        try:
            for transform in transforms:
                data[i] = apply(transform, data[i], generator)
        except Exception as error:
            error.add_note(f"in the transform {transform!r} of {batch.describe(i)}")
            raise
    out = Batch.from_data_list(data)
    out.sample_index, out.dataset_index, out.dataset_names = batch.sample_index, batch.dataset_index, batch.dataset_names
    return _with_absent(out, batch)


def _with_absent(out: Batch, before: Batch) -> Batch:
    """Put back fields that no structure of this batch has but others of the data set do: a list of structures cannot tell of them."""
    for name, mask in before.present.items():
        level = before.levels[name]
        if name in out or level is Level.EDGE or mask.any():
            continue
        model = before.fields[name]
        rows = out.num_graphs if level is Level.SYSTEM else out.num_nodes
        out.fields[name] = model.new_full((rows, *model.shape[1:]), missing_value(name, model.dtype))
        out.present[name] = mask
        out.levels = {**out.levels, name: level}
    return out


def _dense_transformed(
    samples: Tensor | dict[str, Tensor], transforms: Transforms, seeds: list[int]
) -> Tensor | dict[str, Tensor]:
    generator = torch.Generator()
    rows = []
    for i, seed in enumerate(seeds):
        generator.manual_seed(seed)
        row: Any = samples[i] if isinstance(samples, Tensor) else {name: value[i] for name, value in samples.items()}
        for transform in transforms:
            row = transform(row, generator) if isinstance(transform, Transform) else transform(row)
        rows.append(row)
    if not rows:
        return samples
    if isinstance(rows[0], dict):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return torch.stack(rows)


# -- checks ----------------------------------------------------------------------------------------------------------------------------


def check_finite(samples: Samples, idx: NDArray[np.int64], name: str) -> None:
    """DataError naming the sample if positions, or any floating number of dense samples, are not finite."""
    if isinstance(samples, Batch):
        if not _all_finite(samples.fields["positions"]):
            row = _first_bad_row(samples.fields["positions"])
            if row is not None:
                i = int(samples.batch_idx[row])
                raise _not_finite(f"positions of {samples.describe(i)}", f"atom {row - int(samples.atom_offsets[i])}")
        return
    parts = {"values": samples} if isinstance(samples, Tensor) else samples
    for field, values in parts.items():
        if values.is_floating_point() and not _all_finite(values):
            row = _first_bad_row(values)
            if row is not None:
                raise _not_finite(f"{field} of sample {idx[row]} of {name}", None)


def _all_finite(values: Tensor) -> bool:
    if values.dtype not in (torch.float16, torch.float32, torch.float64):
        values = values.float()  # NumPy has no such numbers
    # A sum is not finite if any term is not, and is the cheapest look at every number. It may also overflow; a second look decides.
    with np.errstate(all="ignore"):
        return math.isfinite(values.detach().numpy().sum())


def _first_bad_row(values: Tensor) -> int | None:
    finite = torch.isfinite(values.float() if values.itemsize < 2 else values).reshape(len(values), -1).all(1)
    return None if bool(finite.all()) else int((~finite).nonzero()[0])


def _not_finite(what: str, where: str | None) -> DataError:
    return DataError(
        f"{what} are not finite" + (f" at {where}" if where else ""),
        fix="verify the store or mend the transform; check_finite=False switches the check off",
    )
