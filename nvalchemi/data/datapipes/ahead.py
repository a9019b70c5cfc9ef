"""Whether batches are the same whenever they are read, so that one can be read before it is wanted."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, default_convert

from nvalchemi.data.datapipes.dataset import BaseDataset


def draws_nothing(loader: Any) -> bool:
    """Whether making a batch draws on no random stream of this process, as far as can be told: a list, or a loader of torch over stored data.

    A data set, sampler or ``collate_fn`` of one's own may draw on torch's global stream for each sample, which a batch that is read early
    would shift against that of the training; not so in worker processes, which have streams of their own (samplers are not there). A data
    set may say that nothing of the kind is done: it has an attribute ``draws_nothing = True``.
    """
    if not isinstance(loader, DataLoader):
        return isinstance(loader, list | tuple)
    if getattr(loader.dataset, "draws_nothing", False):
        return True
    if not all(map(_known, (loader.sampler, loader.batch_sampler))):
        return False
    return loader.num_workers > 0 or (_stored(loader.dataset) and loader.collate_fn in (default_collate, default_convert))


def goes_on_in_workers(loader: Any) -> bool:
    """Whether random numbers may be drawn in worker processes that outlive the epoch: torch seeds those once, so no later epoch repeats them."""
    if not (isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers):
        return False
    dataset: Any = loader.dataset
    return not (getattr(dataset, "draws_nothing", False) or _stored(dataset) or isinstance(dataset, BaseDataset))


def _known(sampler: Any) -> bool:
    """Whether it is torch's or ours, which make their order when the epoch begins."""
    return sampler is None or type(sampler).__module__.startswith(("torch.utils.data.", "nvalchemi."))


def _stored(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return _stored(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_stored, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple)
