"""A loader for one rank of several, made of a loader that knows of none."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils.data

from nvalchemi.data.datapipes.block_shuffle import BlockShuffleSampler
from nvalchemi.data.datapipes.budget import AtomBudgetBatchSampler
from nvalchemi.data.datapipes.loader import DataLoader
from nvalchemi.data.datapipes.multi_samplers import MultiDatasetBatchSampler, MultiDatasetSampler, OrderedMixture, ShuffledMixture
from nvalchemi.data.datapipes.multidataset import MultiDataset
from nvalchemi.data.datapipes.samplers import (
    BatchSampler,
    DistributedSampler,
    DistributedSamplerProtocol,
    RandomSampler,
    SequentialSampler,
)
from nvalchemi.errors import ConfigError

logger = logging.getLogger("nvalchemi")

#: Samplers that loaders make by themselves, and what they say about the order. A loader with any other was given one on purpose.
_PLAIN: dict[type, bool] = {
    SequentialSampler: False,
    RandomSampler: True,
    torch.utils.data.SequentialSampler: False,
    torch.utils.data.RandomSampler: True,
}
_PLAIN_BATCHES = (BatchSampler, torch.utils.data.BatchSampler)


def is_plain(sampler: Any) -> bool:
    """Whether a loader may have made this sampler by itself: one that gives every sample once an epoch."""
    if type(sampler) is torch.utils.data.RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in _PLAIN


def shard_loader(
    loader: Any,
    rank: int,
    num_replicas: int,
    sampler_cls: Callable[..., Any] | None = None,
    sampler_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """The loader of one rank.

    The first of these that applies:

    1. A loader that is distributed-aware already (`DistributedSamplerProtocol`) stays as it is. `AtomBudgetBatchSampler`, `BlockShuffleSampler` and
       the samplers of a `MultiDataset`, where they were not told their ranks, are told them and keep their settings.
    2. ``sampler_cls`` is given: the sampler that it makes.
    3. The data set is a `MultiDataset`: a `MultiDatasetBatchSampler`. Of a loader that is not shuffled, and without ``sampler_kwargs``, it gives
       the samples in their order, as one process does.
    4. Otherwise a `DistributedSampler`, in batches.

    Parameters
    ----------
    loader
        `DataLoader` of this package or ``torch.utils.data.DataLoader``.
    rank, num_replicas
        Which rank, of how many. With one replica the loader changes only if ``sampler_cls`` or ``sampler_kwargs`` asks for it.
    sampler_cls
        A class or function that makes a sampler of indices or of batches from the data set. It is given those of ``num_replicas``,
        ``rank``, ``shuffle``, ``seed``, ``drop_last`` and ``batch_size`` that its signature names; one that takes any (``**kwargs``) is
        given all but ``batch_size``.
    sampler_kwargs
        Further arguments of the sampler, which go before the defaults.

    Returns
    -------
    DataLoader
        Of the same kind, over the same data set.

    Raises
    ------
    ConfigError
        A loader that cannot be divided: an iterable without a data set that is read by index, one with a sampler of its own that does not
        know of ranks, a batch sampler of one's own, or one that says it is for one rank only where there are several.

    Notes
    -----
    Every rank must call this with the same arguments but ``rank``.
    """
    kwargs = dict(sampler_kwargs or {})
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ConfigError(
            "a rank is one of its replicas", found=f"rank={rank}, num_replicas={num_replicas}", needed="0 <= rank < num_replicas"
        )
    _check_kind(loader)
    aware = _aware_sampler(loader)
    if aware is not None:
        return _as_it_is(loader, aware, rank, num_replicas)
    if num_replicas < 2 and sampler_cls is None and not kwargs:
        return loader
    defaults = {"num_replicas": num_replicas, "rank": rank, **_order_of(loader, replaced=sampler_cls is not None)}
    if sampler_cls is not None:
        made = _make(sampler_cls, loader, defaults, kwargs)
    elif isinstance(loader.dataset, MultiDataset):
        mixes = defaults["shuffle"] or kwargs
        made = _make(MultiDatasetBatchSampler if mixes else OrderedMixture, loader, defaults, kwargs)
    else:
        made = _make(DistributedSampler, loader, defaults, kwargs)
    batches = made if _gives_batches(made) else BatchSampler(made, defaults["batch_size"] or 1, defaults["drop_last"])
    return rebuilt(loader, batches)


def _check_kind(loader: Any) -> None:
    if isinstance(loader, DataLoader):
        return
    if not isinstance(loader, torch.utils.data.DataLoader):
        raise ConfigError(
            f"{type(loader).__name__} cannot be divided between ranks, and every rank would train on all of it",
            found="an iterable without a data set and a sampler",
            needed="nvalchemi.data.datapipes.DataLoader or torch.utils.data.DataLoader",
            fix="put the samples into InMemoryDataset(...), or give a loader whose sampler knows num_replicas and rank",
        )
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            "a loader over an IterableDataset cannot be divided between ranks, and every rank would train on all of it",
            found=type(loader.dataset).__name__,
            needed="a data set that is read by index",
            fix="use a data set with __getitem__ and __len__",
        )
    if loader.batch_sampler is None and loader.batch_size is None:
        raise ConfigError(
            "a loader without batches (batch_size=None) cannot be divided between ranks",
            fix="give it batch_size or batch_sampler",
        )


def _aware_sampler(loader: Any) -> Any:
    """The sampler or batch sampler that knows of ranks, or None."""
    if isinstance(loader.batch_sampler, ShuffledMixture):
        return None  # nobody gave it to the loader
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.batch_sampler, loader.sampler, inner):
        if isinstance(sampler, DistributedSamplerProtocol):
            return sampler
    return None


def _as_it_is(loader: Any, sampler: Any, rank: int, num_replicas: int) -> Any:
    if num_replicas == sampler.num_replicas:
        return _told(loader, sampler, rank, num_replicas)
    if isinstance(sampler, MultiDatasetBatchSampler | AtomBudgetBatchSampler) and sampler.undivided:
        return rebuilt(loader, sampler.divided(num_replicas, rank))
    if isinstance(sampler, MultiDatasetSampler | BlockShuffleSampler) and sampler.undivided:
        order = _order_of(loader, replaced=True)
        return rebuilt(loader, BatchSampler(sampler.divided(num_replicas, rank), order["batch_size"], order["drop_last"]))
    if sampler.num_replicas == 1:
        raise ConfigError(
            f"the loader's {type(sampler).__name__} gives all samples to one rank, and every rank would train on all of them",
            found="num_replicas=1",
            needed=f"num_replicas={num_replicas}",
            fix="make it with num_replicas=manager.world_size and rank=manager.rank, or give the loader shuffle=True and no sampler",
        )
    return _told(loader, sampler, rank, num_replicas)


def _told(loader: Any, sampler: Any, rank: int, num_replicas: int) -> Any:
    """The loader; the log tells where its sampler is that of another rank, which may be meant, as on meshes of ranks that share batches."""
    if (sampler.rank, sampler.num_replicas) != (rank, num_replicas):
        logger.warning(
            "the loader's %s is that of rank %s of %s, and this is rank %d of %d: some samples may be trained on by several ranks, or by none",
            type(sampler).__name__, sampler.rank, sampler.num_replicas, rank, num_replicas,
        )  # fmt: skip
    return loader


def _order_of(loader: Any, replaced: bool) -> dict[str, Any]:
    """What the loader says about its order; ConfigError where it has one of its own that would be lost."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", loader.sampler)  # torch's loader shows another one where it was given batches
    kind = type(sampler)
    own_batches = type(batches) not in _PLAIN_BATCHES
    if not replaced and not isinstance(batches, ShuffledMixture) and (own_batches or not is_plain(sampler)):
        raise ConfigError(
            f"the loader's {type(batches if own_batches else sampler).__name__} knows of no ranks, and dividing the loader would lose it",
            needed="a sampler with num_replicas, rank and set_epoch",
            fix="give it these, or leave it out of the loader and name it in sampler_cls=",
        )
    seed = getattr(sampler, "seed", None)
    if seed is None:
        generator = getattr(sampler, "generator", None) or getattr(loader, "generator", None)
        seed = getattr(loader, "seed", 0) if generator is None else generator.initial_seed()
    return {
        "shuffle": bool(getattr(sampler, "shuffle", _PLAIN.get(kind, True))),
        "seed": seed,
        "drop_last": bool(getattr(batches, "drop_last", False)),
        "batch_size": getattr(batches, "batch_size", None),
    }


def gives_all(loader: Any) -> bool:
    """Whether a loader, by samplers that it made itself, gives every sample once."""
    return type(loader.batch_sampler) in _PLAIN_BATCHES and is_plain(loader.batch_sampler.sampler) and not loader.drop_last


def _make(sampler_cls: Callable[..., Any], loader: Any, defaults: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    named = inspect.signature(sampler_cls).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
    accepted = {
        name: value
        for name, value in defaults.items()
        if value is not None and (name in named or (open_ended and name != "batch_size"))
    }
    if kwargs.get("generator") is not None:
        accepted.pop("seed", None)
    name = getattr(sampler_cls, "__name__", repr(sampler_cls))
    arguments = {**accepted, **kwargs}
    if not open_ended:
        unknown = sorted(set(arguments) - set(named))
        if unknown:
            raise ConfigError(
                f"{name} does not take {', '.join(unknown)}", needed=f"of {', '.join(named)}", fix="change sampler_kwargs"
            )
    made = sampler_cls(loader.dataset, **arguments)
    if not isinstance(made, Iterable):
        raise ConfigError(f"{name} made no sampler", found=type(made).__name__, needed="an iterable of indices or of batches")
    if isinstance(made, DistributedSamplerProtocol) and made.num_replicas == 1 < defaults["num_replicas"]:
        raise ConfigError(
            f"{name} made a {type(made).__name__} that gives all samples to one rank, and every rank would train on all of them",
            found="num_replicas=1",
            needed=f"num_replicas={defaults['num_replicas']}",
            fix="have it take num_replicas and rank, or name its own words for them in sampler_kwargs",
        )
    return made


def _gives_batches(sampler: Any) -> bool:
    """Whether a sampler gives lists of indices: it has a batch size, or its first item is such a list."""
    if isinstance(sampler, BatchSampler | torch.utils.data.BatchSampler) or hasattr(sampler, "batch_size"):
        return True
    first = next(iter(sampler), None)
    return first is not None and not isinstance(first, int) and hasattr(first, "__len__") and getattr(first, "ndim", 1) > 0


def rebuilt(loader: Any, batches: Any) -> Any:
    """The same loader with other batches."""
    if isinstance(loader, DataLoader):
        return loader.with_batch_sampler(batches)
    workers = (
        {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers} if loader.num_workers else {}
    )
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **workers,
    )
