"""Work that is counted, not timed: torch's operations, and the elements of the memory that they take."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperations(TorchDispatchMode):
    """Of the block: calls of each operation by name, and the elements of all results that lie in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.calls[function.name().split(".")[0]] += 1
        there = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in there:
                self.elements += each.numel()
        return found
