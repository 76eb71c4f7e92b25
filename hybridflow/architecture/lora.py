"""Low-rank adapters of linear layers: y = W x + scale B A x, where W stays as it is (Hu et al. 2021, arXiv 2106.09685).

A (rank, inputs) begins as PEFT draws it, B (outputs, rank) with zeros: a new adapter changes nothing.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    targets: names of linear layers as HuggingFace has them, or their ends; None: all. excluded: names that are none.
    path: a directory of PEFT that the adapters begin with; None: they are new, and drawn from the seed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    excluded: tuple[str, ...] = ()
    use_rslora: bool = False
    path: Path | None = None
    seed: int = 0

    @property
    def scale(self) -> float:
        """alpha / rank; with rank-stabilized LoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def adapts(self, module: str) -> bool:
        """Whether the linear layer with this name, "model.layers.0.self_attn.q_proj", has an adapter."""
        wanted = self.targets is None or any(names(key, module) for key in self.targets)
        return wanted and not any(names(key, module) for key in self.excluded)


def names(key: str, module: str) -> bool:
    """Whether a key of target_modules names a module: by the whole name or the end of it, as in PEFT."""
    return module == key or module.endswith(f".{key}")


def initial_a(module: str, rank: int, inputs: int, seed: int) -> Tensor:
    """(rank, inputs) float32, uniform within 1 / sqrt(inputs): what PEFT draws. A function of the arguments alone."""
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
