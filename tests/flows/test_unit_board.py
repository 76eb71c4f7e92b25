"""Three replicas and a store: who is done, what is announced, who takes it; and again in the next rollout."""

from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from hybridflow.flows.unit_board import UnitBoard
from hybridflow.parallel.noticeboard import Noticeboard


@pytest.fixture
def boards() -> Iterator[list[UnitBoard]]:
    store = TCPStore("127.0.0.1", 0, is_master=True)  # the server, as long as it is there
    yield [UnitBoard(Noticeboard(store, "test"), replica, 3) for replica in range(3)]


def test_somebody_waits_while_others_generate(boards: list[UnitBoard]) -> None:
    for _ in range(2):
        for board in boards:
            board.begin()
        assert not boards[0].others_generate()  # nobody is done: nobody asks for work
        for number, board in enumerate(boards):
            board.done()
            assert [other.num_done() for other in boards] == [number + 1] * 3
            assert boards[1].others_generate() == (number < 2)
        for board in boards:
            board.settle()


def test_each_is_told_of_each_unit_once(boards: list[UnitBoard]) -> None:
    for responses in ([[1, 2, 3], [], [70000]], [[5]]):
        for board in boards:
            board.begin()
        assert boards[0].announced() == []
        boards[1].announce(4, responses)
        assert boards[0].announced() == [(4, responses)]
        boards[2].announce(7, [[9]])
        assert boards[0].announced() == [(7, [[9]])]
        assert boards[1].announced() == [(4, responses), (7, [[9]])] and boards[1].announced() == []
        for board in boards:  # the third has not looked
            board.settle()
        assert boards[2].announced() == []


def test_a_unit_is_taken_once_for_each_model(boards: list[UnitBoard]) -> None:
    for first, second in ((0, 1), (1, 2), (1, 0)):
        for board in boards:
            board.begin()
        assert boards[first].take(0, 5)
        assert not boards[second].take(0, 5) and not boards[first].take(0, 5)
        assert boards[second].take(1, 5) and boards[second].take(0, 6)
        for board in boards:
            board.settle()


def test_without_a_store_there_is_nothing_to_wait_for(boards: list[UnitBoard]) -> None:
    for board in boards:
        board.begin()
    boards[0].done()
    boards[1]._notices.close()
    assert not boards[1].others_generate() and boards[1].announced() == [] and not boards[1].take(0, 0)
    boards[1].announce(0, [[1]])
    boards[1].settle()
    assert boards[0].announced() == []
