"""What plans say of latent attention, by hand: the engine's cache, products, operations."""

from pathlib import Path

import pytest
import torch

from hybridflow.architecture.flops import forward_flops, layer_products
from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.architecture.mixers.mixer import LayerCache
from hybridflow.architecture.spec import read_spec
from hybridflow.errors import ConfigError
from hybridflow.placement.kv_cache import CacheBlocks, cache_blocks, tokens_of_block
from hybridflow.rollout.runner import check_head_size
from tests.tiny_models import make_checkpoints

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"
MOONLIGHT, DEEPSEEK = read_spec(SHAPES / "moonlight-16b-a3b"), read_spec(SHAPES / "deepseek-v3")


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_a_token_of_the_cache_is_one_vector_on_every_rank(tp: int) -> None:
    assert MIXERS["latent"].cache(MOONLIGHT, tp=tp, itemsize=2) == LayerCache(576 * 2)
    blocks = cache_blocks(MOONLIGHT, ((*range(14),), (*range(14, 27),)), tp=tp, itemsize=2, least_tokens=16)
    assert blocks == CacheBlocks(16, 16 * 14 * 576 * 2)
    assert (tokens_of_block(MOONLIGHT, cuda=False), tokens_of_block(MOONLIGHT, cuda=True)) == (16, 64)


def test_products_of_a_layer_by_hand() -> None:
    kind = DEEPSEEK.layer_kind(0)
    attention = [(k, n) for k, n, _ in layer_products(DEEPSEEK, kind)][:4]
    assert attention == [(7168, 1536 + 576), (1536, 128 * 192), (512, 128 * 256), (128 * 128, 7168)]
    assert [(k, n) for k, n, _ in layer_products(MOONLIGHT, MOONLIGHT.layer_kind(0), tp=4)][:4] == [
        *[(2048, 576), (2048, 4 * 192), (512, 4 * 256), (4 * 128, 2048)]
    ]
    assert MIXERS["latent"].flops(DEEPSEEK, pairs=10, tokens=5) == 2 * 10 * 128 * (192 + 128)


def test_operations_of_a_forward_pass_are_twice_the_weights_and_the_pairs() -> None:
    """Of a token: all of the first layer's matrices; of the others the chosen experts, and the one for every token."""
    hidden, layers = 2048, 27
    attention = hidden * (16 * 192 + 576) + 512 * 16 * 256 + 16 * 128 * hidden
    experts = 3 * hidden * 1408 * (6 + 2) + hidden * 64
    weights = layers * attention + 3 * hidden * 11264 + (layers - 1) * experts + hidden * 163840
    pairs = layers * 2 * 16 * (192 + 128) * 100**2 / 2
    assert forward_flops(MOONLIGHT, torch.tensor([100]), 100, head="lm") == pytest.approx(2 * 100 * weights + pairs)


@pytest.mark.parametrize("cuda", [False, True])
def test_an_engine_takes_the_published_sizes_alone(cuda: bool, tmp_path: Path) -> None:
    check_head_size(MOONLIGHT, "bfloat16", cuda=cuda)
    other = make_checkpoints(tmp_path, family="moonlight", tied=False, changes={"kv_lora_rank": 256}) / "policy"
    with pytest.raises(ConfigError, match="kv_lora_rank 256 and qk_rope_head_dim 64"):
        check_head_size(read_spec(other), "bfloat16", cuda=cuda)


def test_on_gpus_vllm_knows_16_bits_alone() -> None:
    check_head_size(MOONLIGHT, "float32", cuda=False)
    with pytest.raises(ConfigError, match=r"actor.dtype = float32: vLLM's latent attention on GPUs"):
        check_head_size(MOONLIGHT, "float32", cuda=True)
