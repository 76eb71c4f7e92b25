"""Generation by hand: a step that reads weights and keys, prefill in chunks, and responses that end at unlike times."""

from typing import Any

import pytest

from hybridflow.automap.generation_time import Responses, decode_cost, decode_step, generation_cost, prefill_cost
from hybridflow.automap.mean_rows import Pass
from hybridflow.automap.role_time import Model
from hybridflow.parallel.layout import Cut
from tests.automap.round_profile import device, overheads, small_spec


def model(tp: int = 1, **changes: Any) -> Model:
    return Model(small_spec(), tp, "float32", "lm", sequence_parallel=False, device=device(**changes))


def responses(**changes: Any) -> Responses:
    fields = {"number": 4, "prompts": 4, "prompt": 6, "mean": 5, "longest": 5, "at_once": 99, "batched_tokens": 99}
    return Responses(**(fields | changes))


def test_a_decode_step_reads_all_weights_and_all_keys() -> None:
    # m k + k n + m n of each product of a layer, m = 4, and the head; 4 bytes each
    weights = 4 * ((32 + 192 + 96) + (32 + 64 + 32) + (32 + 256 + 128) + (64 + 128 + 32))
    keys = 2 * 2 * 4 * 4 * 4 * 10  # keys and values, heads, head_dim, bytes, sequences, tokens
    head = 4 * (32 + 512 + 256)
    found = decode_step(model(memory_bandwidth=1e3), 1, 4, 10)
    assert found.seconds == pytest.approx((2 * (weights + keys) + head) / 1e3)
    assert found.bound == "memory"


def test_a_decode_step_of_many_is_bound_by_products() -> None:
    found = decode_step(model(memory_bandwidth=1e12), 1, 4000, 0)
    products = 2 * 4000 * (8 * 24 + 8 * 8 + 8 * 32 + 16 * 8)
    assert found.seconds == pytest.approx((2 * products + 2 * 4000 * 8 * 64) / 1e6)
    assert found.bound == "products"


def test_what_the_engine_takes_itself() -> None:
    own = overheads(engine_step=1.0, engine_layer=0.25, engine_sequence=0.125, engine_message=0.5)
    plain, found = decode_step(model(), 1, 4, 10).seconds, decode_step(model(overheads=own), 1, 4, 10).seconds
    assert found - plain == pytest.approx(1.0 + 2 * 0.25 + 4 * 0.125)
    shared, taken = (decode_step(model(2, **changes), 1, 4, 10).seconds for changes in ({}, {"overheads": own}))
    # two messages a layer, and the logits
    assert taken - shared == pytest.approx(1.0 + 2 * 0.25 + 4 * 0.125 + 5 * 0.5)


def test_stages_hand_on_hidden_states() -> None:
    alone, two = (decode_step(model(), pp, 4, 10).seconds for pp in (1, 2))
    assert two - alone == pytest.approx(2 * (0.5 + 4 * 8 * 4 / 1e4))


def test_prompts_are_read_in_steps_of_so_many_tokens() -> None:
    own = model()
    found = prefill_cost(own, 1, responses(batched_tokens=12))  # 24 tokens in two steps
    mb = Pass(12, 2, 4 * 36 / 2 / 2)
    head = 2 * 2 * 8 * 64 / 1e6
    assert found.seconds == pytest.approx(2 * (2 * own.forward_layer(mb).seconds + head))
    again = prefill_cost(own, 1, responses(prompts=2, prefix_caching=False, batched_tokens=12))
    assert again.seconds == pytest.approx(found.seconds)
    once = prefill_cost(own, 1, responses(prompts=2))  # two samples each read a prompt once
    assert once.seconds < found.seconds


def test_equal_responses_run_to_the_end_together() -> None:
    step = decode_step(model(), 1, 4, 6 + 4 / 2).seconds
    assert decode_cost(model(), 1, responses()).seconds == pytest.approx(4 * step)


def test_of_unlike_responses_every_token_is_generated_once() -> None:
    """Where only sequences take time: as many seconds as tokens after the first of each response."""
    own = model(products={"float32": {"peak": 1e18}}, memory_bandwidth=1e18, overheads=overheads(engine_sequence=1.0))
    found = decode_cost(own, 1, responses(number=1000, mean=21, longest=101, at_once=2000))
    assert found.seconds == pytest.approx(1000 * 20, rel=0.01)
    crowded = decode_cost(own, 1, responses(number=1000, mean=21, longest=101, at_once=100))
    assert crowded.seconds == pytest.approx(1000 * 20, rel=0.01)


def test_the_longest_response_is_waited_for() -> None:
    """Where only steps take time: as many as the longest has, and while others wait for a place as many as theirs."""
    own = model(products={"float32": {"peak": 1e18}}, memory_bandwidth=1e18, overheads=overheads(engine_step=1.0))
    assert decode_cost(own, 1, responses(number=50, mean=21, longest=101)).seconds == pytest.approx(100)
    queued = decode_cost(own, 1, responses(number=50, mean=21, longest=101, at_once=10))
    assert queued.seconds == pytest.approx(40 * 20 / 10 + 100)


def test_a_generation_is_prefill_and_decode() -> None:
    own = device(overheads=overheads(engine_wake=3.0))
    plain = model()
    found = generation_cost(small_spec(), cut=Cut(), pp=1, dtype="float32", responses=responses(), device=own)
    both = prefill_cost(plain, 1, responses()).seconds + decode_cost(plain, 1, responses()).seconds
    assert found.seconds == pytest.approx(3.0 + both)
