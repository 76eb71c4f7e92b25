"""What a batch tells by the names of its fields, by hand."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridflow.batch import PerSequence, PerToken, RolloutBatch, response_mask
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.recording.iteration import batch_metrics, length_metrics


@dataclass(frozen=True)
class Scored(RolloutBatch):
    raw_scores: PerSequence
    log_probs: PerToken


def batch(**changes: Any) -> Scored:
    """Six responses of 1, 2, 3, 1, 1 and 0 tokens to the prompts 0, 0, 1, 1, 2, 2; each prompt is a token."""
    counts = torch.tensor([1, 2, 3, 1, 1, 0])
    mask = torch.cat([torch.arange(n + 1) > 0 for n in counts.tolist()])
    fields = {
        "input_ids": torch.ones(len(mask), dtype=torch.int64),
        "lengths": counts + 1,
        "prompt_lengths": torch.ones(6, dtype=torch.int64),
        "prompt_indices": torch.arange(6) // 2,
        "truncated": torch.tensor([False, False, True, False, False, False]),
        "response_mask": mask,
        "rollout_log_probs": -1.0 * mask,
        "raw_scores": torch.tensor([0.5, 0.5, 0.0, 1.0, 2.0, 2.0]),
        "log_probs": -1.5 * mask,
    }
    return Scored(**fields | changes)


def test_lengths_scores_and_groups_by_hand() -> None:
    found = {name: float(x) for name, x in batch_metrics(batch()).items()}
    assert found["rollout/response_length_mean"] == pytest.approx(8 / 6)
    assert found["rollout/response_length_max"] == 3
    assert found["rollout/truncated_fraction"] == pytest.approx(1 / 6)
    assert found["reward/score_mean"] == 1
    assert found["reward/equal_groups_fraction"] == pytest.approx(2 / 3)
    assert found["rollout/log_prob_diff_mean"] == found["rollout/log_prob_diff_max"] == 0.5


def test_percentiles_of_response_lengths_are_lengths_that_there_are() -> None:
    """Of 0, 1, 1, 1, 2, 3, by hand: the first, the third, and the sixth."""
    found = {name: float(x) for name, x in batch_metrics(batch()).items()}
    assert [found[f"rollout/response_length_p{share}"] for share in (10, 50, 90, 99)] == [0, 1, 3, 3]


def test_where_each_prompt_has_one_response_there_are_no_groups() -> None:
    assert "reward/equal_groups_fraction" not in batch_metrics(batch(prompt_indices=torch.arange(6)))


def test_the_engines_log_probs_are_not_compared_with_themselves() -> None:
    """Where they are the old ones; the trainer's are not known then."""
    engine = batch().rollout_log_probs
    found = batch_metrics(batch(rollout_log_probs=engine, log_probs=engine))
    assert not any(name.startswith("rollout/log_prob") or name.endswith(("error", "kl")) for name in found)


def test_metrics_by_bucket_of_prompt_lengths_by_hand() -> None:
    """Prompts of 1 token, of 3 and of 5, in buckets up to 1, up to 2, up to 3, and longer."""
    lengths, prompts = torch.tensor([2, 3, 6, 4, 6, 5]), torch.tensor([1, 1, 3, 3, 5, 5])
    given = batch(
        prompt_lengths=prompts,
        lengths=lengths,
        **{name: torch.zeros(26) for name in ("rollout_log_probs", "log_probs")},
        input_ids=torch.ones(26, dtype=torch.int64),
        response_mask=response_mask(lengths, prompts),
    )
    found = {name: float(x) for name, x in length_metrics(given, LengthBuckets((1, 2, 3), (0, 1, 2, 3))).items()}
    assert found == {
        "sampling/up_to_1/prompts": 1,
        "sampling/up_to_1/response_length_mean": 1.5,
        "sampling/up_to_1/truncated_fraction": 0,
        "sampling/up_to_1/score_mean": 0.5,
        "sampling/up_to_2/prompts": 0,
        "sampling/up_to_3/prompts": 1,
        "sampling/up_to_3/response_length_mean": 2,
        "sampling/up_to_3/truncated_fraction": 0.5,
        "sampling/up_to_3/score_mean": 0.5,
        "sampling/longer/prompts": 1,
        "sampling/longer/response_length_mean": 0.5,
        "sampling/longer/truncated_fraction": 0,
        "sampling/longer/score_mean": 2,
    }
