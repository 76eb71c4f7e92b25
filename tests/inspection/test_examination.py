"""What becomes of links that are slow, dead, or too many."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict

import pytest
from torch._C._distributed_c10d import HashStore

from hybridflow.inspection import examination
from hybridflow.inspection.examination import Examination
from hybridflow.inspection.findings import Finding
from hybridflow.inspection.participant import Participant
from hybridflow.inspection.verdicts import LinkFigures
from hybridflow.parallel.rank0_commands import CommandLeader, follow
from hybridflow.parallel.torchrun import Started
from tests.messages import like


class Scripted:
    """In the place of `CommandLeader`: each rank is a host; `link` says what a link is each time it is measured."""

    def __init__(self, count: int, link: Callable[[tuple[int, int], int], dict]) -> None:
        self.count, self.link, self.missing = count, link, {}
        self.measured: list[tuple[int, int]] = []

    def ask(self, orders: Mapping[int, dict], seconds: float) -> dict[int, dict]:
        return {rank: self.answer(rank, order) for rank, order in orders.items()}

    def answer(self, rank: int, order: dict) -> dict:
        if order["act"] == "greet":
            return {"host": f"n{rank}", "node": rank}
        if order["act"] == "all_reduce":
            return {"bus_rate": 1e9, "seconds": 1e-4}
        if rank != order["ranks"][0]:
            return {}
        pair = tuple(order["ranks"])
        self.measured.append(pair)
        return self.link(pair, self.measured.count(pair))


def figures(rate: float, offset: float = 0.0) -> dict:
    return asdict(LinkFigures(rate, rate, 1e-4, offset, 1 << 24))


def links_of(leader: CommandLeader | Scripted, count: int) -> list[Finding]:
    found = Examination(leader, Started(0, count, 0, 1, 0))
    found._meet()
    found._links_until = float("inf")
    found._measure_between()
    return found._findings


def test_what_is_slow_once_is_measured_again_and_may_be_well() -> None:
    leader = Scripted(4, lambda pair, times: figures(1e8 if pair == (1, 2) and times == 1 else 1e9))
    findings = links_of(leader, 4)
    assert [leader.measured.count(pair) for pair in ((1, 2), (0, 1))] == [2, 1]
    assert {finding.status for finding in findings} == {"ok"}


def test_what_is_slow_twice_fails_by_the_names_of_its_hosts() -> None:
    leader = Scripted(4, lambda pair, times: figures(1e8 if pair == (1, 2) else 1e9))
    [slow] = [finding for finding in links_of(leader, 4) if finding.status != "ok"]
    assert (slow.status, slow.host, slow.value) == ("fail", "n1 - n2", "100 MB/s, 100 us")
    assert "the other 5 links: 1,000 MB/s to 1,000 MB/s" in slow.advice


def test_a_link_that_is_dead_fails_by_the_names_of_its_hosts() -> None:
    error = {"error": "RuntimeError: Connection closed by peer"}
    leader = Scripted(3, lambda pair, times: error if pair == (0, 2) else figures(1e9))
    [dead] = [finding for finding in links_of(leader, 3) if finding.status != "ok"]
    assert (dead.name, dead.host, dead.value) == ("link", "n0 - n2", "RuntimeError: Connection closed by peer")
    assert "GLOO_SOCKET_IFNAME" in dead.advice


def test_a_clock_is_found_over_links() -> None:
    """Host 2's is 3 s ahead, whoever measures."""
    leader = Scripted(3, lambda pair, times: figures(1e9, {(0, 2): 3.0, (1, 2): 3.0}.get(pair, 0.0)))
    clocks = [finding for finding in links_of(leader, 3) if finding.area == "clocks"]
    assert [(finding.host, finding.status) for finding in clocks] == [("n0", "ok"), ("n1", "ok"), ("n2", "warn")]
    assert clocks[2].value == "3.000 s ahead of the median"


def test_what_there_is_no_time_for_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Scripted(3, lambda pair, times: figures(1e9))
    found = Examination(leader, Started(0, 3, 0, 1, 0))
    found._meet()
    found._links_until = 0.0
    found._measure_between()
    assert leader.measured == []
    unmeasured = [finding for finding in found._findings if finding.name == "link"]
    assert [finding.status for finding in unmeasured] == ["warn"] * 3
    assert unmeasured[0].value == "not measured: the time for all links is over"


@pytest.mark.slow
def test_more_than_16_hosts_measure_their_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen participants, truly by gloo: threads of this process."""
    count, store = 17, HashStore()
    ranks = [Participant(store, Started(rank, count, 0, 1, rank), None, ()) for rank in range(count)]
    monkeypatch.setattr(examination, "MOST_CONFIRMED", 0)  # so many threads of two cores are slow
    threads = [threading.Thread(target=follow, args=(store, r, ranks[r].perform)) for r in range(1, count)]
    for thread in threads:
        thread.start()
    leader = CommandLeader(store, count, ranks[0].perform)
    findings = links_of(leader, count)
    leader.end({}, 10)
    for thread in threads:
        thread.join(20)
    links = [finding for finding in findings if finding.name == "link"]
    assert len(links) == 17 and all("bytes_per_second" in finding.figures for finding in links)
    [note] = [finding for finding in findings if finding.name == "links"]
    assert note.value == like("17 hosts: only neighbours on a ring were measured, no other pairs")
    clocks = [finding.figures["seconds_ahead"] for finding in findings if finding.area == "clocks"]
    assert len(clocks) == 17 and all(abs(ahead) < 0.5 for ahead in clocks)
    [summed] = [finding for finding in findings if finding.name == "all-reduce"]
    assert summed.status == "ok" and summed.value.endswith("17 ranks")
