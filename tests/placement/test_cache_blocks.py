"""Blocks of the engine's cache where layers keep other things of a sequence, by hand."""

from pathlib import Path

from hybridflow.architecture.spec import read_spec
from hybridflow.placement.kv_cache import CacheBlocks, cache_blocks

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
WHOLE = {"itemsize": 2, "least_tokens": 16, "step_tokens": 8192}


def test_layers_with_windows_keep_the_last_tokens() -> None:
    """Gemma 3 27B: 10 layers with full attention, 52 with windows of 1024 tokens; 16 key/value heads of 128."""
    gemma = read_spec(SHAPES / "gemma-3-27b")
    blocks = cache_blocks(gemma, (tuple(range(62)),), tp=8, **WHOLE)
    in_group = 16 * (2 * 2 * 128 * 2) * 10  # tokens x (keys and values, two heads) x layers
    assert blocks == CacheBlocks(16, in_group, 1, windows=6, reach=1023 + 2 * 8192)
    assert blocks.of_sequence(131072) == 8192 + 6 * (1088 + 1)
    assert blocks.of_sequence(2048) == 128 + 6 * (128 + 1)  # shorter than the steps


def test_stages_with_other_shares_of_windows_have_one_table() -> None:
    """Every sixth layer has none: of the first 6 layers and of the others as many, of the first 5 none."""
    gemma = read_spec(SHAPES / "gemma-3-4b")
    assert [layer for layer in range(34) if gemma.layer_kind(layer).mixer == "attention"] == [5, 11, 17, 23, 29]
    assert cache_blocks(gemma, (tuple(range(34)),), tp=1, **WHOLE).windows > 0
    blocks = cache_blocks(gemma, (tuple(range(17)), tuple(range(17, 34))), tp=1, **WHOLE)
    assert blocks == CacheBlocks(16, 16 * (2 * 4 * 256 * 2) * 17)


def test_states_lie_in_blocks_of_their_own() -> None:
    """Qwen3.5 9B: 8 layers with attention, 24 with states."""
    qwen = read_spec(SHAPES / "qwen3.5-9b")
    blocks = cache_blocks(qwen, (tuple(range(32)),), tp=1, **WHOLE)
    assert (blocks.tables, blocks.states, blocks.windows) == (1, 3, 0)
    assert blocks.of_sequence(10 * blocks.tokens) == 10 + 3
