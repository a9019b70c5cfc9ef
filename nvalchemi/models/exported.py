"""A model in one file: its weights in the safetensors format, with the plain data from which it is rebuilt. Nothing in it can run code."""

from __future__ import annotations

import json
from os import PathLike

import torch

from nvalchemi.data.address import where
from nvalchemi.data.tensor_file import TensorFile
from nvalchemi.errors import CheckpointError
from nvalchemi.models.build import build_model
from nvalchemi.models.energy import EnergyModel

CONFIG = "nvalchemi.model"
DTYPE = "nvalchemi.dtype"
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def load_model(path: str | PathLike[str]) -> EnergyModel:
    """The model of a file that ``nvalchemi export`` wrote, on the CPU and in evaluation mode.

    Parameters
    ----------
    path
        Of the file, or its address such as ``s3://bucket/model.safetensors``. A model or network of one's own must be registered before: see `nvalchemi.models.register_model`.

    Raises
    ------
    CheckpointError
        For a file of another kind, or whose weights do not fit its model.
    ConfigError
        For a model that is not registered.
    """
    file = TensorFile(where(path))
    try:
        config = json.loads(file.metadata[CONFIG])
        dtype = DTYPES[file.metadata[DTYPE]]
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not say of which model its tensors are",
            found=f"{type(error).__name__}: {error}"[:200],
            needed="a file that nvalchemi export wrote",
        ) from None
    model = build_model(config).to(dtype)
    try:
        model.load_state_dict({name: file.read(name) for name in file.names()})
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {path} do not fit its model", found=str(error)[:300]) from None
    return model.eval()
