"""A mixture of experts by hand: rows and weights of a rank, messages by link, imbalance, the router, decode steps."""

from math import log, sqrt
from typing import Any

import pytest

from hybridflow.automap.expert_time import ExpertWork
from hybridflow.automap.generation_time import decode_step
from hybridflow.automap.mean_rows import Pass
from hybridflow.automap.role_time import Model, model_of
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Cut, Layout
from tests.automap.round_profile import FIELDS, device, overheads, profile, small_spec

MB = Pass(tokens=10, outputs=4, pairs=50)
OF_ROW = 2 * (8 * 32 + 16 * 8)  # operations of an expert of 16 columns with a gate
# of two runs of two experts each, and of four of one: 1 + 0.5 sqrt(ep / 4) sqrt(2 ln ep)
OF_TWO, OF_FOUR = 1 + 0.5 * sqrt(0.5) * sqrt(2 * log(2)), 1 + 0.5 * sqrt(2 * log(4))
GROUPED = {"grouped_efficiency": 0.5, "sources": FIELDS["sources"] | {"grouped_efficiency": "made up"}}


def spec(**changes: Any) -> Any:
    return small_spec(num_experts=4, experts_per_token=2, **changes)


def work(cut: Cut, **changes: Any) -> ExpertWork:
    return ExpertWork(spec(), cut, "float32", device(**changes))


def model(cut: Cut, *, sequence_parallel: bool = False, shared: int = 0, **changes: Any) -> Model:
    of = spec(shared_ffn_hidden_size=shared)
    return Model(of, cut.tp, "float32", "lm", sequence_parallel, device(**changes), cut=cut)


# ------------------------------------------------------------------------------------------------ products


def test_a_token_is_a_row_of_each_of_its_experts() -> None:
    whole = work(Cut())
    assert whole.products(10).seconds == pytest.approx(20 * OF_ROW / 1e6)
    assert whole.products(10, backward=True).seconds == pytest.approx(2 * 20 * OF_ROW / 1e6)
    assert work(Cut(), **GROUPED).products(10).seconds == pytest.approx(20 * OF_ROW / 5e5)


def test_ranks_of_a_replica_share_experts_or_have_whole_ones() -> None:
    shares, whole, both = (work(cut) for cut in (Cut(4, 4, 1), Cut(4, 1, 4), Cut(4, 2, 2)))
    assert shares.matrices == [(8, 8), (4, 8)]
    assert shares.products(10).seconds == pytest.approx(20 * OF_ROW / 4 / 1e6)
    assert whole.matrices == [(8, 32), (16, 8)]
    assert whole.products(10).seconds == pytest.approx(5 * OF_FOUR * OF_ROW / 1e6)
    assert both.matrices == [(8, 16), (8, 8)]
    assert both.products(10).seconds == pytest.approx(10 * OF_TWO * OF_ROW / 2 / 1e6)


def test_ranks_of_several_replicas_have_tokens_of_their_own() -> None:
    """Each of four sends 20 rows and receives 20 in the mean; two that share an expert both compute a half."""
    assert work(Cut(1, 1, 4)).products(10).seconds == pytest.approx(20 * OF_FOUR * OF_ROW / 1e6)
    assert work(Cut(1, 2, 2)).products(10).seconds == pytest.approx(40 * OF_TWO * OF_ROW / 2 / 1e6)


def test_few_tokens_read_few_experts() -> None:
    """Of four experts a token misses one with 1/2: 3 of 4 read by two tokens, of two ranks' tokens 15 of 16."""
    assert work(Cut()).held(2) == pytest.approx(3)
    assert work(Cut(2, 1, 2)).held(2) == pytest.approx(1.5)
    assert work(Cut(1, 1, 2)).held(2) == pytest.approx(2 * 15 / 16)
    slow = work(Cut(), memory_bandwidth=1e3)
    rows = 4 * (4 * (8 + 32) + 4 * (16 + 8)) + 3 * 4 * (8 * 32 + 16 * 8)  # four rows, three experts, 4 bytes
    assert slow.products(2).seconds == pytest.approx(rows / 1e3)
    assert slow.products(2).bound == "memory"


def test_a_measured_rate_is_that_of_a_single_product() -> None:
    table = {"float32": {"table": [[5, 8, 32, 1e5], [5, 16, 8, 1e5]]}}
    assert work(Cut(), products=table).products(10).seconds == pytest.approx(20 * OF_ROW / 1e5)


def test_an_efficiency_needs_a_source() -> None:
    assert profile().grouped_efficiency == 1
    for field, value in (("grouped_efficiency", 0.5), ("gradient_bandwidth", 1e6)):
        with pytest.raises(ValueError, match=f"{field} has none"):
            profile(**{field: value})


# ------------------------------------------------------------------------------------------------ messages


def test_rows_go_to_other_replicas_and_back() -> None:
    sent = 20 * OF_FOUR * 8 * 4
    assert work(Cut(1, 1, 4)).messages(10).seconds == pytest.approx(2 * (0.5 + 3 / 4 * sent / 1e4))
    assert work(Cut(4, 1, 4)).messages(10).seconds == 0, "all ranks of a replica have all tokens"


def test_a_token_goes_once_to_a_rank_with_several_of_its_experts() -> None:
    """Of four experts on two ranks two are chosen: one of the six pairs leaves out the first rank, one the second."""
    two = work(Cut(1, 1, 2))
    assert two.runs == pytest.approx(2 * 5 / 6)
    sent = 10 * 5 / 3 * two.imbalance * 8 * 4
    assert two.messages(10).seconds == pytest.approx(2 * (0.5 + sent / 2 / 1e4))


def test_links_carry_what_goes_inside_a_host_and_between_hosts_at_the_same_time() -> None:
    """Of four ranks on two hosts each sends a quarter to a neighbour, and half over an adapter that two share."""
    sent = 20 * OF_FOUR * 8 * 4
    own = work(Cut(1, 1, 4), ranks_per_host=2)
    assert own.messages(10).seconds == pytest.approx(2 * (2.0 + sent / 2 * 2 / 1e3))
    fast = {"between": {"bandwidth": 1e9, "latency": 0.1, "sharers": 2}}
    inside = work(Cut(1, 1, 4), ranks_per_host=2, **fast)
    assert inside.messages(10).seconds == pytest.approx(2 * (0.5 + sent / 4 / 1e4))


def test_a_layer_sends_forward_and_backward_and_again_where_it_is_recomputed() -> None:
    over, alone = model(Cut(1, 1, 4)), model(Cut())
    sent = 2 * (0.5 + 3 / 4 * 20 * OF_FOUR * 8 * 4 / 1e4)
    of_links = [part.seconds for part in over.forward_layer(MB).parts if part.bound == "links"]
    assert of_links == pytest.approx([sent])
    for recompute, times in (("none", 1), ("selective", 1), ("full", 2)):
        parts = over.backward_layer(MB, recompute).parts
        assert sum(part.seconds for part in parts if part.bound == "links") == pytest.approx(times * sent)
    assert not [part for part in alone.forward_layer(MB).parts if part.bound == "links"]


def test_modules_of_a_mixture_run_again_one_by_one() -> None:
    """The activation is 5 of 16 columns a copy, of which a token has two; the shared expert has the same, once."""
    own = model(Cut(), shared=16)
    backward = own.backward_layer(MB, "none").seconds
    activation, of_shared = 10 * 4 * 2 * 5 * 16 / 1e5, 2 * 10 * (8 * 32 + 16 * 8) / 1e6 + 10 * 4 * 5 * 16 / 1e5
    router, copies = 2 * 10 * 8 * 4 / 1e6, 10 * (4 * 2 * (5 * 8 + 5 * 16) + 16 * 4) / 1e5
    mixture = router + own.experts.products(10).seconds + copies + of_shared
    for modules, seconds in (
        (("moe_act",), activation),
        (("shared_experts",), of_shared),
        (("moe",), mixture),
        (("moe", "moe_act", "shared_experts"), mixture),  # the two are in it
        (("mlp",), 0),
    ):
        assert own.backward_layer(MB, modules).seconds == pytest.approx(backward + seconds), modules


def test_a_mixture_that_runs_again_sends_its_tokens_again() -> None:
    over, sent = model(Cut(1, 1, 4)), 2 * (0.5 + 3 / 4 * 20 * OF_FOUR * 8 * 4 / 1e4)
    for modules, times in ((("moe_act",), 1), (("moe",), 2)):
        parts = over.backward_layer(MB, modules).parts
        assert sum(part.seconds for part in parts if part.bound == "links") == pytest.approx(times * sent)


@pytest.mark.parametrize(("shared", "halves"), [(0, 2), (16, 4)])
def test_sent_tokens_are_not_gathered_as_well(shared: int, halves: int) -> None:
    """Two ranks of two replicas: each has five of ten tokens; attention gathers and scatters, a shared expert too."""
    own = model(Cut(2, 1, 4), sequence_parallel=True, shared=shared)
    half = 0.5 + 0.5 * 10 * 8 * 4 / 1e4
    sent = 2 * (0.5 + 3 / 4 * 5 * 2 * OF_FOUR * 8 * 4 / 1e4)
    links = sum(part.seconds for part in own.forward_layer(MB).parts if part.bound == "links")
    assert links == pytest.approx(halves * half + sent)
    links = sum(part.seconds for part in own.backward_layer(MB, "none").parts if part.bound == "links")
    assert links == pytest.approx(1.5 * halves * half + sent)


def test_experts_over_hosts_leave_the_messages_of_a_replica_inside() -> None:
    config = RoleConfig(model="nowhere", dtype="float32", tensor_parallel_size=2, sequence_parallel=True)
    layout = Layout(2, 1, 2, tuple(range(4)), ep=4)
    own = model_of(spec(), layout, config, device(ranks_per_host=2), head="lm")
    assert (own.hosts, own.experts.ep_ranks) == (1, 4)


# ------------------------------------------------------------------------------------------------ beside


def test_rows_are_gathered_and_summed_and_the_router_passes_over_its_logits() -> None:
    """Five passes of 8 columns a row, nine where rows are sent; five of 16 for a gate; 16 bytes a logit."""
    assert work(Cut()).elementwise_bytes() == 4 * 2 * (5 * 8 + 5 * 16) + 16 * 4
    assert work(Cut(2, 2, 1)).elementwise_bytes() == 4 * 2 * (5 * 8 + 5 * 8) + 16 * 4
    sent = work(Cut(1, 1, 4)).elementwise_bytes()
    assert sent == pytest.approx(4 * 2 * OF_FOUR * (9 * 8 + 5 * 16) + 16 * 4)


def test_a_decode_step_has_the_experts_that_its_tokens_choose_and_the_routers_kernels() -> None:
    own = model(Cut(), memory_bandwidth=1e3, overheads=overheads(operation=0.5))
    experts = 4 * (4 * (8 + 32) + 4 * (16 + 8)) + 3 * 4 * (8 * 32 + 16 * 8)
    dense = 4 * ((16 + 192 + 48) + (16 + 64 + 16) + (16 + 32 + 8))  # the router is 8 x 4
    keys, head = 2 * 2 * 4 * 4 * 2 * 10, 4 * (16 + 512 + 128)
    found = decode_step(own, 1, 2, 10)
    assert found.seconds == pytest.approx((2 * (experts + dense + keys) + head) / 1e3 + 2 * 5 * 0.5)


def test_a_profile_without_the_dtype_names_it() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        ExpertWork(spec(), Cut(), "bfloat16", device(products={"float32": {"peak": 1e6}})).products(1)
