"""The weights of a checkpoint, of whatever number of ranks, as one file from which the model is rebuilt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

from torch import Tensor

from nvalchemi import __version__
from nvalchemi.data.address import where, whole_file
from nvalchemi.data.tensor_file import Entry, write_tensors
from nvalchemi.errors import CheckpointError
from nvalchemi.models.exported import CONFIG, DTYPE
from nvalchemi.training.alive import alive, size_text
from nvalchemi.training.layout import SavedCheckpoint
from nvalchemi.training.reading import read_shared
from nvalchemi.training.shards import SavedTensor, placed


def weights_of(shared: Mapping[str, Any], *, raw: bool = False, model: str = "model") -> tuple[dict[str, Any], str]:
    """A model's whole state dict in the shared state of a checkpoint, and whether it is of ``"ema"`` or ``"raw"`` weights.

    Parameters
    ----------
    shared
        As :func:`nvalchemi.training.reading.read_shared` gives it: nothing is read from the disk here.
    raw
        Take the weights as they were trained, although averaged ones are there.
    model
        Name of the model.

    Raises
    ------
    CheckpointError
        For a model that the checkpoint does not have.
    """
    trained: Mapping[str, Mapping[str, Any]] = shared["models"]
    if model not in trained:
        raise CheckpointError("the checkpoint has no such model", found=", ".join(trained), needed=model)
    averaged = shared["hooks"].get("ema", {}).get("models", {}).get(model)
    if raw or averaged is None:
        return dict(trained[model]), "raw"
    return {name: averaged[name] for name in trained[model]}, "ema"  # an average that is wider than its weights stays so


def export(
    saved: SavedCheckpoint,
    target: str | PathLike[str],
    config: Mapping[str, Any],
    dtype: str,
    *,
    raw: bool = False,
    model: str = "model",
) -> dict[str, str]:
    """Write the weights of a checkpoint, whole, and how to rebuild the model into one file.

    One tensor at a time is in memory. No process group is needed, whatever wrote the checkpoint.

    Parameters
    ----------
    saved
        The checkpoint.
    target
        The file, or the address of one elsewhere; it appears when it is whole.
    config
        What the model's ``config()`` gives.
    dtype
        In which the model computes: ``"float32"`` or ``"float64"``.
    raw, model
        As of :func:`weights_of`.

    Returns
    -------
    dict
        What the file says of itself.
    """
    state, weights = weights_of(read_shared(saved), raw=raw, model=model)
    facts = {
        "format": "pt",
        CONFIG: json.dumps(config),
        DTYPE: dtype,
        "nvalchemi.version": __version__,
        "weights": weights,
        "step": str(saved.step),
        "checkpoint": saved.path.name,
    }
    other = [name for name, value in state.items() if not isinstance(value, (Tensor, SavedTensor))]
    if other:
        raise CheckpointError("the model has a state that is no tensor", found=", ".join(other), needed="parameters and buffers")
    entries = [Entry(name, value.dtype, tuple(value.shape), partial(placed, value)) for name, value in state.items()]
    size = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
    with alive(f"writing {target}", lambda: size_text(size)), whole_file(where(target)) as path:
        write_tensors(path, entries, facts)
    return facts
