"""What the loader tells vLLM of weights that are not its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from vllm.compilation.caching import aot_compile_hash_factors
from vllm.config import VllmConfig

from hybridflow.rollout.adapters import EngineAdapters
from hybridflow.rollout.loader import tell_compile_cache


def model(weight: Tensor, name: str = "o_proj") -> nn.Module:
    found = nn.Module()
    found.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    return found


def hashed(weight: Tensor, name: str = "o_proj", scale: float | None = None) -> str:
    config, adapters = VllmConfig(), None if scale is None else EngineAdapters(4, scale, {name: (1,)})
    tell_compile_cache(config, model(weight, name), adapters)
    return config.compute_hash()


def test_the_same_layout_has_the_same_key_whatever_its_content_and_address() -> None:
    assert hashed(torch.zeros(4, 6)) == hashed(torch.ones(4, 6, device="meta"))


@pytest.mark.parametrize(
    "other",
    [
        lambda: hashed(torch.zeros(4, 12)[:, :6]),  # the columns of a rank, a view of a wider weight
        lambda: hashed(torch.zeros(4, 12)[:, 6:].contiguous().t().contiguous().t()),
        lambda: hashed(torch.zeros(6, 4)),
        lambda: hashed(torch.zeros(4, 6), name="down_proj"),
        lambda: VllmConfig().compute_hash(),  # vLLM's own loader
        lambda: hashed(torch.zeros(4, 6), scale=2.0),  # a constant of compiled code
    ],
    ids=["strided", "transposed", "other shape", "other name", "untold", "with adapters"],
)
def test_another_layout_has_another_key(other: Callable[[], str]) -> None:
    assert hashed(torch.zeros(4, 6)) != other()


def test_compiled_code_on_disk_is_found_by_that_hash() -> None:
    config = VllmConfig()
    before = aot_compile_hash_factors(config)
    tell_compile_cache(config, model(torch.zeros(4, 6)))
    after = aot_compile_hash_factors(config)
    assert [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new] == [1]
    assert after[1] == config.compute_hash()
