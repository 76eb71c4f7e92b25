"""How prompts are dealt out to the replicas of the engine."""

import pytest
import torch

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.rollout.engine import Response
from hybridflow.rollout.generation import prompts_of_replicas, responses_to


def prompts(lengths: list[int]) -> PromptBatch:
    return PromptBatch(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths), ("",) * len(lengths), {})


def mixed(seed: int) -> list[int]:
    """Of 64 prompts every eighth is of some thousand tokens, in any order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(32, 257, (64,), generator=generator)
    lengths[::8] = torch.randint(2048, 4097, (8,), generator=generator)
    return lengths[torch.randperm(64, generator=generator)].tolist()


@pytest.mark.parametrize("lengths", [[4096] * 4 + [64] * 60, *map(mixed, range(3))], ids=["four long", *"abc"])
@pytest.mark.parametrize("num_samples", [4, 8])
def test_replicas_give_nearly_as_many_responses(lengths: list[int], num_samples: int) -> None:
    """At most 1.2 times as many, however long prompts are; by the tokens of prompts alone it was 15 times."""
    counts = torch.full((64,), num_samples)
    shares = prompts_of_replicas(prompts(lengths), counts, always(1024), 8)
    responses = [int(counts[share].sum()) for share in shares]
    assert sorted(prompt for share in shares for prompt in share) == list(range(64))
    assert max(responses) <= 1.2 * min(responses)


def test_responses_that_may_be_longer_count_more() -> None:
    """Eight short limits beside a long one: 8 x 100 x 8 + 8 x 10 against 800 x 8 + 100."""
    limits = LengthBuckets((10,), (100, 800))
    shares = prompts_of_replicas(prompts([10] * 8 + [100]), torch.ones(9, dtype=torch.int64), limits, 2)
    assert shares == [[8], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_prompts_that_are_much_longer_than_their_responses_count() -> None:
    limits = always(1)
    shares = prompts_of_replicas(prompts([1000, 8, 8, 8]), torch.ones(4, dtype=torch.int64), limits, 2)
    assert shares == [[0], [1, 2, 3]]


def test_a_row_brings_its_prompt_where_that_has_no_tokens() -> None:
    """The prompt is what stands before the first token of the policy; all of a row that has none, as it has failed."""
    responses = [
        Response([1, 2, 3, 4, 5], [0.0, 0.0, -0.3, 0.0, -0.5], False, sampled=[False, False, True, False, True]),
        Response([6, 7], [0.0, -0.7], True, sampled=[False, True]),
        Response([8], [0.0], False, sampled=[False]),
    ]
    batch = responses_to(prompts([0, 0]), [0, 1], torch.tensor([2, 1]), responses)
    assert batch.input_ids.tolist() == list(range(1, 9)) and batch.lengths.tolist() == [5, 2, 1]
    assert batch.prompt_lengths.tolist() == [2, 1, 1] and batch.prompt_indices.tolist() == [0, 0, 1]
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True, False]
    assert batch.truncated.tolist() == [False, True, False]
    assert torch.equal(batch.rollout_log_probs, torch.tensor([0.0, 0.0, -0.3, 0.0, -0.5, 0.0, -0.7, 0.0]))


def test_a_prompt_that_is_known_ends_where_it_ends() -> None:
    """Also where somebody else writes first behind that prompt."""
    responses = [Response([3, 4], [0.0, -0.4], False, sampled=[False, True])]
    batch = responses_to(prompts([2]), [0], torch.tensor([1]), responses)
    assert batch.prompt_lengths.tolist() == [2] and batch.response_mask.tolist() == [False, False, False, True]
