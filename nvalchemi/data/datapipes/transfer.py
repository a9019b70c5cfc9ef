"""Batches on their way to the device: pinned memory, and copies on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.pipeline import Samples, map_dense


def pinned(samples: Samples) -> Samples:
    """The samples in page-locked memory, from which copies to an accelerator run asynchronously; as they are where there is none."""
    if isinstance(samples, Batch):
        return samples.pin_memory()
    if not torch.accelerator.is_available():
        return samples
    return map_dense(samples, lambda t: t.pin_memory())


def moved(samples: Samples, device: torch.device, *, non_blocking: bool = False) -> Samples:
    """The samples on ``device``."""
    if isinstance(samples, Batch):
        return samples.to(device, non_blocking=non_blocking)
    return map_dense(samples, lambda t: t.to(device, non_blocking=non_blocking))


def tensors_of(samples: Samples) -> Iterator[Tensor]:
    """Every tensor of the samples, with the hidden ones of a batch."""
    if isinstance(samples, Tensor):
        yield samples
    elif isinstance(samples, dict):
        yield from samples.values()
    else:
        yield from samples.fields.values()
        yield from samples.present.values()
        others = (samples.atom_offsets, samples.edge_offsets, samples.sample_index, samples.dataset_index, samples._batch_idx)
        yield from (tensor for tensor in others if tensor is not None)


class SideStream:
    """Copies to a CUDA device beside the computation: sent in the prefetch thread, received in the consumer's.

    A batch that was sent is not yet there. `receive` makes the consumer's stream (not the consumer) wait for the copy, and tells the
    allocator that the memory, which belongs to the copying stream, is in use on the consumer's: without that it would be handed to the
    next copy as soon as Python lets go of the batch, while kernels still read it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)

    def send(self, samples: Samples) -> tuple[Samples, torch.cuda.Event]:
        """Begin to copy; returns the samples on the device and what to wait for."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            on_device = moved(samples, self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return on_device, event

    def receive(self, sent: tuple[Samples, torch.cuda.Event]) -> Samples:
        """The samples, safe to use on the current stream of this thread."""
        samples, event = sent
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors_of(samples):
            tensor.record_stream(current)
        return samples


class Received(Iterator[Any]):
    """The consumer's end of a side stream."""

    def __init__(self, sent: Any, side: SideStream) -> None:
        self._sent, self._side = sent, side

    def __next__(self) -> Samples:
        return self._side.receive(next(self._sent))

    def close(self) -> None:
        self._sent.close()
