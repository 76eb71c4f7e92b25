"""Latent attention on packed sequences, on one rank, beside that of transformers: outputs, gradients, what it keeps."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.cpu.kernels import attention as kernels
from hybridflow.cpu.kernels.attention import Items
from hybridflow.models import mixer
from hybridflow.models.attention import PackedSequences
from hybridflow.models.latent_attention import LatentAttention
from hybridflow.models.layer_classes import attention_functions
from hybridflow.models.layers import RMSNorm
from hybridflow.models.mixer import LinearClasses
from tests.placement.kept import KeptBytes
from tests.tiny_models import ROPE_DEEPSEEK

pytestmark = pytest.mark.compiles
HEADS, HIDDEN, LENGTHS = 4, 32, (11, 7, 7, 1)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
NAMES = {
    **{"linear_q": "q_proj", "linear_q_b": "q_b_proj", "linear_kv_a": "kv_a_proj_with_mqa", "linear_kv_b": "kv_b_proj"},
    **{"linear_proj": "o_proj", "q_a_layernorm": "q_a_layernorm", "kv_a_layernorm": "kv_a_layernorm"},
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """megatron looks at groups only where there are any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OneRank(nn.Linear):
    """In place of megatron's layers, which give a bias too."""

    def __init__(self, inputs: int, outputs: int, **others: object) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def both(query_rank: int | None, value_dim: int, rope: dict[str, Any]) -> tuple[LatentAttention, DeepseekV3Attention]:
    sizes = LatentSizes(query_rank, 20, 12, 8, value_dim=value_dim)
    names = {"q_lora_rank": query_rank, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        v_head_dim=value_dim,
        rope_parameters=dict(rope),
        max_position_embeddings=128,
        attn_implementation="eager",
        **names,
    )
    torch.manual_seed(0)
    theirs = DeepseekV3Attention(config, 0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    ours = LatentAttention(
        TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS),
        1,
        sizes=sizes,
        scale=theirs.scaling,
        linear=LinearClasses(OneRank, OneRank),
        norm=RMSNorm,
        functions=attention_functions(torch.float32, interleaved=True),
        pg_collection=SimpleNamespace(tp=dist.group.WORLD),
    )
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(of_theirs(name, lambda path: theirs.get_parameter(path)))
    return ours, theirs


def of_theirs(name: str, get: Any) -> Tensor:
    module = name.removesuffix(".weight")
    if module == "linear_qkv_a":
        return torch.cat([get("q_a_proj.weight"), get("kv_a_proj_with_mqa.weight")])
    return get(f"{NAMES[module]}.weight")


@pytest.mark.parametrize("rope", [PLAIN, ROPE_DEEPSEEK], ids=["plain", "yarn"])
@pytest.mark.parametrize(("query_rank", "value_dim"), [(16, 9), (None, 9), (16, 20)])
def test_outputs_and_gradients_are_transformers(query_rank: int | None, value_dim: int, rope: dict[str, Any]) -> None:
    ours, theirs = both(query_rank, value_dim, rope)
    turning = DeepseekV3RotaryEmbedding(theirs.config)
    hidden, upstream = torch.randn(sum(LENGTHS), HIDDEN), torch.randn(sum(LENGTHS), HIDDEN)
    mine, other = (hidden.clone().requires_grad_() for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = PackedSequences.from_lengths(LENGTHS, torch.device("cpu")).with_rotary(
        positions[:, None] * turning.inv_freq, torch.float32, factor=turning.attention_scaling
    )
    out = ours(mine[:, None], packed_seq_params=packed)[0][:, 0]
    rows = []
    for part in other.split(LENGTHS):
        mask = torch.full((len(part), len(part)), -torch.inf).triu(1)[None, None]
        rows.append(theirs(part[None], turning(part, torch.arange(len(part))[None]), mask)[0][0])
    expected = torch.cat(rows)
    assert_close(out, expected)
    out.backward(upstream)
    expected.backward(upstream)
    assert_close(mine.grad, other.grad)
    for name, weight in ours.named_parameters():
        assert_close(weight.grad, of_theirs(name, lambda path: theirs.get_parameter(path).grad))


def assert_close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def without_states(function: Any, distribute: bool, *inputs: Tensor) -> Tensor:
    """megatron's, but for the states of random generators, which are CUDA's."""
    return checkpoint(function, *inputs, use_reentrant=True)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("query_rank", "value_dim"), [(16, 9), (None, 9)])
def test_what_it_keeps_is_what_the_plan_says(query_rank: int | None, value_dim: int, again: bool) -> None:
    ours, _ = both(query_rank, value_dim, PLAIN)
    ours._again = again
    hidden = torch.randn(sum(LENGTHS), 1, HIDDEN, requires_grad=True)
    angles = torch.rand(sum(LENGTHS), 4)
    packed = PackedSequences.from_lengths(LENGTHS, torch.device("cpu")).with_rotary(angles, torch.float32)
    assert packed.cos is not None and packed.sin is not None
    weights = [*ours.parameters(), hidden, packed.cos, packed.sin]
    with KeptBytes(weights) as kept, mock.patch.object(mixer, "checkpoint", without_states):
        out = ours(hidden, packed_seq_params=packed)[0]
    spec = SimpleNamespace(latent=ours._sizes, num_heads=HEADS, family="deepseek_v3")
    planned = sum(MIXERS["latent"].activation_bytes(spec, again=again, itemsize=4, over_ranks=False))
    of_norms = 4 * (1 if query_rank is None else 2)  # 1 / rms of each
    assert out.shape == hidden.shape and kept.peak == (planned + of_norms) * sum(LENGTHS)


def test_the_kernel_in_c_refuses_values_of_another_size() -> None:
    """It would read past them."""
    items = Items.from_stretches([(0, 3)])
    query, value = torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    with pytest.raises(AssertionError, match="heads of the sizes"):
        kernels.attend(query, query, value, items, scale=1.0)
