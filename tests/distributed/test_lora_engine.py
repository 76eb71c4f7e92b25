"""Whole PPO iterations with adapters: the engine samples with the adapters that the trainer has, wherever it lies."""

import json
from itertools import product

import pytest

from tests.covering import params
from tests.distributed.cases import make_family
from tests.distributed.lora_engine_worker import CASES
from tests.launch import run_ranks
from tests.tiny_models import make_prompts

pytestmark = pytest.mark.distributed

# Whose adapters an engine cuts in a way of its own: wherever it lies. The others once, and both in the weekly set.
KINDS = ("qwen3", "glm", "qwen3_5", "qwen3_moe", "deepseek_v3", "olmo3")
OTHERS = ("opt", "opt_350m", "mixtral", "glm4_moe", "qwen3_5_moe", "gemma3", "phi3", "ministral3", "smollm3")
DEFAULT = [("one rank", "llama"), ("in place", "llama"), ("gathered", "qwen3"), ("apart", "llama")]
REST = [*((case, "llama") for case in CASES), *product(("in place", "gathered"), KINDS), *product(["gathered"], OTHERS)]
cases = params(DEFAULT, [each for each in REST if each not in DEFAULT], product(["in place"], OTHERS))
every_case = pytest.mark.parametrize(("case", "family"), cases)


@pytest.fixture(scope="module")
def results(selected, tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    root = tmp_path_factory.mktemp("lora_engine")
    wanted, found = sorted(selected("case", "family")), {}
    for name in sorted({family for _, family in wanted}):
        make_family(root, name, head_dim=32, std=0.1)
    prompts = make_prompts(root / "prompts.jsonl", 32)
    make_prompts(root / "heldout.jsonl", 3, seed=1)
    for num_ranks in sorted({CASES[case][0] for case, _ in wanted}):
        names = [f"{case}/{family}" for case, family in wanted if CASES[case][0] == num_ranks]
        out = root / f"{num_ranks}.json"
        run_ranks(num_ranks, "tests.distributed.lora_engine_worker", root, prompts, out, *names)
        found |= json.loads(out.read_text())
    return found


@every_case
def test_the_engine_samples_with_the_trainers_adapters(case: str, family: str, results: dict) -> None:
    first, second = results[f"{case}/{family}"]
    assert abs(first["kl/reference_mean"]) < (0.02 if case == "bfloat16" else 1e-6), "new adapters change nothing"
    assert abs(second["kl/reference_mean"]) > 0.02, "the base alone would sample otherwise"
    if case == "bfloat16":
        assert second["rollout/log_prob_diff_mean"] < 0.01
    else:
        assert second["rollout/log_prob_diff_max"] < 1e-4
    assert second["base stays"]


@every_case
def test_the_engine_has_no_copy_where_it_is_cut_as_the_actor(case: str, family: str, results: dict) -> None:
    if family in ("glm", "olmo3"):
        return  # their engines cut the gates, or have norms over all heads whole
    for metrics in results[f"{case}/{family}"] if case in ("one rank", "in place") else ():
        assert metrics["memory/engine_own_weight_bytes"] == metrics["reshard/bytes_received"] == 0


@pytest.mark.parametrize("case", ["apart", pytest.param("apart, bigger", marks=pytest.mark.thorough)])
def test_frozen_weights_travel_once_to_an_engine_apart(case: str, results: dict) -> None:
    """When the engine is built. Adapters of rank 4, which travel each time, are less than a tenth of these models."""
    for metrics in results[f"{case}/llama"]:
        assert 0 < metrics["reshard/bytes_received"] < metrics["memory/engine_own_weight_bytes"] / 10
