"""What is wrong with orders of collectives, by literal records. Whole runs: tests/distributed/test_order.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import collective_order
from hybridflow.parallel.collective_order import Call, RankGroup, findings, read
from hybridflow.parallel.collective_record import CollectiveRecord
from hybridflow.parallel.collectives import Collectives

GROUPS = {"a": RankGroup((0, 1), "tp"), "b": RankGroup((0, 1))}
A = Call("a", "allreduce", (4,), 4, "float32")
B = replace(A, group="b")
GATHER = replace(A, operation="allgather")
EXCHANGE = replace(A, operation="all_to_all_single")
FROM_0 = replace(A, operation="broadcast", root=0)
LONGER = {"shape": (3, 2), "elements": 6}


def sends(peer: int, group: str = "a", batch: int | None = None) -> Call:
    return Call(group, "send", (2,), 2, "float32", peer=peer, batch=batch)


def receives(peer: int, group: str = "a", batch: int | None = None) -> Call:
    return replace(sends(peer, group, batch), operation="recv")


RIGHT = {
    "the same": ([A, B, GATHER], [A, B, GATHER]),
    "other sizes of an all-to-all": ([EXCHANGE], [replace(EXCHANGE, **LONGER)]),
    "the other way round in another thread": ([A, B], [replace(B, thread="writer"), A]),
    "a send beside a receive": ([sends(1), receives(1)], [receives(0), sends(0)]),
    "a message of another shape": ([sends(1)], [replace(receives(0), shape=(2, 1))]),
    "one batch": ([sends(1, batch=1), receives(1, batch=1)], [sends(0, batch=1), receives(0, batch=1)]),
    "from anybody": ([sends(1)], [Call("a", "recv_anysource", (2,), 2, "float32")]),
}
NAMED = "group a (tp, ranks 0-1)"
WRONG = {
    "missing call": (
        ([A, GATHER], [A]),
        f"{NAMED}, collective 1: allgather float32 [4] on rank 0; none on rank 1",
    ),
    "operation": (
        ([A, GATHER], [A, A]),
        f"{NAMED}, collective 1: allgather float32 [4] on rank 0; allreduce float32 [4] on rank 1",
    ),
    "shape": (
        ([A], [replace(A, **LONGER)]),
        f"{NAMED}, collective 0: allreduce float32 [4] on rank 0; allreduce float32 [3, 2] on rank 1",
    ),
    "other tensors": (
        ([GATHER], [replace(GATHER, elements=8)]),
        f"{NAMED}, collective 0: allgather float32 [4] on rank 0; allgather float32 [4] on rank 1",
    ),
    "root": (
        ([FROM_0], [replace(FROM_0, root=1)]),
        f"{NAMED}, collective 0: broadcast of rank 0 float32 [4] on rank 0; broadcast of rank 1 float32 [4] on rank 1",
    ),
    "type of an all-to-all": (
        ([EXCHANGE], [replace(EXCHANGE, dtype="int64")]),
        f"{NAMED}, collective 0: all_to_all_single float32 [4] on rank 0; all_to_all_single int64 [4] on rank 1",
    ),
    "no receive": (
        ([sends(1), sends(1)], [receives(0)]),
        f"{NAMED}, message 1 from rank 0 to rank 1: send float32 [2] on rank 0, no receive on rank 1",
    ),
    "no send": (
        ([], [receives(0)]),
        f"{NAMED}, message 0 from rank 0 to rank 1: no send on rank 0, recv float32 [2] on rank 1",
    ),
    "receive in another group": (
        ([sends(1), sends(1, "b")], [receives(0, "b"), receives(0, "b")]),
        f"{NAMED}, message 0 from rank 0 to rank 1: send float32 [2] on rank 0, no receive on rank 1",
    ),
    "longer receive": (
        ([sends(1)], [replace(receives(0), **LONGER)]),
        f"{NAMED}, message 0 from rank 0 to rank 1: send float32 [2] on rank 0, recv float32 [3, 2] on rank 1",
    ),
    "swap": (
        ([A, B, A], [A, A, B]),
        "ranks can wait for each other: on rank 0 allreduce float32 [4] 0 of group b (ranks 0-1) comes before "
        f"allreduce float32 [4] 1 of {NAMED}; on rank 1 allreduce float32 [4] 1 of {NAMED} comes before "
        "allreduce float32 [4] 0 of group b (ranks 0-1)",
    ),
    "both send first": (
        ([sends(1), receives(1)], [sends(0), receives(0)]),
        f"ranks can wait for each other: on rank 0 message 0 from rank 0 to rank 1 of {NAMED} comes before "
        f"message 0 from rank 1 to rank 0 of {NAMED}; on rank 1 message 0 from rank 1 to rank 0 of {NAMED} comes "
        f"before message 0 from rank 0 to rank 1 of {NAMED}",
    ),
    "two batches": (
        ([sends(1, batch=1), receives(1, batch=2)], [sends(0, batch=1), receives(0, batch=2)]),
        f"ranks can wait for each other: on rank 0 message 0 from rank 0 to rank 1 of {NAMED} comes before "
        f"message 0 from rank 1 to rank 0 of {NAMED}; on rank 1 message 0 from rank 1 to rank 0 of {NAMED} comes "
        f"before message 0 from rank 0 to rank 1 of {NAMED}",
    ),
}


@pytest.mark.parametrize("case", RIGHT)
def test_one_order_is_right(case: str) -> None:
    assert findings(GROUPS, dict(enumerate(RIGHT[case]))) == []


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_first_place_first(case: str) -> None:
    calls, text = WRONG[case]
    assert findings(GROUPS, dict(enumerate(calls)))[0] == text


def test_three_ranks_may_wait_in_a_circle_of_which_no_two_are_wrong() -> None:
    groups = {"a": RankGroup((0, 1)), "b": RankGroup((1, 2)), "c": RankGroup((0, 2))}
    a, b, c = (replace(A, group=name) for name in groups)
    assert findings(groups, {0: [a, c], 1: [b, a], 2: [b, c]}) == []
    [found] = findings(groups, {0: [a, c], 1: [b, a], 2: [c, b]})
    assert all(f"on rank {rank} " in found for rank in (0, 1, 2))


def test_a_rank_without_a_record_is_named() -> None:
    assert findings(GROUPS, {0: [A, B]}) == ["there is no record of rank 1"]


def test_calls_are_recorded_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Collectives.install()
    monkeypatch.setattr(record, "_record", None)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    pair = dist.new_group([1, 2], group_desc="pair")
    record.record_to(tmp_path / "records", 1)
    one, three = torch.ones(2), [torch.empty(4, 2) for _ in range(3)]
    dist.all_reduce(torch.ones(3, 1, dtype=torch.int64))
    dist.broadcast(one, 2, group=pair)
    dist.all_gather(three, torch.ones(4, 2))
    dist.gather(one, None, dst=0)
    for _ in range(2):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 2, pair), dist.P2POp(dist.irecv, three[0], 2, pair)])
    dist.isend(one, 2, group=pair)
    record.record_to(tmp_path / "records", 1)  # goes on
    dist.recv(one, 0)
    dist.all_reduce(one, group=dist.new_group([1]))  # alone it waits for nobody
    dist.barrier()
    dist.destroy_process_group()
    groups, calls = read(tmp_path / "records")
    assert groups == {"0": RankGroup((0, 1, 2), "default_pg"), "1": RankGroup((1, 2), "pair")}
    two = {"shape": (2,), "elements": 2, "dtype": "float32", "device": "cpu"}
    matrix = {**two, "shape": (4, 2), "elements": 8}
    assert calls == {
        1: [
            Call("0", "allreduce", (3, 1), 3, "int64", "cpu"),
            Call("1", "broadcast", **two, root=2),
            Call("0", "allgather", **{**matrix, "elements": 24}),
            Call("0", "gather", **two, root=0),
            *(Call("1", "send", **two, peer=2, batch=1), Call("1", "recv", **matrix, peer=2, batch=1)),
            *(Call("1", "send", **two, peer=2, batch=2), Call("1", "recv", **matrix, peer=2, batch=2)),
            Call("1", "send", **two, peer=2),
            Call("0", "recv", **two, peer=0),
            Call("0", "barrier"),
        ]
    }


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that a killed rank has not written whole counts for nothing."""
    lines = [{"name": "a", "ranks": [0, 1], "description": "tp"}, {"thread": "MainThread", **vars(B), "group": "a"}]
    texts = [json.dumps(line) + "\n" for line in lines]
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.jsonl").write_text("".join(texts) + '{"thread"')
    assert collective_order.main(tmp_path) == 0
    assert capsys.readouterr().out == "2 ranks, 1 group, 2 calls: one order\n"
    (tmp_path / "rank_1.jsonl").write_text(texts[0])
    assert collective_order.main(tmp_path) == 1
    assert capsys.readouterr().out == f"{NAMED}, collective 0: allreduce float32 [4] on rank 0; none on rank 1\n"


def test_a_directory_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"has no rank_N\.jsonl; HYBRIDFLOW_RECORD_COLLECTIVES="):
        read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"^HYBRIDFLOW_RECORD_COLLECTIVES = .*/file: File exists"):
        CollectiveRecord(tmp_path / "file", 0)
