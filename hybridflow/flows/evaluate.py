"""Held-out evaluation: greedy responses, the share that is right, and their mean score. Never trained on."""

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.rewards.functions import RewardFunction
from hybridflow.rewards.scorer import Scorer


def evaluate(
    responses: RolloutBatch,
    prompts: PromptBatch,
    scorer: Scorer,
    right: RewardFunction,
    name: str,
    *,
    exchange: Exchange,
) -> dict[str, float]:
    """Right is what the function `right`, called `name`, gives exactly 1.0."""
    parts = [scorer.function_part(right, name, responses, prompts), *scorer.parts(responses, prompts)]
    marks, *scores = exchange.wholes(parts)
    return {
        "eval/accuracy": float((marks == 1.0).float().mean()),
        "eval/score_mean": float(scorer.total(scores).mean()),
    }
