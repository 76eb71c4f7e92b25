"""How many steps the engine takes at once; what they give is compared in tests/distributed/test_engine.py."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hybridflow.cpu.engine import decoding
from hybridflow.cpu.engine.decoding import MOST_STEPS, steps_at_once

PROMPT = 10


def request(response: int, *, most: int = 1000, ahead: int = 1, **params: Any) -> Any:
    """With a prompt of 10 tokens and so many of a response, the last `ahead` of which are not computed."""
    return SimpleNamespace(
        num_tokens=PROMPT + response,
        num_computed_tokens=PROMPT + response - ahead,
        num_output_tokens=response,
        max_tokens=most,
        sampling_params=SimpleNamespace(**{"stop": [], **params}),
    )


def scheduler(*running: Any, waiting: int = 0, free: int = 100, **changes: Any) -> Any:
    known = {"max_num_running_reqs": 4, "max_num_scheduled_tokens": 1000, "max_model_len": 500, "block_size": 16}
    return SimpleNamespace(
        running=list(running),
        get_request_counts=lambda: (len(running), waiting),
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: free)),
        **{**known, **changes},
    )


def test_as_many_as_are_allowed() -> None:
    assert steps_at_once(scheduler(request(1), request(7))) == MOST_STEPS == 16


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([request(1), request(3, most=8)], 5),  # to the end of the shorter response
        ([request(7, most=8)], 1),
        ([request(485)], 5),  # to the longest sequence, 500
        ([request(1), request(0, ahead=10)], 1),  # a prompt is to be computed
        ([request(1, stop=["end"])], 1),  # text that the scheduler does not see
        ([], 1),
    ],
)
def test_of_requests(running: list[Any], expected: int) -> None:
    assert steps_at_once(scheduler(*running)) == expected


def test_who_waits_may_join_where_there_is_room() -> None:
    four = [request(i) for i in range(1, 5)]
    assert steps_at_once(scheduler(*four, waiting=3)) == 16
    assert steps_at_once(scheduler(*four[:3], waiting=3)) == 1


def test_within_the_tokens_of_a_step() -> None:
    assert steps_at_once(scheduler(request(1), request(1), max_num_scheduled_tokens=11)) == 5


def test_blocks_that_are_needed_are_there() -> None:
    """Of 11 tokens 10 are computed: 16 more are tokens 10 to 25, in two blocks of 16, of which one is there."""
    assert steps_at_once(scheduler(request(1), request(1), free=2)) == 16
    assert steps_at_once(scheduler(request(1), request(1), free=1)) == 1
    with mock.patch.object(decoding, "MOST_STEPS", 6):
        assert steps_at_once(scheduler(request(1), request(1), free=0)) == 6  # to token 15


def test_log_probs_stand_by_request() -> None:
    from vllm.v1.outputs import LogprobsLists

    steps = [
        LogprobsLists(np.array([[1], [2], [3]]), np.array([[-0.1], [-0.2], [-0.3]]), np.array([1, 2, 3])),
        LogprobsLists(np.array([[4], [5], [6]]), np.array([[-0.4], [-0.5], [-0.6]]), np.array([4, 5, 6])),
    ]
    joined = decoding._by_request(steps)
    ids, log_probs, ranks, _ = joined.slice_request(1, 2)
    assert ids.tolist() == [[2], [5]] and log_probs.tolist() == [[-0.2], [-0.5]] and ranks.tolist() == [2, 5]
    assert joined.slice_request(2, 1).logprob_token_ids.tolist() == [[3]]  # what came after its end is left out
