"""Contributions made whole. Between ranks: every test of the roles."""

from collections.abc import Iterator

import pytest
import torch

from hybridflow.parallel import exchange as exchanges
from hybridflow.parallel.exchange import Exchange, PartialTensor
from tests.worlds import world_of_one


@pytest.fixture(scope="module")
def exchange() -> Iterator[Exchange]:
    """In a world of one, unless another test file has left one."""
    with world_of_one() as world:
        yield Exchange(world, torch.device("cpu"))


def test_values_stand_where_they_belong_and_zeros_elsewhere(exchange: Exchange) -> None:
    parts = [
        PartialTensor(4, torch.tensor([3, 1]), torch.tensor([5.0, -0.5])),
        PartialTensor.empty(2),
        PartialTensor(1, torch.tensor([0]), torch.tensor([2.0**-149])),  # the smallest number: x + 0 = x exactly
    ]
    first, second, third = exchange.gather_all(parts)
    assert first.tolist() == [0, -0.5, 0, 5] and second.tolist() == [0, 0] and third.tolist() == [2.0**-149]
    assert exchange.gather(parts[0]).tolist() == [0, -0.5, 0, 5]
    assert exchange.gather(PartialTensor.empty(0)).tolist() == []


def test_the_type_is_that_of_the_contributions(exchange: Exchange) -> None:
    numbers = PartialTensor(3, torch.tensor([2]), torch.tensor([1 << 40]))
    assert exchange.gather(numbers).tolist() == [0, 0, 1 << 40]
    with pytest.raises(AssertionError, match=r"torch\.float32 among torch\.int64"):
        exchange.gather_all([numbers, PartialTensor.empty(3)])


def test_sums_and_maxima_are_made_in_place_and_timed(exchange: Exchange) -> None:
    values, before = torch.tensor([1.0, 2.0]), exchange.seconds
    assert exchange.sum(values) is values and exchange.maximum(values) is values
    assert values.tolist() == [1, 2] and exchange.mean(2.5) == 2.5
    assert exchange.seconds > before


def test_bytes_arrive_piece_by_piece(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between several ranks: `tests.distributed.test_routing` and `tests.flows.test_routing`."""
    monkeypatch.setattr(exchanges, "PIECE_BYTES", 5)
    told, seconds = torch.arange(12, dtype=torch.uint8), exchange.seconds
    (found,) = exchange.swap([told], [12])
    assert found.tolist() == list(range(12)) and exchange.seconds > seconds
    assert [x.tolist() for x in exchange.swap([told[:0]], [0])] == [[]]
