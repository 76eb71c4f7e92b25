"""The engine's gated delta nets on a CPU: a prompt at once, in parts, and token by token give the trainer's outputs."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hybridflow.cpu.engine.delta_net import core
from hybridflow.models.delta_rule import NO_PARENT, Sequences, causal_convolution, delta_rule
from tests.launch import ROOT

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH, SLOTS = 2, 4, 8, 6, 4, 5
KEYS, VALUES = KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES
LENGTHS = (70, 9, 1)


class Layer:
    """What the function asks of vLLM's."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.prefix, self.head_k_dim, self.head_v_dim = "layer", KEY_DIM, VALUE_DIM
        self.conv1d = SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=generator).to(dtype))
        self.A_log, self.dt_bias = torch.randn(HEADS, generator=generator) - 2, torch.zeros(HEADS, dtype=dtype)
        self.kv_cache = (
            torch.randn(SLOTS, WIDTH - 1, CHANNELS).to(dtype),  # what earlier requests have left
            torch.randn(SLOTS, HEADS, VALUE_DIM, KEY_DIM),
        )

    def rearrange_mixed_qkv(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.split([KEYS, KEYS, VALUES], dim=-1)
        return tuple(x.unflatten(-1, (-1, d))[None] for x, d in ((q, KEY_DIM), (k, KEY_DIM), (v, VALUE_DIM)))


def step(
    layer: Layer, slots: list[int], parts: list[tuple[Tensor, Tensor, Tensor]], begins: list[bool]
) -> list[Tensor]:
    """Outputs of a step in which each request has some tokens; decodes come first, as in vLLM."""
    lengths = [len(part[0]) for part in parts]
    decodes = sum(length == 1 and not begin for length, begin in zip(lengths, begins, strict=True))
    about = SimpleNamespace(
        num_decodes=decodes,
        num_prefills=len(parts) - decodes,
        num_spec_decodes=0,
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        non_spec_state_indices_tensor=torch.tensor(slots),
        has_initial_state=None if decodes == len(parts) else torch.tensor([not begin for begin in begins]),
    )
    context: Any = SimpleNamespace(no_compile_layers={"layer": layer}, attn_metadata={"layer": about})
    mixed, b, a = (torch.cat(x) for x in zip(*parts, strict=True))
    out = mixed.new_zeros(len(mixed) + 2, HEADS, VALUE_DIM)  # a step may be filled up
    with (
        mock.patch("vllm.forward_context.get_forward_context", lambda: context),
        mock.patch("vllm.utils.torch_utils._resolve_layer_name", lambda name: name),
    ):
        core(mixed, b, a, out, "layer")
    assert not out[len(mixed) :].any()
    return list(out[: len(mixed)].split(lengths))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_in_parts_and_token_by_token_as_the_trainer(dtype: torch.dtype, close: float) -> None:
    layer, generator = Layer(dtype), torch.Generator().manual_seed(1)
    whole = [tuple(torch.randn(n, d, generator=generator).to(dtype) for d in (CHANNELS, HEADS, HEADS)) for n in LENGTHS]
    sequences = Sequences(LENGTHS, (NO_PARENT,) * len(LENGTHS))
    mixed, b, a = (torch.cat(x) for x in zip(*whole, strict=True))
    heads = causal_convolution(mixed, layer.conv1d.weight.squeeze(1), sequences)
    q, k, v = (x[0] for x in layer.rearrange_mixed_qkv(heads))
    decay = -layer.A_log.exp() * softplus(a.float())
    expected = delta_rule(q, k, v, decay, b.float().sigmoid(), sequences=sequences).split(LENGTHS)

    def part(number: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(x[start:stop] for x in whole[number])

    # the first in three parts, the others meanwhile: a decode beside prompts, and then decodes alone
    found = [step(layer, [3, 1], [part(0, 0, 40), part(1, 0, 8)], [True, True])]
    found.append(step(layer, [1, 3, 4], [part(1, 8, 9), part(0, 40, 66), part(2, 0, 1)], [False, False, True]))
    singles = [step(layer, [3], [part(0, i, i + 1)], [False])[0] for i in range(66, 70)]
    first = torch.cat([found[0][0], found[1][1], *singles])
    for ours, theirs in zip((first, torch.cat([found[0][1], found[1][0]]), found[1][2]), expected, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < close * theirs.float().abs().max()


CODE = """
from hybridflow.cpu.engine.delta_net import FUNCTIONS, IMAGES, register_language_models
register_language_models(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"))
import importlib.util, sys
assert not any(name in sys.modules for name in (*IMAGES, FUNCTIONS)) or importlib.util.find_spec("torchvision")
from vllm.model_executor.models import ModelRegistry
assert "Qwen3_5ForCausalLM" in ModelRegistry.get_supported_archs()
from transformers.utils import is_torchvision_available
assert is_torchvision_available() == (importlib.util.find_spec("torchvision") is not None)
"""


@pytest.mark.thorough
def test_nothing_stays_of_the_package_that_is_missing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torchvision" not in done.stderr
