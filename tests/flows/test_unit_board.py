"""Three replicas and a store: who is done, what is announced, who takes it; and again in the next rollout.

The store of the second half answers late, forgets to answer, or is gone.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from hybridflow.flows.work_queue import WorkQueue
from hybridflow.parallel import store_client
from hybridflow.parallel.store_client import StoreClient

NUM_REPLICAS = 3


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True)  # the server, as long as it is there


@pytest.fixture
def boards(store: TCPStore) -> Iterator[list[WorkQueue]]:
    yield [WorkQueue(StoreClient(store, "test"), replica, NUM_REPLICAS) for replica in range(NUM_REPLICAS)]


def begin(boards: list[WorkQueue]) -> None:
    """When the notes of all are there."""
    for board in boards:
        holds(lambda board=board: board._notices.read_all(board._keys) is not None)
    for board in boards:
        board.begin()


def holds(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """What another thread does comes soon; how soon is the machine's affair."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


def test_somebody_waits_while_others_generate(boards: list[WorkQueue]) -> None:
    for _ in range(2):
        begin(boards)
        assert not boards[0].others_generate()  # nobody is done: nobody asks for work
        for number, board in enumerate(boards):
            board.done()
            board.done()
            for other in boards:
                holds(lambda other=other, number=number: other.num_done() == number + 1)
            assert boards[1].others_generate() == (number < 2)


def test_each_is_told_of_each_unit_once(boards: list[WorkQueue]) -> None:
    for responses in ([[1, 2, 3], [], [70000]], [[5]]):
        begin(boards)
        boards[0].done()
        boards[1].announce(4, responses)
        assert told(boards[0], 1) == [4]
        boards[2].announce(7, [[9]])
        assert told(boards[0], 1) == [7]
        assert told(boards[1], 2) == [4, 7] and told(boards[1], 0) == []
        assert boards[0].responses(4) == responses and boards[1].responses(7) == [[9]]
    begin(boards)
    assert told(boards[2], 0) == []  # the third had not looked
    assert boards[0].responses(7) is None, "those of the rollout before"


def told(board: WorkQueue, count: int) -> list[int]:
    """The next `count` units; what comes beside them is too much."""
    found: list[int] = []

    def look() -> bool:
        board.num_done()
        found.extend(board.announced())
        return len(found) >= count

    holds(look)
    return found


def test_a_unit_is_taken_once_for_each_model(boards: list[WorkQueue]) -> None:
    for first, second in ((0, 1), (1, 2), (1, 0)):
        begin(boards)
        assert boards[first].take(0, 5)
        assert not boards[second].take(0, 5) and not boards[first].take(0, 5)
        assert boards[second].take(1, 5) and boards[second].take(0, 6)


def test_without_a_store_there_is_nothing_to_wait_for(boards: list[WorkQueue]) -> None:
    begin(boards)
    boards[0].done()
    boards[1]._notices.close()
    assert not boards[1].others_generate() and boards[1].announced() == [] and not boards[1].take(0, 0)
    boards[1].announce(0, [[1]])
    holds(lambda: boards[0].num_done() == 1)
    assert boards[0].announced() == []


# ------------------------------------------------------------------------------------------- a store that is late


class Late:
    """In front of the store of one replica: it holds answers up, loses them, or is gone."""

    def __init__(self, store: object) -> None:
        self.store, self.go, self.answers, self.gone = store, threading.Event(), True, False
        self.go.set()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def asked(*arguments: object) -> object:
            self.go.wait()
            if self.gone:
                raise DistNetworkError("the store is gone")
            answer = getattr(self.store, name)(*arguments)
            if not self.answers:
                raise DistStoreError("no answer in time")
            return answer

        return asked


@pytest.fixture
def late(boards: list[WorkQueue], monkeypatch: pytest.MonkeyPatch) -> Late:
    """The store of the first replica. Nobody waits long for an answer."""
    monkeypatch.setattr(store_client, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(store_client, "RETRY_SECONDS", 0.05)
    begin(boards)
    notices = boards[0]._notices
    notices._store = Late(notices._store)
    return notices._store


def test_a_store_that_is_late_hears_who_is_done(boards: list[WorkQueue], late: Late) -> None:
    """One question is under way as the replica is done: what it says next waits for its turn, and is not lost."""
    boards[1].done()
    late.go.clear()
    assert not boards[0].others_generate()  # this question is not answered in time
    started = time.monotonic()
    boards[0].done()
    assert time.monotonic() - started < 0.5, "nobody waits for the store to be told"
    holds(lambda: boards[1].num_done() == 1)
    late.go.set()
    holds(lambda: boards[1].num_done() == 2)
    assert boards[1].others_generate()
    boards[2].done()
    holds(lambda: not boards[1].others_generate())


def test_a_note_whose_answer_is_lost_is_written_again(boards: list[WorkQueue], late: Late) -> None:
    """And counts once."""
    late.answers = False
    boards[0].done()
    holds(lambda: boards[1].num_done() == 1)
    time.sleep(0.3)
    late.answers = True
    holds(lambda: not boards[0]._notices._undelivered)
    assert boards[1].num_done() == 1


def test_an_announcement_that_is_lost_holds_up_no_other(boards: list[WorkQueue], late: Late) -> None:
    boards[2].done()
    late.answers = False
    boards[0].announce(3, [[1]])  # whether its tokens are there is not known
    late.answers = True
    boards[0].announce(4, [[2]])
    boards[1].announce(5, [[3]])
    assert sorted(told(boards[2], 2)) == [4, 5]
    assert boards[2].responses(4) == [[2]] and boards[2].responses(5) == [[3]]


def test_a_replica_whose_store_is_gone_waits_for_nobody(boards: list[WorkQueue], late: Late) -> None:
    boards[1].done()
    late.gone = True
    boards[0].done()
    assert not boards[0].others_generate() and boards[0].announced() == [] and boards[0].responses(1) is None
    assert not boards[0].take(0, 1)
    boards[0].announce(2, [[1]])
    holds(lambda: boards[0]._notices._closed and not boards[0]._notices._undelivered)
