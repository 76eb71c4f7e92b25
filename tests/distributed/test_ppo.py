"""PPO does not depend on where its roles lie: the same metrics as one process, whatever the layouts and placements."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.distributed.ppo_worker import NUM_ITERATIONS, PLACEMENTS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints, make_prompts

pytestmark = pytest.mark.distributed

METRICS = (
    "reward/score_mean",
    "reward/score_std",
    "rollout/response_length_mean",
    "kl/reference_mean",
    "kl/sequence_mean",
    "critic/explained_variance",
    "critic/loss",
    "critic/grad_norm",
    "actor/loss",
    "actor/entropy",
    "actor/clip_fraction",
    "actor/approx_kl",
    "actor/grad_norm",
)
DEFAULT = ("single", "interleaved", "rollout apart")  # of the default set
thorough = pytest.mark.thorough


def each_placement(names: Iterable[str]) -> pytest.MarkDecorator:
    params = [pytest.param(name, marks=() if name in DEFAULT else thorough) for name in names]
    return pytest.mark.parametrize("placement", params)


PLACED = [name for name in PLACEMENTS if name != "single" and not name.startswith("bfloat16")]


@pytest.fixture(scope="module")
def results(selected, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    root, found = tmp_path_factory.mktemp("ppo"), {}
    models = make_checkpoints(root / "models", family="llama", tied=False, num_layers=4, head_dim=32)
    prompts = make_prompts(root / "prompts.jsonl", 64)
    make_prompts(root / "heldout.jsonl", 3, seed=1)
    names = {"single", *selected("placement")}  # the others are compared with it
    for num_ranks in sorted({PLACEMENTS[name][0] for name in names}):
        out = root / f"{num_ranks}.json"
        run_ranks(num_ranks, "tests.distributed.ppo_worker", models, prompts, out, *sorted(names))
        found |= json.loads(out.read_text())
    return found


@each_placement(PLACED)
def test_metrics_equal_a_single_process(placement: str, results: dict) -> None:
    for found, expected in zip(results[placement], results["single"], strict=True):
        assert found["tokens_checksum"] == expected["tokens_checksum"]
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


@each_placement(PLACED)
def test_evaluation_equals_a_single_process(placement: str, results: dict) -> None:
    """Of three prompts, where some replicas have no row."""
    expected = results["single"][-1]
    assert results[placement][-1]["eval/accuracy"] == expected["eval/accuracy"]
    assert results[placement][-1]["eval/score_mean"] == pytest.approx(expected["eval/score_mean"], rel=1e-4, abs=1e-4)


@each_placement(PLACED)
def test_the_engine_computes_with_the_trainers_weights(placement: str, results: dict) -> None:
    assert all(iteration["rollout/log_prob_diff_max"] < 1e-4 for iteration in results[placement])


@each_placement(PLACEMENTS)
def test_the_engine_holds_the_trainers_weights_to_the_bit(placement: str, results: dict) -> None:
    """After every step; in bfloat16 that of an optimizer with main weights of its own, gathered."""
    for iteration in results[placement]:
        assert iteration["wrong_parameters"] == []
    if placement == "bfloat16":
        assert all(iteration["reshard/bytes_received"] > 0 for iteration in results[placement])


@thorough
def test_gathered_bfloat16_weights_generate_what_the_export_does(results: dict) -> None:
    """Tokens and log-probs, sampled and greedy, to the bit: the other engine reads the exported files by itself."""
    assert results["bfloat16"][-1]["differs_from_export"] == []


@thorough
@pytest.mark.parametrize("how", ["offloaded", "staged"])
def test_offloading_beside_a_gathering_hand_off_changes_nothing(how: str, results: dict) -> None:
    for found, expected in zip(results[f"bfloat16, {how}"], results["bfloat16"], strict=True):
        assert [found[name] for name in METRICS] == [expected[name] for name in METRICS]


@thorough
def test_parameters_gathered_while_others_compute_change_nothing(results: dict) -> None:
    """The hand-off waits for what the last step has started."""
    overlapped, expected = results["bfloat16, overlapped"], results["bfloat16"]
    for found, same in zip(overlapped, expected, strict=True):
        assert [found[name] for name in METRICS] == [same[name] for name in METRICS]
    first, *others = overlapped[-1]["gathering"]
    assert first == [False, False] and len(others) >= NUM_ITERATIONS - 1
    assert all(still is False for _, still in others) and sum(before for before, _ in others) == NUM_ITERATIONS
    assert not any(before for before, *_ in expected[-1]["gathering"])


def test_training_moves(results: dict) -> None:
    """Else the comparison would prove little."""
    first, *_, last = results["single"]
    assert len(results["single"]) == NUM_ITERATIONS
    assert abs(last["kl/sequence_mean"] - first["kl/sequence_mean"]) > 0.01
    assert first["actor/grad_norm"] > 0.01 and first["actor/clip_fraction"] > 0


def test_the_placements_move_the_bytes_they_should(results: dict) -> None:
    for placement in {"each its own layout", "split", "rollout apart"} & results.keys():
        assert all(iteration["reshard/bytes_received"] > 0 for iteration in results[placement])
    assert all(iteration["reshard/bytes_received"] == 0 for iteration in results["single"])
