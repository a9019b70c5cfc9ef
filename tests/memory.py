"""The most bytes of tensors that are alive at once while something runs, as torch's operations make them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class MostAlive(TorchDispatchMode):
    """A context that counts the storages made inside it: ``most`` bytes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known.add(key)
                    self.now += size
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
