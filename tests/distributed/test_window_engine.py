"""Engines of families with windows and layers without rotary embedding, each against HuggingFace on long prompts."""

import json

import pytest

from tests.distributed.window_engine_worker import LAYOUTS, MAX_LENGTH, NUM_LAYERS, NUM_RANKS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints
from tests.window_models import WINDOW_FAMILIES

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

YARN = WINDOW_FAMILIES["ministral3"][1]["rope_parameters"]
CHANGES = {"ministral3": {"rope_parameters": {**YARN, "original_max_position_embeddings": MAX_LENGTH // 16}}}


@pytest.fixture(scope="module")
def ranks(selected, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    root = tmp_path_factory.mktemp("window_engine")
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


@pytest.mark.parametrize("turn", ["first", "again"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", WINDOW_FAMILIES)
def test_tokens_and_log_probs_are_huggingfaces(ranks: list[dict], family: str, layout: str, turn: str) -> None:
    for rank in ranks:
        found = rank[f"{family} {layout}"][turn]
        assert all(found["right"])
        assert found["difference"] < 1e-4
