"""Rank 0's part in a health check: who is there, what each host has found, what the links between them can do.

    report = examine(CommandLeader(store, world_size, participant.perform), started, config)

Every step asks some ranks and waits so long for their answers. A rank that gives none is left out from then on, and
the report names the rank's host.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridflow import __version__
from hybridflow.config.kinds import AnyConfig
from hybridflow.inspection.findings import Finding, HealthReport, Host, rate
from hybridflow.inspection.fit import Free, fit_findings
from hybridflow.inspection.groups import group_finding, memory_finding, rounds_of
from hybridflow.inspection.machine import DeviceFacts, device_findings
from hybridflow.inspection.participant import LOOK_SECONDS, MEASURE_SECONDS
from hybridflow.inspection.verdicts import (
    Ends,
    LinkFigures,
    clock_finding,
    clocks,
    disagreements,
    link_findings,
    slow_links,
)
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.rank0_commands import Answer, CommandLeader, Order
from hybridflow.parallel.ranks import counted, shown
from hybridflow.parallel.torchrun import Started
from hybridflow.placement.placed import place

Pair = tuple[int, int]  # of places in a list, the smaller first
GREET_SECONDS = 60.0  # ranks load torch at different speeds
ANSWER_SECONDS = LOOK_SECONDS + 15
ROUND_SECONDS = MEASURE_SECONDS + 5
ALL_LINKS_SECONDS = 150.0  # what is not measured by then is not measured
MOST_FOR_ALL_PAIRS = 16  # hosts; with more of them only neighbours on a ring are measured
MOST_CONFIRMED = 8  # slow links that are measured again, alone
INSIDE, BETWEEN = "links inside a host", "links between hosts"
CAUSES = {  # of a slow link
    INSIDE: "what else runs there, at `nvidia-smi topo -m`, and at /dev/shm",
    BETWEEN: "cable, switch port, network card and its speed",
}
SAME_FILES = "make it the same on all hosts: a shared file system, or copies of one and the same file"
SAME_PACKAGES = "install the same releases on all hosts: bash launch/setup.sh"
DEAD = "no connection: look at cable, switch and firewall between them, and at GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"


class Examination:
    """One health check as rank 0 conducts it."""

    def __init__(self, leader: CommandLeader, started: Started) -> None:
        self._leader, self._started = leader, started
        self._hosts: tuple[Host, ...] = ()
        self._findings: list[Finding] = []
        self._facts: dict[int, dict[str, Any]] = {}  # by rank
        self._num_groups = 0
        self._links_until = 0.0

    def report(self, config: AnyConfig | None) -> HealthReport:
        """All findings, in the order of the table."""
        start = time.monotonic()
        self._meet()
        self._look()
        self._compare()
        self._links_until = time.monotonic() + ALL_LINKS_SECONDS
        self._measure_inside()
        self._measure_between()
        self._measure_all_ranks()
        if config is not None:
            self._fit(config)
            self._make_groups(config)
        self._name_missing()
        first = self._facts.get(0, {})
        return HealthReport(
            version=__version__,
            world_size=self._started.world_size,
            hosts=self._hosts,
            device="CUDA" if uses_cuda() else "CPU",
            is_flash_attn_available=first.get("is_flash_attn_available", False),
            attention=first.get("attention", {}),
            seconds=round(time.monotonic() - start, 1),
            findings=tuple(self._findings),
        )

    # -------------------------------------------------------------------------------------------- hosts

    def _meet(self) -> None:
        """Learn which ranks there are, and on which hosts."""
        greet: Order = {"act": "greet"}
        answers = self._leader.ask(dict.fromkeys(range(self._started.world_size), greet), GREET_SECONDS)
        self._hosts = hosts_of({rank: (answer["host"], answer["node"]) for rank, answer in answers.items()})

    def _look(self) -> None:
        orders: dict[int, Order] = {}
        for host in self._hosts:
            order = {"act": "look", "host": host.name, "num_ranks": len(host.ranks)}
            orders |= {rank: {**order, "first": rank == host.ranks[0]} for rank in host.ranks}
        answers = self._leader.ask(orders, ANSWER_SECONDS)
        self._facts = {rank: answer.get("facts", {}) for rank, answer in answers.items()}
        for host in self._hosts:
            devices = {rank: DeviceFacts(**self._facts[rank]["device"]) for rank in self._ranks_with(host, "device")}
            self._findings += device_findings(devices, host.name) if devices else []
            for rank in host.ranks:
                self._findings += [Finding(**finding) for finding in answers.get(rank, {}).get("findings", [])]

    def _ranks_with(self, host: Host, fact: str) -> list[int]:
        return [rank for rank in host.ranks if fact in self._facts.get(rank, {})]

    def _of_hosts(self, fact: str) -> dict[str, Any]:
        """By host, the answers of the host's first rank."""
        firsts = {host.name: self._facts.get(host.ranks[0], {}) for host in self._hosts}
        return {name: facts[fact] for name, facts in firsts.items() if fact in facts}

    def _compare(self) -> None:
        """Packages, code, files and GPUs, which must be alike on all hosts."""
        self._findings += disagreements("packages", self._of_hosts("versions"), SAME_PACKAGES)
        code = {name: {"hybridflow's code": digest} for name, digest in self._of_hosts("code").items()}
        self._findings += disagreements("packages", code, "bring every host to the same commit")
        self._findings += disagreements("inputs", self._of_hosts("digests"), SAME_FILES)
        gpus = {host.name: self._gpus(host) for host in self._hosts if self._ranks_with(host, "device")}
        advice = "a run goes as slow as its slowest device: take hosts that are alike, or the same --nproc-per-node"
        self._findings += disagreements("machine", gpus, advice)

    def _gpus(self, host: Host) -> dict[str, str]:
        devices = [self._facts[rank]["device"] for rank in self._ranks_with(host, "device")]
        return {
            "device types": ", ".join(sorted({device["name"] for device in devices})),
            "ranks on a host": str(len(host.ranks)),
        }

    # -------------------------------------------------------------------------------------------- links

    def _measure_inside(self) -> None:
        """Neighbours on a ring of each host's ranks, all hosts at a time, and all-reduce on each host."""
        names = {rank: f"rank {rank} on {host.name}" for host in self._hosts for rank in host.ranks}
        rings = [[_at(pairs, host.ranks) for pairs in ring(len(host.ranks))] for host in self._hosts]
        most = max(map(len, rings), default=0)
        rounds = [[pair for pairs in rings for pair in (pairs[i] if i < len(pairs) else [])] for i in range(most)]
        self._links(rounds, names, area=INSIDE, fails=uses_cuda())
        self._all_reduces({host.name: host.ranks for host in self._hosts if len(host.ranks) > 1}, INSIDE)

    def _measure_between(self) -> None:
        """The first ranks of hosts in pairs, their clocks by the way, and all-reduce over them."""
        if len(self._hosts) < 2:
            return
        firsts = tuple(host.ranks[0] for host in self._hosts)
        names = {host.ranks[0]: host.name for host in self._hosts}
        rounds = [_at(pairs, firsts) for pairs in between_hosts(len(firsts))]
        measured = self._links(rounds, names, area=BETWEEN, fails=True)
        if len(firsts) > MOST_FOR_ALL_PAIRS:
            value = f"{len(firsts)} hosts: only neighbours on a ring were measured, no other pairs"
            self._findings.append(Finding(BETWEEN, "links", "all", value))
        places = {rank: place for place, rank in enumerate(firsts)}
        self._clocks({(places[one], places[other]): found.offset for (one, other), found in measured.items()})
        self._all_reduces({"the first ranks of all hosts": firsts}, BETWEEN)

    def _measure_all_ranks(self) -> None:
        """As training makes groups: every rank meets every other one."""
        present = tuple(rank for host in self._hosts for rank in host.ranks if rank not in self._leader.missing)
        if len(self._hosts) > 1 and len(present) > len(self._hosts):
            self._all_reduces({"all ranks": tuple(sorted(present))}, BETWEEN)

    def _links(
        self, rounds: Sequence[Sequence[Pair]], names: Mapping[int, str], *, area: str, fails: bool
    ) -> dict[Pair, LinkFigures]:
        """Measure pairs of ranks, round by round; those that seem slow once more, alone: noise is not a slow link."""
        measured: dict[Pair, LinkFigures] = {}
        for pairs in rounds:
            measured |= self._round(pairs, names, area)
        ends = {pair: (names[pair[0]], names[pair[1]]) for pair in measured}
        slow = slow_links({ends[pair]: found.rate for pair, found in measured.items()})
        again = sorted((pair for pair in measured if ends[pair] in slow), key=lambda pair: measured[pair].rate)
        for pair in again[:MOST_CONFIRMED]:
            for _, found in self._round([pair], names, area).items():
                measured[pair] = max(measured[pair], found, key=lambda figures: figures.rate)
        figures: dict[Ends, LinkFigures] = {ends[pair]: found for pair, found in measured.items()}
        self._findings += link_findings(figures, area=area, fails=fails, causes=CAUSES[area])
        return measured

    def _round(self, pairs: Iterable[Pair], names: Mapping[int, str], area: str) -> dict[Pair, LinkFigures]:
        """Measure disjoint pairs at a time. A pair that has no connection becomes a failing line."""
        pairs = [pair for pair in pairs if not set(pair) & set(self._leader.missing)]
        if time.monotonic() > self._links_until:
            value, advice = "not measured: the time for all links is over", "look at the lines that fail first"
            self._findings += [
                Finding(area, "link", _ends(pair, names), value, "warn", advice=advice) for pair in pairs
            ]
            return {}
        orders: dict[int, Order] = {}
        for pair in pairs:
            orders |= dict.fromkeys(pair, self._order("link", pair))
        answers = self._leader.ask(orders, ROUND_SECONDS)
        measured = {}
        for pair in pairs:
            error = _error(answers, pair)
            if error is None:
                measured[pair] = LinkFigures(**answers[pair[0]])
            else:
                self._findings.append(Finding(area, "link", _ends(pair, names), error, "fail", advice=DEAD))
        return measured

    def _order(self, act: str, ranks: tuple[int, ...]) -> Order:
        self._num_groups += 1
        return {"act": act, "ranks": list(ranks), "group": str(self._num_groups)}

    def _all_reduces(self, groups: Mapping[str, tuple[int, ...]], area: str) -> None:
        """In all of these disjoint groups at a time."""
        there = {name: tuple(r for r in ranks if r not in self._leader.missing) for name, ranks in groups.items()}
        there = {name: ranks for name, ranks in there.items() if len(ranks) > 1}
        orders: dict[int, Order] = {}
        for ranks in there.values():
            orders |= dict.fromkeys(ranks, self._order("all_reduce", ranks))
        answers = self._leader.ask(orders, ROUND_SECONDS)
        for name, ranks in there.items():
            error = _error(answers, ranks)
            if error is not None:
                self._findings.append(Finding(area, "all-reduce", name, error, "fail", advice=DEAD))
                continue
            found = answers[ranks[0]]
            value = f"{rate(found['bus_rate'])} bus, {found['seconds'] * 1e6:,.0f} us, {counted(len(ranks))}"
            figures = {"bus_bytes_per_second": round(found["bus_rate"]), "latency_seconds": round(found["seconds"], 7)}
            self._findings.append(Finding(area, "all-reduce", name, value, figures=figures))

    def _clocks(self, offsets: Mapping[Pair, float]) -> None:
        ahead = clocks(offsets, len(self._hosts))
        for number, host in enumerate(self._hosts):
            if number in ahead:
                self._findings.append(clock_finding(host.name, ahead[number]))

    # -------------------------------------------------------------------------------------------- the config

    def _fit(self, config: AnyConfig) -> None:
        """Whether it runs on these ranks; not asked where some are missing, of which nothing is known."""
        devices = {rank: facts["device"] for rank, facts in self._facts.items() if "device" in facts}
        memory = self._of_hosts("memory")
        if len(devices) < self._started.world_size or len(memory) < len(self._hosts):
            value, advice = "not looked at: not all ranks have told what they have", "look at the lines that fail first"
            self._findings.append(Finding("plan", "layout", "all", value, "warn", advice=advice))
            return
        gpus = {rank: device["free_bytes"] for rank, device in devices.items() if device["free_bytes"] is not None}
        disk = {
            finding.host: int(finding.figures["free_bytes"] or 0)
            for finding in self._findings
            if finding.name == "free space"
        }
        self._findings += fit_findings(config, self._started.world_size, self._hosts, Free(gpus, memory, disk))

    def _make_groups(self, config: AnyConfig) -> None:
        """Those of the run, one kind after the other. Not where the config does not fit, or a rank is missing."""
        layouts = [finding.status for finding in self._findings if (finding.area, finding.name) == ("plan", "layout")]
        if self._leader.missing or layouts != ["ok"]:
            return
        first, last = dict[int, Answer](), dict[int, Answer]()
        for made in rounds_of(place(config, self._started.world_size, cuda=uses_cuda())):
            orders = {rank: order for ranks in made for order in [self._order("make_group", ranks)] for rank in ranks}
            answers = self._leader.ask(orders, ROUND_SECONDS)
            for ranks in made:
                if (error := _error(answers, ranks)) is not None:
                    self._findings.append(Finding("groups", shown(ranks), "all", error, "fail", advice=DEAD))
                    return  # later groups have these ranks, too
            self._findings.append(group_finding(made, answers))
            first, last = {**answers, **first}, {**last, **answers}
        memory = memory_finding(first, last)
        self._findings += [] if memory is None else [memory]

    def _name_missing(self) -> None:
        nodes = {host.node: host.name for host in self._hosts}
        self._findings[:0] = missing_findings(self._leader.missing, nodes, self._hosts, self._started.local_world_size)


def _at(pairs: Iterable[Pair], ranks: Sequence[int]) -> list[Pair]:
    """Pairs of places as pairs of ranks."""
    return [(ranks[one], ranks[other]) for one, other in pairs]


def _ends(pair: Pair, names: Mapping[int, str]) -> str:
    return f"{names[pair[0]]} - {names[pair[1]]}"


def _error(answers: Mapping[int, Answer], ranks: Iterable[int]) -> str | None:
    """Why there is nothing: what a rank says of it, or that it says nothing."""
    for rank in ranks:
        if rank not in answers:
            return f"rank {rank} has not answered"
        if "error" in answers[rank]:
            return str(answers[rank]["error"])
    return None


# ------------------------------------------------------------------------------------------------ hosts


def hosts_of(places: Mapping[int, tuple[str, int]]) -> tuple[Host, ...]:
    """places: rank -> (host name, node). Where two nodes bear one name, "#NODE" tells them apart. Pure."""
    ranks: dict[int, list[int]] = {}
    for rank in sorted(places):
        ranks.setdefault(places[rank][1], []).append(rank)
    names = {node: places[ranks[node][0]][0] for node in ranks}
    shared = [name for name in names.values() if list(names.values()).count(name) > 1]
    return tuple(
        Host(f"{names[node]}#{node}" if names[node] in shared else names[node], node, tuple(ranks[node]))
        for node in sorted(ranks)
    )


def missing_findings(
    missing: Mapping[int, str], nodes: Mapping[int, str], hosts: Sequence[Host], local_world_size: int
) -> list[Finding]:
    """One for each host with ranks that have not answered. Of one that has never spoken only torchrun's node is known,
    by the ranks that this one's agent has started. Pure.
    """
    by_host: dict[str, list[int]] = {}
    known = {rank: host.name for host in hosts for rank in host.ranks}
    for rank in sorted(missing):
        node = rank // local_world_size
        by_host.setdefault(known.get(rank) or nodes.get(node) or f"torchrun's node {node}", []).append(rank)
    advice = "is that host up, and its torchrun running? See its output; ranks that hang name where they were"
    return [
        Finding(
            "hosts", "answer", host, f"ranks {shown(ranks)} are silent: {_doing(ranks, missing)}", "fail", advice=advice
        )
        for host, ranks in by_host.items()
    ]


def _doing(ranks: Sequence[int], missing: Mapping[int, str]) -> str:
    return ", ".join(dict.fromkeys(missing[rank] for rank in ranks))


# ------------------------------------------------------------------------------------------------ rounds of links

# Rounds of disjoint pairs, so that no host serves two links at once.


def all_pairs(count: int) -> list[list[Pair]]:
    """Every pair once, in as few rounds as there can be: the circle method of tournaments."""
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)  # who meets nobody sits out
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([_ordered(one, other) for one, other in meetings if one is not None and other is not None])
        places.insert(1, places.pop())
    return [pairs for pairs in rounds if pairs]


def ring(count: int) -> list[list[Pair]]:
    """Each place with the next one, and the last with the first: two rounds, three where the count is odd."""
    if count < 2:
        return []
    edges = [(place, place + 1) for place in range(count - 1)]
    rounds = [edges[0::2], edges[1::2]]
    if count > 2:
        closing = [(0, count - 1)]
        if count % 2:
            rounds.append(closing)
        else:
            rounds[1] = rounds[1] + closing
    return [pairs for pairs in rounds if pairs]


def between_hosts(count: int) -> list[list[Pair]]:
    return all_pairs(count) if count <= MOST_FOR_ALL_PAIRS else ring(count)


def _ordered(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
