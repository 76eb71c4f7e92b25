"""Engines of families with windows and layers without rotary embedding, each against HuggingFace on long prompts."""

import json
from pathlib import Path

import pytest

from hybridflow.architecture.mixers.attention import CPU_BLOCK
from hybridflow.architecture.spec import read_spec
from hybridflow.placement.kv_cache import cache_blocks
from tests.distributed.engine_worker import CONFIG
from tests.distributed.window_engine_worker import KV_CACHE_BYTES, LAYOUTS, MAX_LENGTH, NUM_LAYERS, NUM_RANKS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints
from tests.window_models import WINDOW_FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

YARN = WINDOW_FAMILIES["ministral3"][1]["rope_parameters"]
CHANGES = {"ministral3": {"rope_parameters": {**YARN, "original_max_position_embeddings": MAX_LENGTH // 16}}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("window_engine")


@pytest.fixture(scope="module")
def ranks(selected, root: Path) -> list[dict]:
    families = sorted(selected("family"))
    for family in families:
        make_checkpoints(
            root / family,
            family=family,
            tied=False,  # embeddings that are scaled would make each token follow itself
            head_dim=32,
            num_layers=NUM_LAYERS,
            max_length=MAX_LENGTH,
            changes=CHANGES.get(family),
        )
    run_ranks(NUM_RANKS, "tests.distributed.window_engine_worker", root, root / "out.json", *families)
    return json.loads((root / "out.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_vllm_hands_out_the_blocks_that_the_plan_counts(
    root: Path, ranks: list[dict], family: str, layout: str
) -> None:
    """By kind of layer."""
    spec, step = read_spec(root / family / "policy"), CONFIG.batched_tokens(MAX_LENGTH, cuda=False)
    sizes = {"itemsize": 4, "least_tokens": CPU_BLOCK, "step_tokens": step}
    blocks = cache_blocks(spec, (tuple(range(NUM_LAYERS)),), tp=LAYOUTS[layout].tp, **sizes)
    assert blocks.windows and blocks.of_sequence(MAX_LENGTH) > MAX_LENGTH // blocks.tokens
    for rank in ranks:
        assert rank[f"{family} {layout}"]["blocks"] == {
            "all": KV_CACHE_BYTES // blocks.size,
            "of_sequence": blocks.of_sequence(MAX_LENGTH),
            "groups": blocks.tables + blocks.windows,
        }


@pytest.mark.parametrize("turn", ["first", "again"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_tokens_and_log_probs_are_huggingfaces(ranks: list[dict], family: str, layout: str, turn: str) -> None:
    for rank in ranks:
        found = rank[f"{family} {layout}"][turn]
        assert all(found["right"])
        assert found["difference"] < 1e-4
