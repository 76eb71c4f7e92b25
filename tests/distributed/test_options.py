"""What the options do in a whole iteration, by values that follow from the metrics themselves."""

import json
import math
import re

import pytest
import torch

from hybridflow.algorithms.rewards import RunningMoments
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

# metrics that measure the machine, and bytes with the engine
MEASURED = re.compile(r"(time|speed|memory)/.*|reshard/seconds|.*_ms|.*tokens_per_sec|bytes_with_engine")


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> dict[str, list[dict]]:
    root = tmp_path_factory.mktemp("options")
    config = write_config(root / "config.yaml", make_inputs(root))
    run_ranks(2, "tests.distributed.options_worker", config, root / "out.json")
    return json.loads((root / "out.json").read_text())


def test_every_metric_is_finite(records):
    for name, iterations in records.items():
        for metrics in iterations:
            bad = [key for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
            assert not bad, f"{name}: {bad}"


def test_the_actor_moves_and_the_critic_fits(records):
    for metrics in records["base"]:
        assert metrics["moved"] and metrics["actor/grad_norm"] > 0 and metrics["critic/loss"] > 0


def test_the_actor_rests_while_the_critic_warms_up(records):
    first, second = records["warmup"]
    assert not first["moved"] and "actor/loss" not in first
    assert "actor/loss" in second
    assert first["actor/lr"] == pytest.approx(1e-3) and second["actor/lr"] == pytest.approx(0.0)  # cosine, 2 iterations


def test_the_adaptive_controller_follows_the_kl(records):
    """coef x (1 + clip(kl / target - 1, -0.2, 0.2) x sequences / horizon), Ziegler et al. 2019, section 2.2."""
    first, second = records["adaptive"]
    error = min(max(first["kl/sequence_mean"] / 0.5 - 1, -0.2), 0.2)
    assert first["kl/coef"] == 0.1
    assert second["kl/coef"] == pytest.approx(0.1 * (1 + error * len(first["scores"]) / 100), rel=1e-6)
    assert second["kl/coef"] != 0.1


def test_loss_terms_and_sgd_train(records):
    for metrics in records["loss_terms"]:
        assert metrics["moved"] and metrics["actor/entropy"] > 0
        assert metrics["reward/score_shaped_mean"] == pytest.approx(metrics["reward/score_mean"], rel=1e-6)


def test_scores_are_summed_penalised_normalised_and_clipped(records):
    moments = RunningMoments()
    for metrics, base in zip(records["scores"], records["base"], strict=True):
        raw = torch.tensor(metrics["raw_scores"])
        parts = metrics["reward/part_model_0_mean"], metrics["reward/part_length_mean"]
        assert float(raw.mean()) == pytest.approx(2 * parts[0] + 0.5 * parts[1], rel=1e-5) and parts[1] > 3
        assert not any(name.startswith("reward/part_") for name in base), "one part is the score"
        if metrics["kl/reference_mean"] == base["kl/reference_mean"]:  # the first batch: the same responses
            # prompts such as "12+3=" are 4 to 7 characters; twice the model's score and half the prompt's length
            lengths = (raw - 2 * torch.tensor(base["raw_scores"])) / 0.5
            assert torch.allclose(lengths, lengths.round(), atol=1e-4) and lengths.min() >= 4
        penalised = raw - 3.0 * torch.tensor(metrics["truncated"]).float()
        moments = moments.updated(penalised)
        expected = moments.normalized(penalised).clamp(-0.8, 0.8)
        assert torch.allclose(torch.tensor(metrics["scores"]), expected, atol=1e-5)
    assert records["scores"][0]["raw_scores"] != records["base"][0]["raw_scores"]


def test_sampling_options(records):
    for metrics in records["sampling"]:
        assert metrics["prompt_indices"] == [0, 0, 1, 1, 2, 2, 3, 3]
        counts = [a - b for a, b in zip(metrics["lengths"], metrics["prompt_lengths"], strict=True)]
        assert min(counts) >= 3 and max(counts) <= 8


def test_bfloat16_under_sequence_parallelism(records):
    for metrics, exact in zip(records["bfloat16"], records["base"], strict=True):
        assert metrics["moved"]
        assert metrics["memory/actor_weight_bytes"] == exact["memory/actor_weight_bytes"] / 2
    assert records["bfloat16"][-1]["wrong_parameters"] == []
    assert records["bfloat16"][-1]["differs_from_export"] == []


@pytest.mark.parametrize(
    ("name", "kept"),
    [(f"{name} offloaded".removeprefix("base "), name) for name in ("base", "bfloat16", "loss_terms", "context")],
)
def test_memory_given_back_while_the_engine_generates_changes_nothing(name, kept, records):
    """Every metric but what is measured, bit for bit: losses, gradient norms, scores."""
    for iteration, expected in zip(records[name], records[kept], strict=True):
        alike = {key for key in expected if not MEASURED.fullmatch(key)}
        assert {"actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "raw_scores"} <= alike
        assert {key: iteration[key] for key in alike} == {key: expected[key] for key in alike}
    assert records[name][0]["actor/grad_norm"] != records[name][1]["actor/grad_norm"]


def test_ranks_that_share_tokens_compute_what_others_do(records):
    for iteration, expected in zip(records["context"], records["base"], strict=True):
        for key, value in expected.items():
            if isinstance(value, float) and not MEASURED.fullmatch(key) and not key.startswith(("memory/", "reshard/")):
                assert iteration[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        assert iteration["lengths"] == expected["lengths"] and max(iteration["lengths"]) > 10


def test_what_is_away_while_the_engine_generates(records):
    """Bytes of each rank's actor and critic: float32 Adam has two moments, bfloat16 main weights besides."""
    for role in records["base"][1]["bytes_with_engine"]:
        assert role["gradients"] == role["weights"] > 0 and role["optimizer"] > 0
    for name in ("offloaded", "bfloat16 offloaded", "loss_terms offloaded", "context offloaded"):
        for role in records[name][1]["bytes_with_engine"]:
            assert role["gradients"] == role["optimizer"] == 0 < role["weights"]
