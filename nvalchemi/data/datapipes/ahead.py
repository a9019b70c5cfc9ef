"""Whether batches are the same whenever they are read, so that one can be read before it is wanted."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, default_convert


def draws_nothing(loader: Any) -> bool:
    """Whether making a batch draws on no random stream of this process, as far as can be told: a list, or a loader of torch over stored data.

    A data set of one's own may draw on torch's global stream for each sample, which a batch that is read early would shift against that of
    the training; not so in worker processes, which have streams of their own. One that does not, nor its ``collate_fn``, may say so: it has
    an attribute ``draws_nothing = True``.
    """
    if not isinstance(loader, DataLoader):
        return isinstance(loader, list | tuple)
    if loader.num_workers > 0 or getattr(loader.dataset, "draws_nothing", False):
        return True
    return _stored(loader.dataset) and loader.collate_fn in (default_collate, default_convert)


def _stored(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _stored(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_stored, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple)
