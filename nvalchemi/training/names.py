"""The names of parameters and buffers as the plain model has them, whatever wraps it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain_name(model: nn.Module, key: str) -> str:
    """``key`` without the parts that wrappers add: ``torch.compile`` (``_orig_mod``) and data parallelism (``module``).

    Parameters
    ----------
    model
        The module to whose state dict ``key`` belongs; somewhere inside it something may be wrapped.
    key
        Such as ``"net.module.0.weight"``.

    Returns
    -------
    str
        Such as ``"net.0.weight"``.
    """
    if "module" not in key and "_orig_mod" not in key:
        return key
    parts: list[str] = []
    module: nn.Module | None = model
    for part in key.split("."):
        # A layer of the user's own may well be named "module": only the wrapper's is dropped.
        added = part == "_orig_mod" or (part == "module" and isinstance(module, DistributedDataParallel))
        if not added:
            parts.append(part)
        module = module._modules.get(part) if module is not None else None
    return ".".join(parts)
