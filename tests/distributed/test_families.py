"""PPO with every family, started from a HuggingFace directory and from what `tools.convert` makes of it."""

import json
import math
from typing import Any

import pytest

from hybridflow.convert.to_megatron import to_megatron
from tests.distributed.cases import CHANGES, FAMILIES, NUM_LAYERS, make_family
from tests.distributed.families_worker import CONVERTED, KINDS, LOGIT_LAYOUTS, NEW_FAMILIES
from tests.distributed.test_ppo import METRICS
from tests.launch import run_ranks
from tests.tiny_models import make_prompts

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        window = {"sliding_window": 64} if name in ("mistral", "mixtral") else {}  # beyond the length that is used
        changes = CHANGES.get(name, window)
        make_family(root, name, head_dim=32, std=0.1, changes=changes)  # logits of a few units
        for model in ("policy", "reference", "reward", "critic") if name in CONVERTED else ("policy",):
            to_megatron(root / name / model, root / f"{name}-converted" / model)
    prompts, out = make_prompts(root / "prompts.jsonl", 32), root / "results.json"
    make_prompts(root / "heldout.jsonl", 3, seed=1)
    run_ranks(2, "tests.distributed.families_worker", root, prompts, out)
    return json.loads(out.read_text())


def tolerance_of(family: str) -> float:
    """A delta net's norm stands behind sums that nearly cancel, see `test_parity.TOLERANCES`."""
    return 3e-4 if family.startswith("qwen3_5") else 1e-4


@pytest.mark.parametrize("layout", LOGIT_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_converted_checkpoint_equal_huggingface(family: str, layout: str, results: dict) -> None:
    assert results["logits"][family][layout] <= tolerance_of(family)


@pytest.mark.parametrize("family", NEW_FAMILIES)
def test_the_engine_computes_with_the_trainers_weights(family: str, results: dict) -> None:
    for kind in KINDS[family]:
        for metrics in results[f"{family}/{kind}"]:
            assert metrics["rollout/log_prob_diff_max"] < tolerance_of(family)
            assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
            assert all(math.isfinite(metrics[name]) for name in METRICS)


@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_checkpoint_trains_alike(family: str, results: dict) -> None:
    """Handed to an engine of another layout, too: the same tokens, the same metrics but for rounding in the engine."""
    for found, expected in zip(results[f"{family}/converted"], results[f"{family}/huggingface"], strict=True):
        assert found["tokens_checksum"] == expected["tokens_checksum"]
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


OWN_BYTES = {"olmo3": NUM_LAYERS * (8 + 4) * 32 * 4}  # queries' and keys' norms: heads of 32 numbers of 4 bytes


@pytest.mark.parametrize("family", [family for family in NEW_FAMILIES if family != "glm"])
def test_no_second_copy_where_layouts_match(family: str, results: dict) -> None:
    """vLLM cuts GLM-4's gate_up_proj as it stands: each of two ranks needs what the other holds.

    Each of vLLM's ranks holds the norms over all heads of OLMo 3 whole, of which a rank of the trainer has half.
    """
    for metrics in results[f"{family}/huggingface"]:
        assert metrics["memory/engine_own_weight_bytes"] == OWN_BYTES.get(family, 0)
        assert metrics["reshard/bytes_received"] == OWN_BYTES.get(family, 0) / 2
