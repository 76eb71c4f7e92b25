"""A digest of a model directory's weights, by a sample of every tensor, so that weights of another training differ.

Names, dtypes and shapes count, and elements at the middle of each tensor; how tensors lie in files does not. One short
read a tensor: seconds for tens of thousands of tensors on a network's disk.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from hybridflow.formats.distributed_directory import DistributedDirectory, is_distributed
from hybridflow.formats.safetensors_files import SafetensorsDirectory

WEIGHTS_OF = "the weights of "  # before the key of a model, in the digests of a run
ELEMENTS = 64  # of a tensor
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its size


def weights_digest(directory: str | Path) -> bytes:
    """16 bytes. Errors: CheckpointError where the directory has no readable weights."""
    digest = hashlib.blake2b(digest_size=16)
    files = DistributedDirectory(directory) if is_distributed(directory) else SafetensorsDirectory(directory)
    read = files.read if isinstance(files, DistributedDirectory) else files.sample
    for name, info in sorted(files.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        digest.update(read(name, *_middle(info.shape)).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def base_digest(digests: Mapping[str, str], role: str) -> str | None:
    """Of the digests of a run that of the weights under a role's adapters, as hex; None where the role has none."""
    return digests.get(f"{WEIGHTS_OF}{role}.model")


def _middle(shape: tuple[int, ...]) -> Box:
    offset = tuple(size // 2 for size in shape)
    return offset, tuple(1 for _ in shape[:-1]) + tuple(min(n - n // 2, ELEMENTS) for n in shape[-1:])
