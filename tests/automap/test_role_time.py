"""Scoring and updates by hand: a layer, the pipeline's bubble, bytes of gradients, a step; rows in micro-batches."""

from typing import Any

import pytest

from hybridflow.automap.cost import Cost, Part, total
from hybridflow.automap.mean_rows import MeanRows, Pass, passes
from hybridflow.automap.role_time import Model, forward_cost, gradient_cost, pipelined, update_cost
from hybridflow.automap.step_time import reduction_cost, step_cost
from hybridflow.config import RoleConfig, TrainedRoleConfig
from hybridflow.parallel.layout import Layout
from hybridflow.placement.footprint import stage_elements
from tests.automap.round_profile import FIELDS, device, overheads, small_spec

HOW = ("none", ("core_attn", "layernorm"), ("mlp",))
SHARED = {"products": 2.0, "memory": 2.0, "overhead": 2.0}
MB = Pass(tokens=10, outputs=4, pairs=50)
# of a layer: hidden 8, 24 rows of queries, keys and values, an MLP of 16 with a gate
PRODUCTS = 2 * 10 * (8 * 24 + 8 * 8 + 8 * 32 + 16 * 8) / 1e6
ATTENTION = 4 * 50 * 2 * 4 / 1e5
ELEMENTWISE = 10 * 4 * (14 * 8 + 4 * 16 + 5 * 16) / 1e5
PARAMETERS = 2 * 64 * 8 + 2 * (24 * 8 + 8 * 8 + 32 * 8 + 8 * 16 + 2 * 8) + 8


def model(tp: int = 1, *, sequence_parallel: bool = False, **changes: Any) -> Model:
    return Model(small_spec(), tp, "float32", "lm", sequence_parallel, device(**changes))


def role(**fields: Any) -> RoleConfig:
    return RoleConfig(model="nowhere", dtype="float32", **fields)


def trained(**fields: Any) -> TrainedRoleConfig:
    return TrainedRoleConfig.model_validate({"model": "nowhere", "dtype": "float32", "optimizer": {"lr": 0.1}} | fields)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, **fields: Any) -> Layout:
    return Layout(tp, pp, dp, tuple(range(tp * pp * dp)), **fields)


# ------------------------------------------------------------------------------------------------ a layer


def test_a_layer_forward_and_backward() -> None:
    assert model().forward_layer(MB).seconds == pytest.approx(PRODUCTS + ATTENTION + ELEMENTWISE)
    # twice the products, 2.5 times attention's operations at half the rate, twice the bytes
    assert model().backward_layer(MB, "none").seconds == pytest.approx(2 * PRODUCTS + 5 * ATTENTION + 2 * ELEMENTWISE)


def test_what_is_recomputed_runs_again() -> None:
    backward = model().backward_layer(MB, "none").seconds
    assert model().backward_layer(MB, "selective").seconds == pytest.approx(backward + ATTENTION)
    full = backward + PRODUCTS + ATTENTION + ELEMENTWISE
    assert model().backward_layer(MB, "full").seconds == pytest.approx(full)


def test_modules_of_a_dense_layer_run_again_one_by_one() -> None:
    """Two norms are 8 passes over the hidden state; an MLP is its products and 5 passes over 16 columns."""
    backward = model().backward_layer(MB, "none").seconds
    norms, mlp = 10 * 4 * 8 * 8 / 1e5, 2 * 10 * (8 * 32 + 16 * 8) / 1e6 + 10 * 4 * 5 * 16 / 1e5
    assert model().backward_layer(MB, ("layernorm",)).seconds == pytest.approx(backward + norms)
    assert model().backward_layer(MB, ("mlp",)).seconds == pytest.approx(backward + mlp)
    every = ("core_attn", "layernorm", "mlp")
    assert model().backward_layer(MB, every).seconds == pytest.approx(backward + ATTENTION + norms + mlp)


def test_an_mlp_on_several_ranks_sends_again() -> None:
    """Sequence parallel: its tokens are gathered, its outputs summed and scattered, which is half of a layer's."""
    own, half = model(2, sequence_parallel=True), 0.5 + 0.5 * 10 * 8 * 4 / 1e4
    links = [sum(part.seconds for part in own.backward_layer(MB, how).parts if part.bound == "links") for how in HOW]
    assert links == pytest.approx([6 * half, 6 * half, 8 * half])


def test_tensor_parallel_ranks_exchange_activations_twice_each_way() -> None:
    message = 2 * 0.5 + 10 * 8 * 4 / 1e4  # an all-reduce of two ranks: two messages, half of the bytes twice
    elementwise = 10 * 4 * (14 * 8 + (4 * 16 + 5 * 16) / 2) / 1e5
    alone = (PRODUCTS + ATTENTION) / 2 + elementwise
    assert model(2).forward_layer(MB).seconds == pytest.approx(alone + 2 * message)
    # sequence parallel: four halves of an all-reduce, backward two more; norms and sums on half of the tokens
    half = 10 * 4 * (14 * 8 / 2 + (4 * 16 + 5 * 16) / 2) / 1e5
    split = model(2, sequence_parallel=True)
    assert split.forward_layer(MB).seconds == pytest.approx((PRODUCTS + ATTENTION) / 2 + half + 2 * message)
    backward = PRODUCTS + 2.5 * ATTENTION + 2 * half + 3 * message
    assert split.backward_layer(MB, "none").seconds == pytest.approx(backward)


def test_launches_are_hidden_behind_a_device_of_its_own_and_add_up_on_processors() -> None:
    layer = PRODUCTS + ATTENTION + ELEMENTWISE
    slow, fast = (overheads(layer_forward=seconds) for seconds in (1.0, 0.1))
    assert model(overheads=fast).forward_layer(MB).seconds == pytest.approx(layer)
    assert model(overheads=slow).forward_layer(MB).seconds == pytest.approx(1.0)
    assert model(overheads=slow).forward_layer(MB).bound == "launches"
    assert model(overheads=fast, shared=SHARED).forward_layer(MB).seconds == pytest.approx(layer + 0.1)


def test_log_probs_read_the_wanted_rows_alone() -> None:
    product, logits = 2 * 4 * 8 * 64 / 1e6, 4 * 64
    assert model().output(MB).seconds == pytest.approx(product + logits / 1e4)
    assert model().output(MB, backward=True).seconds == pytest.approx(2 * product + logits / 5e3)


def test_the_products_of_all_tokens_are_those_of_attention_router_and_shared_expert() -> None:
    spec = small_spec(num_experts=4, experts_per_token=2, shared_ffn_hidden_size=16)
    own = Model(spec, 2, "float32", "lm", sequence_parallel=False, device=device())
    assert own.matrices == [(8, 12), (4, 8), (8, 4), (8, 16), (8, 8)]


# ------------------------------------------------------------------------------------------------ a grid


def seconds(value: float, load: float = 0.5) -> Cost:
    return Cost((Part("products", value, load),))


@pytest.mark.parametrize(
    ("stages", "count", "chunks", "expected"),
    [
        ((3.0,), 4, 1, 12.0),
        ((3.0, 3.0), 4, 1, 15.0),  # the bubble is one micro-batch
        ((3.0, 3.0), 4, 3, 13.0),  # a third of it
        ((2.0, 2.0, 2.0, 2.0), 8, 1, 22.0),
        ((2.0, 2.0, 2.0, 2.0), 8, 2, 19.0),
        ((2.0, 5.0), 4, 1, 22.0),  # the slowest stage sets the pace
        ((2.0, 5.0), 1, 1, 7.0),
    ],
)
def test_a_pipeline(stages: tuple[float, ...], count: int, chunks: int, expected: float) -> None:
    found = pipelined([seconds(value) for value in stages], count, chunks=chunks)
    assert found.seconds == pytest.approx(expected)
    work = sum(part.seconds * part.load for part in found.parts)  # of all stages, whoever waits meanwhile
    assert work == pytest.approx(0.5 * count * sum(stages))


@pytest.mark.parametrize(
    ("stages", "count", "chunks", "waits"),
    [
        ((2.0, 2.0), 4, 1, (2.0, 2.0)),  # 10 s, of which each computes 8: (p - 1) / (m + p - 1) = 1 / 5
        ((4.0,) * 4, 8, 1, (12.0,) * 4),  # 44 s: 3 / 11
        ((4.0,) * 4, 8, 2, (6.0,) * 4),  # half the bubble
        ((1.0, 3.0), 2, 1, (5.0, 1.0)),  # 2 x 3 + 1 = 7 s
        ((5.0,), 3, 1, ()),
    ],
)
def test_a_stage_waits_for_what_is_left_of_the_pipeline(stages, count, chunks, waits) -> None:
    found = pipelined([seconds(value) for value in stages], count, chunks=chunks)
    assert found.waits == pytest.approx(waits)
    twice = total((found.times(2), seconds(1.0)))  # two steps, and something that all do
    assert twice.waits == pytest.approx([2 * wait for wait in waits])


def test_a_replica_scores_its_micro_batches() -> None:
    rows = MeanRows(4, prompt=6, response=5)  # 10 tokens of each are run
    one = passes(rows, 20)[1]
    assert (passes(rows, 20)[0], one) == (2, Pass(20, 10, 100))
    own = model(overheads=overheads(micro_batch=0.25))
    expected = 2 * (2 * own.forward_layer(one).seconds + own.output(one).seconds + 0.25)
    config = role(micro_batch_tokens=20)
    found = forward_cost(small_spec(), layout(), config, rows, own.device, head="lm")
    assert found.seconds == pytest.approx(expected)
    # of four units each has a micro-batch of its own
    found = forward_cost(small_spec(), layout(), config, rows, own.device, head="lm", units=4)
    alone = Pass(10, 5, 50)
    each = 2 * own.forward_layer(alone).seconds + own.output(alone).seconds + 0.25
    assert found.seconds == pytest.approx(4 * each)
    # two stages of a layer each: they send 20 x 8 x 4 bytes
    sent = 0.5 + 640 / 1e4
    first, last = own.forward_layer(one).seconds + 0.25 + sent, 0.25 + sent
    last += own.forward_layer(one).seconds + own.output(one).seconds
    found = forward_cost(small_spec(), layout(pp=2), config, rows, own.device, head="lm")
    assert found.seconds == pytest.approx(2 * last + first)


def test_gradients_are_four_bytes_scattered_or_reduced() -> None:
    half = 0.5 + 0.5 * 4 * PARAMETERS / 1e4
    costs = device(), {"head": "lm"}
    assert reduction_cost(small_spec(), layout(dp=2), trained(), costs[0], head="lm").seconds == pytest.approx(half)
    whole = trained(optimizer={"lr": 0.1, "zero1": False})
    assert reduction_cost(small_spec(), layout(dp=2), whole, costs[0], head="lm").seconds == pytest.approx(2 * half)
    assert reduction_cost(small_spec(), layout(tp=2), trained(), costs[0], head="lm").seconds == 0


def test_what_leaves_a_host_takes_the_link_between_hosts() -> None:
    """Two ranks a host. Of eight replicas of two ranks, both groups of a stage share their host's adapter."""
    own, replicas = device(ranks_per_host=2), layout(tp=2, dp=8)
    size = 4 * stage_elements(small_spec(), "lm", replicas)[0]
    scattered = 3 * 2.0 + 7 / 8 * size * 2 / 1e3
    assert reduction_cost(small_spec(), replicas, trained(), own, head="lm").seconds == pytest.approx(scattered)
    inside, between = (step_cost(small_spec(), replicas, trained(), each, head="lm") for each in (device(), own))
    within = 3 * 0.5 + 7 / 8 * size / 1e4
    alone = step_cost(small_spec(), replicas, trained(), device(ranks_per_host=16), head="lm").seconds
    assert between.seconds - alone == pytest.approx(scattered - within)
    assert inside.seconds == pytest.approx(between.seconds), "sixteen ranks lie on two hosts of eight as well"


def test_a_stage_on_another_host_is_sent_to_over_the_link_between_hosts() -> None:
    arguments = (trained(micro_batch_tokens=30), MeanRows(1, 10, 20))
    one, two = (
        forward_cost(small_spec(), layout(pp=2), *arguments, device(ranks_per_host=number), head="lm").seconds
        for number in (2, 1)
    )
    sent = 29 * 8 * 4  # the last token is not run
    assert two - one == pytest.approx(2 * (2.0 + sent / 1e3 - 0.5 - sent / 1e4))


def test_a_step_passes_over_its_share_of_the_state_and_gathers_the_weights() -> None:
    own = device(memory_bandwidth=1e3, overheads=overheads(step=1.0, step_layer=0.25))
    gathered = 0.5 + 0.5 * 4 * PARAMETERS / 1e4
    moved = (4 * PARAMETERS + (4 + 28) * PARAMETERS / 2) / 1e3
    found = step_cost(small_spec(), layout(dp=2), trained(), own, head="lm")
    assert found.seconds == pytest.approx(moved + gathered + 1.5)
    whole = step_cost(small_spec(), layout(dp=2), trained(optimizer={"lr": 0.1, "zero1": False}), own, head="lm")
    assert whole.seconds == pytest.approx((4 + 4 + 28) * PARAMETERS / 1e3 + 1.5)


@pytest.mark.parametrize(("tied", "elements"), [(False, PARAMETERS), (True, PARAMETERS - 64 * 8 + 60 * 8)])
def test_gradients_of_each_micro_batch_are_added_up(tied: bool, elements: int) -> None:
    """Four bytes read, and the sum's four read and written; a tied embedding has two gradients."""
    fields = {"sources": FIELDS["sources"] | {"gradient_bandwidth": "made up"}, "gradient_bandwidth": 1e3}
    rows, config = MeanRows(4, prompt=6, response=5), trained(micro_batch_tokens=20)
    seconds = [
        gradient_cost(small_spec(tied=tied), layout(), config, rows, device(**changes), head="lm").seconds
        for changes in ({}, fields)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * 12 * elements / 1e3)


def test_the_sum_of_gradients_hides_behind_the_last_backward_pass_of_a_device() -> None:
    rows, config = MeanRows(4, prompt=6, response=5), trained(micro_batch_tokens=10)

    def parts(**changes: Any) -> tuple[float, float]:
        own = device(**changes)
        arguments = small_spec(), layout(dp=2), config
        known = gradient_cost(*arguments, rows.split(2), own, head="lm").seconds
        rest = step_cost(*arguments, own, head="lm").seconds
        return known, update_cost(*arguments, rows, own, head="lm").seconds - known - rest

    whole = 0.5 + 0.5 * 4 * PARAMETERS / 1e4
    known, shown = parts()
    assert shown == pytest.approx(max(0.0, whole - 2 / 3 * known / 2))  # two micro-batches of a row
    assert 0 < shown < whole
    assert parts(shared=SHARED)[1] == pytest.approx(whole)


# ------------------------------------------------------------------------------------------------ rows


def test_rows_that_share_a_prompt_run_it_once() -> None:
    rows = MeanRows(8, prompt=9, response=4, samples=4)  # 12 tokens a row, of which 8 are shared
    assert rows.shared == 8
    assert rows.tokens == 2 * 8 + 8 * 4
    assert rows.outputs == 32
    assert rows.pairs == 2 * 8 * 8 / 2 + 8 * (4 * 4 / 2 + 4 * 8)
    assert rows.micro_batches(48) == 1
    assert rows.micro_batches(24) == 2  # a group of 8 + 16 in each
    assert rows.micro_batches(20) == 3  # groups are cut
    alone = MeanRows(8, prompt=2, response=40, samples=4)  # 3 tokens saved of 164: it does not pay
    assert (alone.shared, alone.tokens) == (0, 8 * 41)


def test_rows_of_scores_run_their_last_token() -> None:
    rows = MeanRows(3, prompt=6, response=4, whole=True)
    assert (rows.tokens, rows.outputs) == (30, 3)
    assert rows.split(2).number == 2
    assert [rows.micro_batches(budget) for budget in (30, 29, 19)] == [1, 2, 3]
    assert MeanRows(0, 6, 4).micro_batches(10) == 0
