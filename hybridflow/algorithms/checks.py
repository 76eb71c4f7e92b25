"""Shape checks for the first lines of every public function of `algorithms/`.

Each raises ValueError naming the argument, what it was and the rule it broke.
"""

import torch
from torch import Tensor


def _require(holds: bool, name: str, *, tensor: Tensor, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: it must {rule}")


def require_flat(**tensors: Tensor) -> None:
    """All tensors are one-dimensional and as long as the first one."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        _require(tensor.ndim == 1, name, tensor=tensor, rule="have one dimension")
        _require(
            tensor.shape == first.shape, name, tensor=tensor, rule=f"be as long as {first_name}, {tuple(first.shape)}"
        )


def require_mask(**tensors: Tensor) -> None:
    """All tensors are boolean."""
    for name, tensor in tensors.items():
        _require(tensor.dtype == torch.bool, name, tensor=tensor, rule="be boolean")


def require_nonempty(**tensors: Tensor) -> None:
    """All tensors hold at least one element."""
    for name, tensor in tensors.items():
        _require(tensor.numel() > 0, name, tensor=tensor, rule="hold at least one element")


def require_lengths(lengths: Tensor, num_tokens: int) -> None:
    """lengths is int64 (N,); the lengths sum to the number of tokens of the packed batch."""
    _require(lengths.ndim == 1, "lengths", tensor=lengths, rule="have one dimension")
    _require(lengths.dtype == torch.int64, "lengths", tensor=lengths, rule="be int64")
    total = int(lengths.sum())
    _require(
        total == num_tokens, "lengths", tensor=lengths, rule=f"sum to the number of tokens, {num_tokens}, not {total}"
    )
