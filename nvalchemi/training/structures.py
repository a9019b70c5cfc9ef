"""Where the structures of a batch came from, in words."""

from __future__ import annotations

from typing import Any

from nvalchemi.data import Batch
from nvalchemi.distributed import Manager
from nvalchemi.distributed.collectives import gather


def name_structures(batches: list[Any], limit: int | None = None) -> str:
    """``"train.zarr: 3, 17; b.zarr: 4"``: where the batches' structures came from, as far as the batches know."""
    by_dataset: dict[str, list[int]] = {}
    for batch in batches:
        if not isinstance(batch, Batch) or batch.sample_index is None:
            continue
        samples = batch.sample_index.tolist()
        datasets = [0] * len(samples) if batch.dataset_index is None else batch.dataset_index.tolist()
        for sample, dataset in zip(samples, datasets, strict=True):
            name = batch.dataset_names[dataset] if dataset < len(batch.dataset_names) else f"data set {dataset}"
            by_dataset.setdefault(name, []).append(sample)
    if not by_dataset:
        return "not known (the batch does not say where they come from)"
    left = limit
    texts: list[str] = []
    for name, indices in by_dataset.items():
        shown = indices if left is None else indices[:left]
        left = None if left is None else left - len(shown)
        if shown:
            texts.append(f"{name}: {', '.join(map(str, shown))}")
    hidden = sum(map(len, by_dataset.values())) - (limit or 0)
    return "; ".join(texts) + (f" and {hidden} more" if limit is not None and hidden > 0 else "")


def name_structures_of_ranks(batches: list[Any], manager: Manager, limit: int | None = None) -> str:
    """As `name_structures`, for the batches of all ranks, which must all ask; a rank with none is left out."""
    texts = gather(name_structures(batches, limit) if batches else None, manager)
    if not manager.distributed:
        return texts[0] or ""
    return " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None)
