"""Several data sets as one: an index of the whole, batches of mixed origin, and names that say which data set a sample is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.dataset import BaseDataset
from nvalchemi.data.datapipes.mixing import mixed, with_fields
from nvalchemi.data.datapipes.pipeline import Samples
from nvalchemi.data.datapipes.reader import Indices, as_indices
from nvalchemi.data.fields import Level
from nvalchemi.errors import ConfigError, DataError


class MultiDataset(BaseDataset):
    """Data sets one after the other, read as one.

    How often each is drawn from is the business of a sampler: `MultiDatasetBatchSampler`, or `MultiDatasetSampler`. Without one, a
    loader takes every sample once an epoch. Children may be resident or on disk, and may have transforms of their own, whose random
    numbers are told apart by the place of the child.

    Parameters
    ----------
    *datasets
        `Dataset` or `InMemoryDataset`, all delivering to one device. A `MultiDataset` among them stands for its own children.
    output_strict
        All children must have the same fields. With False a batch has every field of any child, ``present`` saying which structures
        have it.
    name
        What to call the whole in messages.

    Raises
    ------
    ConfigError
        No data sets, or ones for different devices.
    DataError
        Different fields, where ``output_strict``; each missing field is named with the data set that lacks it. An empty data set lacks
        nothing.

    Notes
    -----
    In a batch, ``dataset_index`` is the child of each structure, and ``sample_index`` its index in that child. The batch holds structures
    in the asked-for order.
    """

    datasets: tuple[BaseDataset, ...]

    def __init__(self, *datasets: BaseDataset, output_strict: bool = True, name: str | None = None) -> None:
        children: list[BaseDataset] = []
        for dataset in datasets:
            if not isinstance(dataset, BaseDataset):
                raise ConfigError(
                    "a MultiDataset is made of data sets",
                    found=type(dataset).__name__,
                    needed="Dataset or InMemoryDataset",
                    fix="MultiDataset(first, second), not a list; Dataset(reader) for a reader",
                )
            children += dataset.datasets if isinstance(dataset, MultiDataset) else [dataset]
        if not children:
            raise ConfigError("a MultiDataset needs at least one data set")
        devices = {child.device for child in children}
        if len(devices) > 1:
            raise ConfigError("the data sets deliver to different devices", found=sorted(map(str, devices)), needed="one device")
        self.datasets = tuple(children)
        self.names = tuple(child.name for child in children)
        self.lengths = tuple(len(child) for child in children)
        self.output_strict = output_strict
        self._starts = np.cumsum([0, *self.lengths])
        self._templates: dict[str, tuple[Level, torch.Tensor]] | None = None
        super().__init__(name or " + ".join(self.names), children[0].device)
        self._field_names = tuple(dict.fromkeys(field for child in children for field in child.field_names))
        self._alike = self._check_fields()

    def _check_fields(self) -> bool:
        filled = [child for child in self.datasets if len(child)]
        lacks = {
            child.name: missing
            for child in filled
            if (missing := [field for field in self._field_names if field not in child.field_names])
        }
        if lacks and self.output_strict:
            raise DataError(
                "the data sets have different fields",
                found="; ".join(f"{name} lacks {', '.join(fields)}" for name, fields in lacks.items()),
                needed="the same fields in all",
                fix="output_strict=False, which marks structures without a field and leaves them out of its loss",
            )
        return not lacks

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def immediate(self) -> bool:  # type: ignore[override]
        """Whether every child is ready in memory."""
        return all(child.immediate for child in self.datasets)

    @property
    def field_names(self) -> tuple[str, ...]:
        return self._field_names

    @property
    def num_atoms(self) -> NDArray[np.int64]:
        return np.concatenate([child.num_atoms for child in self.datasets])

    def locate(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The child of each index, and the index there: two (n,) int64 arrays."""
        idx = as_indices(indices, len(self), self.name)
        child = np.searchsorted(self._starts, idx, side="right") - 1
        return child, idx - self._starts[child]

    def to_global_index(self, child: int, index: int) -> int:
        """The index, in the whole, of sample ``index`` of data set number ``child``."""
        if not 0 <= child < len(self.datasets) or not 0 <= index < self.lengths[child]:
            raise DataError(f"there is no sample {index} of data set {child}", found=f"data sets of {self.lengths} samples")
        return int(self._starts[child]) + int(index)

    def set_epoch(self, epoch: int) -> None:
        for child in self.datasets:
            child.set_epoch(epoch)

    def read_many(self, indices: Indices, *, epoch: int = 0, stream: int = 0) -> Any:
        """Samples ``indices`` of the whole, in that order, on the CPU; see `BaseDataset.read_many`."""
        first = stream * len(self.datasets)
        return self._gathered(
            indices, lambda child, local: self.datasets[child].read_many(local, epoch=epoch, stream=first + child)
        )

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._gathered(indices, lambda child, local: self.datasets[child].__getitems__(local))

    def _read(self, indices: NDArray[np.int64]) -> Samples:
        return self.read_many(indices)  # type: ignore[no-any-return]

    def _gathered(self, indices: Indices, read: Callable[[int, Any], Samples]) -> Samples:
        child, local = self.locate(indices)
        if not child.size:
            return read(next((d for d, length in enumerate(self.lengths) if length), 0), local)
        order = None
        if np.any(child[1:] < child[:-1]):
            ranked = np.argsort(child, kind="stable")
            order = np.empty(len(ranked), np.int64)
            order[ranked] = np.arange(len(ranked))
            child, local = child[ranked], local[ranked]
        which, starts = np.unique(child, return_index=True)
        parts = [read(int(d), piece) for d, piece in zip(which, np.split(local, starts[1:]), strict=True)]
        samples = mixed(parts, which.tolist(), order, self.names)
        if self._alike or not isinstance(samples, Batch):
            return samples
        return with_fields(samples, self._all_fields())

    def _all_fields(self) -> dict[str, tuple[Level, torch.Tensor]]:
        """Level, dtype and row of every field of any child: a batch from one child alone has the fields of the others too."""
        if self._templates is None:
            found: dict[str, tuple[Level, torch.Tensor]] = {}
            for child in self.datasets:
                if len(child):
                    one = child.read_many([0])
                    levels = one.levels
                    found |= {
                        name: (levels[name], tensor[:1].clone())
                        for name, tensor in one.fields.items()
                        if levels[name] is not Level.EDGE and name not in found
                    }
            self._templates = found
        return self._templates
