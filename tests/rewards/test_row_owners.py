"""Which worker has which row, by hand; and that handing out a call is as much work with 16k rows as with 1k."""

from dataclasses import dataclass

import pytest

from hybridflow.rewards.row_owners import RowOwners


class Looked:
    """Of a call: how often somebody has read its row."""

    times = 0


@dataclass(eq=False)
class Call:
    number: int
    of: int

    @property
    def row(self) -> int:
        Looked.times += 1
        return self.of


def owners(*rows: int) -> RowOwners[Call]:
    found: RowOwners[Call] = RowOwners()
    for number, row in enumerate(rows):
        found.add(Call(number, row))
    return found


def assigned(found: RowOwners[Call], pid: int, pids: tuple[int, ...] = (7, 8)) -> int | None:
    call = found.assign_call(pid, pids)
    return None if call is None else call.number


def test_a_worker_with_fewest_rows_takes_a_new_row_and_then_all_calls_of_it() -> None:
    found = owners(0, 1, 0, 2, 1)
    assert assigned(found, 7) == 0  # row 0
    assert assigned(found, 7) == 2  # 8 has fewer rows, so that 7 takes no new one
    assert assigned(found, 7) is None
    assert assigned(found, 8) == 1
    assert [assigned(found, 7), assigned(found, 8), assigned(found, 8)] == [3, 4, None]
    assert not found.has_calls()
    found.add(Call(5, 1))
    assert (assigned(found, 7), assigned(found, 8)) == (None, 5)


def test_calls_go_in_the_order_in_which_they_came() -> None:
    """Worker 7 owns row 0 when calls of rows 1 and 0 come: the new row's call is the earlier one."""
    found = owners(0)
    assert assigned(found, 7, (7,)) == 0
    found.add(Call(1, 1))
    found.add(Call(2, 0))
    found.add(Call(3, 1))
    assert [assigned(found, 7, (7,)) for _ in range(3)] == [1, 2, 3]


def test_a_worker_that_is_gone_loses_its_rows_and_the_calls_that_wait_for_it() -> None:
    found = owners(0, 0, 1)
    assert (assigned(found, 7), assigned(found, 8)) == (0, 2)
    assert [call.number for call in found.lose(7, "it ended")] == [1]
    assert (found.why_lost(0), found.why_lost(1), found.why_lost(None)) == ("it ended", None, None)
    found.forget(0)
    assert found.why_lost(0) is None
    found.add(Call(3, 0))
    assert assigned(found, 9, (8, 9)) == 3  # as a new row


def test_a_row_that_is_forgotten_makes_room_at_its_worker() -> None:
    found = owners(0, 1)
    assert (assigned(found, 7), assigned(found, 8)) == (0, 1)
    found.forget(0)
    found.add(Call(2, 2))
    found.add(Call(3, 3))
    assert assigned(found, 8) is None
    assert (assigned(found, 7), assigned(found, 8)) == (2, 3)


def test_the_first_call_of_a_row_without_an_owner() -> None:
    found = owners(4, 4)
    assert [call.number for call in (found.pop_first(), found.pop_first()) if call is not None] == [0, 1]
    assert found.pop_first() is None and not found.has_calls()


@pytest.mark.parametrize("num_rows", [1_000, 16_000])
def test_handing_out_first_calls_looks_at_each_call_once(num_rows: int) -> None:
    """4 workers with 8 calls under way each: the queue of 16k rows was read again for each call."""
    found = owners(*range(num_rows))
    Looked.times = 0
    pids, under_way = (1, 2, 3, 4), {pid: list[int]() for pid in (1, 2, 3, 4)}
    given = 0
    while found.has_calls():
        for pid in pids:
            while len(under_way[pid]) < 8 and (call := found.assign_call(pid, pids)) is not None:
                under_way[pid].append(call.of)
                given += 1
        for pid in pids:
            found.forget(under_way[pid].pop(0))
    assert given == num_rows and Looked.times == 0  # `add` has read each row
