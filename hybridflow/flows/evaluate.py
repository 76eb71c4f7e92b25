"""Held-out evaluation: greedy responses, the share that is right, and their mean score. Never trained on."""

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.rewards.functions import RewardFunction
from hybridflow.rewards.scorer import FunctionCaller, Scorer


def evaluate(
    responses: RolloutBatch,
    prompts: PromptBatch,
    right: RewardFunction,
    name: str,
    *,
    caller: FunctionCaller,
    scorer: Scorer | None,
    exchange: Exchange,
) -> dict[str, float]:
    """Right is what the function `right`, called `name`, gives exactly 1.0. The mean score needs a scorer."""
    marks = caller.scores(right, name, responses, prompts)
    if scorer is None:
        return {"eval/accuracy": _accuracy(exchange.whole(marks))}
    scores = scorer.scores(responses, prompts)
    whole_marks, *wholes = exchange.wholes([marks, *scores.contributions])
    return {"eval/accuracy": _accuracy(whole_marks), "eval/score_mean": float(scores.total(wholes).mean())}


def _accuracy(marks: Tensor) -> float:
    return float((marks == 1.0).float().mean())
