"""Operations by hand: a product or its memory, rings and trees, groups that share a link, ranks that share a host."""

import pytest

from hybridflow.automap.cost import Cost, Part, total
from tests.automap.round_profile import device

SHARED = {"products": 2.0, "memory": 1.25, "overhead": 1.5}
COLLECTIVES = (
    {"ranks": 2, "latency": 0.1, "bandwidth": 100.0, "latency_load": 0.5, "bandwidth_load": 1.0},
    {"ranks": 4, "latency": 0.4, "bandwidth": 50.0, "latency_load": 1.0, "bandwidth_load": 1.0},
)


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    cost = device().product(100, 20, 30, dtype="float32")
    assert cost.seconds == pytest.approx(2 * 100 * 20 * 30 / 1e6)
    assert cost.bound == "products"
    slow = device(memory_bandwidth=1e3).product(1, 20, 30, dtype="float32")
    assert slow.seconds == pytest.approx(4 * (20 + 600 + 30) / 1e3)  # 0.0012 s of operations
    assert slow.bound == "memory"


def test_a_measured_rate_is_of_the_whole_product() -> None:
    table = {"float32": {"table": [[1, 20, 30, 1200.0]]}}
    cost = device(memory_bandwidth=1e3, products=table).product(1, 20, 30, dtype="float32")
    assert cost.seconds == pytest.approx(1.0)
    assert cost.bound == "products"


def test_an_all_reduce_is_a_ring_of_bytes_and_a_tree_of_messages() -> None:
    ring = device().all_reduce(1000, 4)
    assert ring.seconds == pytest.approx(2 * 2 * 0.5 + 2 * 3 / 4 * 1000 / 1e4)
    assert device().all_gather(1000, 4).seconds == pytest.approx(ring.seconds / 2)
    assert device().all_reduce(1000, 1) == Cost()


def test_groups_at_once_share_what_a_host_sends_by() -> None:
    alone = device().all_reduce(1000, 2, hosts=2)
    assert alone.seconds == pytest.approx(2 * (2.0 + 0.5 * 1000 / 1e3))
    assert device().all_reduce(1000, 2, hosts=2, groups=3).seconds == pytest.approx(2 * (2.0 + 0.5 * 3 * 1000 / 1e3))
    # four share an adapter: of eight groups no more
    assert device().all_reduce(1000, 2, hosts=2, groups=8).seconds == pytest.approx(2 * (2.0 + 0.5 * 4 * 1000 / 1e3))
    assert device().all_reduce(1000, 2, groups=8).seconds == pytest.approx(2 * (0.5 + 0.5 * 1000 / 1e4))


def test_measured_messages_are_taken_as_they_are() -> None:
    measured = device(collectives=COLLECTIVES)
    assert measured.all_reduce(10, 2).seconds == pytest.approx(0.1 + 0.1)
    assert measured.all_reduce(10, 3).seconds == pytest.approx(0.4 + 0.2)  # of the next larger group
    assert measured.all_reduce(10, 8).seconds == pytest.approx(2 * (0.4 + 0.2))  # twice the largest
    assert measured.all_gather(10, 2).seconds == pytest.approx(0.1)
    assert measured.all_reduce(10, 2, hosts=2).seconds == pytest.approx(2 * (2.0 + 0.5 * 10 / 1e3))  # none measured
    # four groups of two: messages take 4 x 0.5 of the host, bytes 4 x 1
    assert measured.all_reduce(10, 2, groups=4).on_share(1.0) == pytest.approx(2 * 0.1 + 4 * 0.1)


def test_ranks_on_shared_processors_ask_for_a_part_of_them() -> None:
    shared = device(shared=SHARED)
    one, four = (shared.product(100, 20, 30, dtype="float32", busy=busy) for busy in (1, 4))
    assert (one.load, four.load) == (0.5, 2.0)
    assert one.on_share(1.0) == pytest.approx(0.12)
    assert four.on_share(1.0) == pytest.approx(0.24)  # twice what there is
    assert four.on_share(0.5) == pytest.approx(0.48)
    assert shared.elementwise(1e5).load == pytest.approx(0.8)
    assert shared.overhead(1.0).load == pytest.approx(1 / 1.5)
    assert device().product(100, 20, 30, dtype="float32", busy=4).load == 0.0


def test_costs_add_up_and_the_bound_is_what_takes_most_where_ranks_share() -> None:
    first, second = Cost((Part("links", 3.0, 0.5),)), Cost((Part("products", 2.0, 2.0),))
    both = first + second
    assert both.seconds == 5.0
    assert both.load == pytest.approx((3 * 0.5 + 2 * 2.0) / 5)
    assert both.bound == "products"  # 4 s of a host that has half of what is asked
    assert total([both, both]).parts == (Part("links", 6.0, 0.5), Part("products", 4.0, 2.0))
    assert both.times(2, busy=3).parts == (Part("links", 6.0, 1.5), Part("products", 4.0, 6.0))
