"""From a store to batches: readers and writers, data sets, samplers and the loader.

Names are brought in when first used, so that importing the training side does not pay for the store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi.data.datapipes.array_zarr import ArrayZarrReader, ArrayZarrWriter
    from nvalchemi.data.datapipes.block_shuffle import BlockPermutation, BlockShuffleSampler
    from nvalchemi.data.datapipes.budget import AtomBudgetBatchSampler
    from nvalchemi.data.datapipes.dataset import BaseDataset, Dataset, collate
    from nvalchemi.data.datapipes.divisible import Divisible
    from nvalchemi.data.datapipes.in_memory import InMemoryDataset
    from nvalchemi.data.datapipes.loader import DataLoader
    from nvalchemi.data.datapipes.multi_samplers import MultiDatasetBatchSampler, MultiDatasetSampler
    from nvalchemi.data.datapipes.multidataset import MultiDataset
    from nvalchemi.data.datapipes.parquet_reader import ArrayParquetReader, AtomicDataParquetReader
    from nvalchemi.data.datapipes.permutation import Permutation
    from nvalchemi.data.datapipes.pre_sharded import PreShardedSampler, deal_stores
    from nvalchemi.data.datapipes.reader import Reader, StoredInBlocks
    from nvalchemi.data.datapipes.samplers import (
        BatchSampler,
        DistributedSampler,
        DistributedSamplerProtocol,
        IndexSampler,
        RandomSampler,
        SequentialSampler,
    )
    from nvalchemi.data.datapipes.sharding import shard_loader
    from nvalchemi.data.datapipes.zarr_reader import AtomicDataZarrReader
    from nvalchemi.data.datapipes.zarr_writer import AtomicDataZarrWriter

_HOME = {
    "ArrayParquetReader": "parquet_reader",
    "ArrayZarrReader": "array_zarr",
    "ArrayZarrWriter": "array_zarr",
    "AtomBudgetBatchSampler": "budget",
    "AtomicDataParquetReader": "parquet_reader",
    "AtomicDataZarrReader": "zarr_reader",
    "AtomicDataZarrWriter": "zarr_writer",
    "BaseDataset": "dataset",
    "BatchSampler": "samplers",
    "BlockPermutation": "block_shuffle",
    "BlockShuffleSampler": "block_shuffle",
    "DataLoader": "loader",
    "Dataset": "dataset",
    "DistributedSampler": "samplers",
    "DistributedSamplerProtocol": "samplers",
    "Divisible": "divisible",
    "InMemoryDataset": "in_memory",
    "IndexSampler": "samplers",
    "MultiDataset": "multidataset",
    "MultiDatasetBatchSampler": "multi_samplers",
    "MultiDatasetSampler": "multi_samplers",
    "Permutation": "permutation",
    "PreShardedSampler": "pre_sharded",
    "RandomSampler": "samplers",
    "Reader": "reader",
    "SequentialSampler": "samplers",
    "StoredInBlocks": "reader",
    "collate": "dataset",
    "deal_stores": "pre_sharded",
    "shard_loader": "sharding",
}

__all__ = [
    "ArrayParquetReader",
    "ArrayZarrReader",
    "ArrayZarrWriter",
    "AtomBudgetBatchSampler",
    "AtomicDataParquetReader",
    "AtomicDataZarrReader",
    "AtomicDataZarrWriter",
    "BaseDataset",
    "BatchSampler",
    "BlockPermutation",
    "BlockShuffleSampler",
    "DataLoader",
    "Dataset",
    "DistributedSampler",
    "DistributedSamplerProtocol",
    "Divisible",
    "InMemoryDataset",
    "IndexSampler",
    "MultiDataset",
    "MultiDatasetBatchSampler",
    "MultiDatasetSampler",
    "Permutation",
    "PreShardedSampler",
    "RandomSampler",
    "Reader",
    "SequentialSampler",
    "StoredInBlocks",
    "collate",
    "deal_stores",
    "shard_loader",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
