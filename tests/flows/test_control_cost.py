"""What a rank does for each row beside its models is counted, with 1k and with 16k rows: operations and memory."""

import contextlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.algorithms.advantages import gae, whiten
from hybridflow.algorithms.loss_mean import sequence_token_mean
from hybridflow.algorithms.rewards import token_rewards
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import SamplingConfig
from hybridflow.flows.ppo import PPOBatchWithReference
from hybridflow.flows.step_metrics import NonFinite, check_finite
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.iteration import batch_metrics
from hybridflow.rollout.engine import Request
from hybridflow.rollout.generation import RolloutRequest, replica_responses, whole_rollout
from hybridflow.rollout.row import CUT, ENDED, RolloutRow
from tests.counted import CountedOperations

TOKENS = 20  # of a response


@pytest.fixture(scope="module")
def exchange() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Exchange(dist.group.WORLD, torch.device("cpu"))
    dist.destroy_process_group()


class Engine:
    """Answers a request with TOKENS tokens: the numbers from the request's first token on."""

    def stream(self, requests: list[Request], params: Any, *, stepped: Any) -> Any:
        for i, request in enumerate(requests):
            tokens = [request.prompt[0] + t for t in range(TOKENS)]
            yield i, RolloutRow(tokens, [-0.5] * TOKENS, state=ENDED if i % 2 else CUT, calls=1)


def request_of(num_rows: int) -> RolloutRequest:
    """Four responses to each prompt of two tokens."""
    count = num_rows // 4
    prompts = PromptBatch(torch.arange(2 * count) % 100, torch.full((count,), 2), ("",) * count, {})
    return RolloutRequest(prompts, torch.full((count,), 4), SamplingConfig(max_response_length=32), (1, 2), 0)


def rollout_of(num_rows: int, exchange: Exchange) -> RolloutBatch:
    request = request_of(num_rows)
    own = replica_responses(Engine(), [None], request, range(len(request.prompts)))
    return whole_rollout(request, own, exchange=exchange)


def test_the_rollout_has_the_responses_where_they_belong(exchange: Exchange) -> None:
    batch = rollout_of(8, exchange)
    assert batch.input_ids[:22].tolist() == [0, 1, *range(20)]
    assert batch.input_ids[-22:].tolist() == [2, 3, *range(2, 22)]
    assert batch.input_ids.dtype == torch.int64
    assert batch.prompt_indices.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.rollout_log_probs[:4].tolist() == [0.0, 0.0, -0.5, -0.5]
    assert batch.truncated.tolist() == [True, False] * 4
    assert int(batch.response_mask.sum()) == 8 * TOKENS and batch.branch_starts is None


def test_seeds_are_of_run_iteration_prompt_and_sample() -> None:
    request = RolloutRequest(**{**vars(request_of(8)), "first_prompt": 5})
    of_rows = request.of_prompts([1])
    again = RolloutRequest(**{**vars(request), "seed": (1, 2, 1)}).of_prompts([1]).values()
    later, asked = RolloutRequest(**{**vars(request), "first_prompt": 4}).of_prompts([0, 1]), list(of_rows.values())
    assert list(of_rows) == [4, 5, 6, 7] and list(later) == list(range(8))
    assert [later[row].seed for row in of_rows] != [each.seed for each in asked]
    assert len({each.seed for each in (*asked, *again)}) == 8
    assert [each.prompt for each in asked] == [[2, 3]] * 4


@contextlib.contextmanager
def at_most(num_tokens: int, *, operations: int, elements: float, python_bytes: float) -> Iterator[None]:
    """Torch's operations, and a token: elements of new tensors, and the most bytes of Python and numpy."""
    tracemalloc.start()
    try:
        with CountedOperations() as counted:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    found = (sum(counted.calls.values()), counted.elements / num_tokens, peak / num_tokens)
    assert all(one <= limit for one, limit in zip(found, (operations, elements, python_bytes), strict=True)), found


@pytest.mark.parametrize("num_rows", [1_000, 16_000])
def test_a_whole_rollout_takes_a_few_passes(num_rows: int, exchange: Exchange) -> None:
    """With indices and masks as tensors of int64 a token took 28 elements."""
    request = request_of(num_rows)
    own = replica_responses(Engine(), [None], request, range(len(request.prompts)))
    with at_most(num_rows * (TOKENS + 2), operations=100, elements=8, python_bytes=16):
        whole_rollout(request, own, exchange=exchange)


@pytest.mark.parametrize("num_rows", [1_000, 16_000])
def test_estimates_and_metrics_take_a_few_passes(num_rows: int, exchange: Exchange) -> None:
    """What was not done in place took 94 elements a token."""
    rollout = rollout_of(num_rows, exchange)
    mask, lengths, scores = rollout.response_mask, rollout.lengths, torch.rand(num_rows)
    known = -torch.rand(3, len(mask)).masked_fill(~mask, 0.0)
    with at_most(len(mask), operations=300, elements=45, python_bytes=14):
        check_finite({"values": known[0]}, rollout)
        rewards = token_rewards(scores, known[1], mask, lengths=lengths, kl_coef=0.1)
        advantages, returns = gae(rewards, known[0], mask, lengths=lengths, gamma=1.0, gae_lambda=0.95)
        fields = {"log_probs": known[1], "values": known[0], "raw_scores": scores, "scores": scores}
        fields |= {"rewards": rewards, "advantages": whiten(advantages, mask), "returns": returns}
        batch = PPOBatchWithReference(**vars(rollout), **fields, ref_log_probs=known[2])
        sequence_token_mean(batch.select(torch.arange(num_rows // 2)).response_mask, lengths[: num_rows // 2])
        batch_metrics(batch)


def test_a_sum_that_overflows_is_no_number_that_is_not_finite(exchange: Exchange) -> None:
    batch = rollout_of(8, exchange)
    values = torch.full((len(batch.input_ids),), 3e38)
    assert not values.sum().isfinite()
    check_finite({"values": values}, batch)
    values[50] = -torch.inf
    with pytest.raises(NonFinite, match=r"values is -inf in row 2 "):
        check_finite({"values": values}, batch)
