"""What training makes of scores, by hand."""

import dataclasses
from typing import Any

import pytest
import torch

from hybridflow.algorithms.rewards import RunningMoments
from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config import RewardConfig
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.scorer import Scorer, _part_names

SCORES, TEN = torch.tensor([1.0, 2.0, 3.0]), always(10)


def rollout() -> RolloutBatch:
    """Responses of 4, 8 and 10 tokens to prompts of 2, the last of them cut at the limit of 10."""
    lengths, prompts = torch.tensor([6, 10, 12]), torch.tensor([2, 2, 2])
    ids = torch.ones(28, dtype=torch.int64)
    mask = response_mask(lengths, prompts)
    return RolloutBatch(ids, lengths, prompts, torch.arange(3), torch.arange(3) == 2, mask, torch.zeros(28))


def shaped(**given: Any) -> list[float]:
    config = RewardConfig(functions=[{"function": "hybridflow.rewards:exact_match"}], **given)
    caller = FunctionCaller(lambda ids: "", 0, 1)
    scorer = Scorer(config, [], caller=caller, watch=Stopwatch(lambda: None), limits=TEN)
    return scorer.shaped(SCORES, rollout(), RunningMoments())[0].tolist()


def test_what_comes_near_the_limit_costs_more_with_each_token() -> None:
    """A buffer of 5: from the 6th token on a fifth of the factor each."""
    assert shaped(overlong={"buffer": 5}) == [1.0, 2.0 - torch.tensor(0.6).item(), 2.0]
    assert shaped(overlong={"buffer": 4, "factor": 2.0}) == [1.0, 1.0, 1.0]


def test_of_a_row_with_several_sequences_the_longest_counts() -> None:
    """Ten tokens in two sequences of three and seven: two into a buffer of five."""
    config = RewardConfig(functions=[{"function": "hybridflow.rewards:exact_match"}], overlong={"buffer": 5})
    scorer = Scorer(config, [], caller=FunctionCaller(lambda ids: "", 0, 1), watch=Stopwatch(lambda: None), limits=TEN)
    whole = rollout()
    mask, starts = whole.response_mask.clone(), torch.zeros(28, dtype=torch.bool)
    mask[16 + 5], starts[16 + 5] = False, True  # the prompt of the second, in the place of a token
    split = dataclasses.replace(whole, response_mask=mask, branch_starts=starts)
    assert split.branch_lengths.tolist() == [6, 10, 5, 7]
    found = scorer.shaped(SCORES, split, RunningMoments())[0]
    assert found.tolist() == pytest.approx([1.0, 2.0 - 0.6, 3.0 - 0.2])


def test_overlong_counts_from_the_limit_of_the_prompts_bucket() -> None:
    """Responses to prompts of 2 tokens are cut at 8: those of 4, 8 and 10 tokens are 0, 4 and 4 into a buffer of 4."""
    config = RewardConfig(functions=[{"function": "hybridflow.rewards:exact_match"}], overlong={"buffer": 4})
    caller = FunctionCaller(lambda ids: "", 0, 1)
    scorer = Scorer(config, [], caller=caller, watch=Stopwatch(lambda: None), limits=LengthBuckets((2, 5), (8, 9, 10)))
    assert scorer.shaped(SCORES, rollout(), RunningMoments())[0].tolist() == [1.0, 1.0, 2.0]


def test_each_part_of_a_score_has_a_name() -> None:
    """A model by its number, a function by its own name, with its number where two have the same."""
    paths = ["a.b:exact", "a.b:length", "c.d:exact"]
    model = {"model": "m"}
    config = RewardConfig(models=[model, model], functions=[{"function": path} for path in paths])
    assert _part_names(config) == ("model_0", "model_1", "exact_0", "length", "exact_2")


def test_penalties_come_before_the_range() -> None:
    found = shaped(truncation_penalty=0.5, overlong={"buffer": 4}, clip_score=1.25)  # 1, 1.5 and 1.5 before it
    assert found == [1.0, 1.25, 1.25]
