"""Who is to blame, by what the ranks say: literal situations."""

from collections.abc import Mapping
from dataclasses import replace

from hybridflow.parallel.collectives import LastCall
from hybridflow.parallel.hang_report import Statement, report, suspects

WORLD = (0, 1, 2, 3)


def call(
    operation: str, number: int, *, group: str = "world", ranks: tuple[int, ...] = WORLD, inside=True, peer=None
) -> LastCall:
    return LastCall(
        group=group,
        ranks=ranks,
        number=number,
        operation=operation,
        seconds_ago=3.0,
        tensor="[2] of torch.float32 (8 bytes)",
        peer=peer,
        inside=inside,
        over=not inside,
    )


def statement(rank: int, *calls: LastCall, seen: Mapping[int, str] | None = None, stacks: str = "  here") -> Statement:
    return Statement(
        rank=rank,
        who=f"rank {rank}",
        phase="update",
        seconds=4.0,
        deadline=3.0,
        stacks=stacks,
        calls=calls,
        seen=seen or {},
    )


def situation(*statements: Statement) -> dict[int, Statement]:
    return {each.rank: each for each in statements}


def test_silent_ranks_lead_whatever_the_others_wait_in() -> None:
    said = situation(
        statement(0, call("allreduce", 7), seen={3: "is stopped (state T)"}), statement(1, call("broadcast", 6))
    )
    assert suspects(said, WORLD) == {
        2: "says nothing: no rank of its host answers, or none has looked",
        3: "says nothing: it is stopped (state T)",
    }


def test_who_waits_for_nobody_leads_those_who_wait_for_it_through_others() -> None:
    """0 waits for 1 in the world, 1 for 2 in a pair, 2 computes; 3 waits for both."""
    pair = {"group": "pair", "ranks": (1, 2)}
    said = situation(
        statement(0, call("allreduce", 7)),
        statement(1, call("broadcast", 5, **pair), call("allreduce", 6, inside=False)),
        statement(2, call("allreduce", 6, inside=False), call("broadcast", 4, **pair, inside=False)),
        statement(3, call("allreduce", 7)),
    )
    assert suspects(said, WORLD) == {
        2: "has not entered allreduce, collective 7 of group world, where ranks 0,3 wait: it is inside no collective, "
        "in phase update"
    }


def test_a_receive_waits_for_its_sender() -> None:
    pair = {"group": "pipeline", "ranks": (0, 1)}
    said = situation(statement(0), statement(1, call("recv", 0, **pair, peer=0)))
    assert suspects(said, (0, 1)) == {
        0: "has not entered its side of recv of group pipeline, where rank 1 waits: it is inside no collective, "
        "in phase update"
    }


def test_a_circle_names_all_in_it() -> None:
    """0 has entered the first group's collective and 1 the second's, in other orders."""
    one, two = {"group": "one", "ranks": (0, 1)}, {"group": "two", "ranks": (0, 1)}
    said = situation(statement(0, call("barrier", 1, **one)), statement(1, call("allgather", 1, **two)))
    found = suspects(said, (0, 1))
    assert list(found) == [0, 1]
    assert found[0].startswith("waits for rank 1 in barrier ") and found[1].startswith("waits for rank 0 in allgather ")


def test_where_calls_return_at_once_the_one_with_fewer_lags() -> None:
    """As with NCCL: nobody is seen inside."""
    said = situation(*(statement(rank, call("allreduce", 9 - (rank == 2), inside=False)) for rank in WORLD))
    assert suspects(said, WORLD) == {2: "has started 8 collectives of group world, others 9, the last one allreduce"}


def test_one_in_no_collective_is_named_where_nobody_lags() -> None:
    said = situation(
        statement(0, call("allreduce", 9)), statement(1, call("allreduce", 9, inside=False)), statement(2), statement(3)
    )
    said = {rank: each for rank, each in said.items() if rank < 2}
    assert suspects(said, (0, 1)) == {1: "is inside no collective, in phase update"}


def test_all_in_the_same_collective_are_not_blamed() -> None:
    said = situation(*(statement(rank, call("allreduce", 9)) for rank in WORLD))
    said[3] = replace(said[3], seconds=4.5)  # the others' deadlines have passed by less, or not
    said[1] = replace(said[1], phase="none", seconds=900.0, deadline=None)
    assert suspects(said, WORLD) == {}
    text = report(said, [f"rank {rank}" for rank in WORLD])
    assert text.startswith("hybridflow: hang: no rank lags behind the others: all wait in the same collective\n")
    assert "rank 3 is in it for 4.5 s (watchdog.update_seconds = 3)" in text


def test_a_statement_is_the_same_after_its_way_through_the_store() -> None:
    own = statement(1, call("recv", 3, peer=2), call("barrier", 2, inside=False), seen={2: "is stopped (state T)"})
    assert Statement.from_json(own.to_json()) == own


def test_like_stacks_are_told_once() -> None:
    said = situation(
        *(statement(rank, call("allreduce", 9), stacks="  waits\n" if rank else "  computes\n") for rank in WORLD)
    )
    text = report(said, [f"rank {rank}" for rank in WORLD])
    assert text.count("  waits") == 1 and "Python stacks of ranks 1-3:\n  waits" in text
    assert "Python stacks of rank 0:\n  computes" in text
