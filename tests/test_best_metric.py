"""Whether high or low is good of a metric, and which metrics a run has none of."""

import pytest

from hybridflow.config import CheckpointConfig
from hybridflow.config.best_metric import lower_is_better


@pytest.mark.parametrize(
    "metric",
    [
        *("eval/loss", "actor/loss", "critic/value_loss", "eval/perplexity", "kl/reference_mean", "actor/approx_kl"),
        *("rollout/gen_kl", "actor/grad_norm", "time/iteration_seconds", "rollout/truncated_fraction"),
        *("rollout/token_mult_prob_error", "reward/errors", "reward/timeouts", "eval/failed_rows", "loss"),
        *("sampling/up_to_64/truncated_fraction", "train/step_time_ms", "data/dropped_bad"),
    ],
)
def test_of_what_costs_the_lowest_is_best(metric: str) -> None:
    assert lower_is_better(metric)
    assert CheckpointConfig(best_metric=metric).keeps == "lowest"
    assert CheckpointConfig(best_metric=metric, best_is="highest").keeps == "highest"


@pytest.mark.parametrize(
    "metric",
    [
        *("reward/score_mean", "eval/accuracy", "eval/score_mean", "eval/reward_accuracy", "eval/reward_margin"),
        *(
            "reward/part_loss_of_words_mean",
            "reward/error_free/kl",
            "train/tokens_per_sec",
            "critic/explained_variance",
        ),
        *("rollout/response_length_mean", "actor/entropy", "eval/glossary", "eval/items"),
    ],
)
def test_of_all_else_the_highest_is_best(metric: str) -> None:
    assert not lower_is_better(metric)
    assert CheckpointConfig(best_metric=metric).keeps == "highest"
    assert CheckpointConfig(best_metric=metric, best_is="lowest").keeps == "lowest"
