"""What measurements mean: which link is slow, whose clock is off, what hosts do not have alike. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hybridflow.inspection.findings import Finding, Status, rate

Ends = tuple[str, str]  # the names of two hosts, or of two ranks

SLOW_SHARE = 0.25  # of the median of like devices or links
MIN_LIKE = 2  # others that make a median worth comparing with
FLOOR = 12.5e6  # bytes a second, 100 Mbit/s: below it a link is slow whatever the others do
MOST_SKEW = 1.0  # seconds


# ------------------------------------------------------------------------------------------------ links


@dataclass(frozen=True)
class LinkFigures:
    """What the first end of a link has measured."""

    out_rate: float  # bytes a second, to the second end
    back_rate: float
    latency: float  # seconds, half of the shortest round trip
    offset: float  # seconds that the second end's clock is ahead
    num_bytes: int  # of the largest message

    @property
    def rate(self) -> float:
        """The rate of the slower direction counts."""
        return min(self.out_rate, self.back_rate)


def slow_links(rates: Mapping[Ends, float]) -> dict[Ends, str]:
    """The slow ones, by what they are compared with.

    Slow is below a quarter of the median of the other links, where there are at least two, and below 12.5 MB/s.
    """
    slow = {}
    for ends, own in rates.items():
        others = [value for other, value in rates.items() if other != ends]
        if len(others) >= MIN_LIKE and own < SLOW_SHARE * median(others):
            slow[ends] = f"the other {len(others)} links: {rate(min(others))} to {rate(max(others))}"
        elif own < FLOOR:
            slow[ends] = f"a link is slow below {rate(FLOOR)}"
    return slow


def link_findings(figures: Mapping[Ends, LinkFigures], *, area: str, fails: bool, causes: str) -> list[Finding]:
    """One for each link. fails: whether a slow one fails, or warns. causes: what may make it slow."""
    slow = slow_links({ends: found.rate for ends, found in figures.items()})
    shared = common_end(list(slow), list(figures))
    findings = []
    for ends, found in figures.items():
        compared = slow.get(ends)
        advice = "" if compared is None else _advice(ends, found, compared, shared, causes=causes)
        findings.append(_link(ends, found, advice, area=area, fails=fails))
    return findings


def _link(ends: Ends, found: LinkFigures, advice: str, *, area: str, fails: bool) -> Finding:
    """advice: empty where the link is not slow."""
    host = " - ".join(ends)
    numbers = {
        "bytes_per_second": round(found.rate),
        "bytes_per_second_out": round(found.out_rate),
        "bytes_per_second_back": round(found.back_rate),
        "latency_seconds": round(found.latency, 7),
        "message_bytes": found.num_bytes,
    }
    value = f"{rate(found.rate)}, {found.latency * 1e6:,.0f} us"
    status: Status = "ok" if not advice else "fail" if fails else "warn"
    return Finding(area, "link", host, value, status, advice=advice, figures=numbers)


def _advice(ends: Ends, found: LinkFigures, compared: str, shared: str | None, *, causes: str) -> str:
    way = f"from {ends[0]} to {ends[1]}" if found.out_rate <= found.back_rate else f"from {ends[1]} to {ends[0]}"
    where = f"every slow link is one of {shared}: " if shared else ""
    return f"slow, {way} {rate(found.rate)}; {compared}; {where}look at {causes}"


def common_end(slow: Sequence[Ends], links: Sequence[Ends]) -> str | None:
    """The end that two or more slow links have in common, if it has no other links."""
    if len(slow) < 2:
        return None
    shared = set(slow[0]).intersection(*map(set, slow[1:]))
    return next((end for end in sorted(shared) if all(link in slow for link in links if end in link)), None)


# ------------------------------------------------------------------------------------------------ clocks


def clock_offset(sent: float, received: float, answered: float, returned: float) -> tuple[float, float]:
    """(seconds that the other clock is ahead, seconds of the round trip), as NTP has it (RFC 5905, section 8).

    sent and returned by the own clock, received and answered by the other. The error is half the round trip at most.
    """
    ahead = ((received - sent) + (answered - returned)) / 2
    return ahead, (returned - sent) - (answered - received)


def clocks(offsets: Mapping[tuple[int, int], float], count: int) -> dict[int, float]:
    """Seconds by which the clock of each of `count` hosts is ahead of the median one; none for a host out of reach.

    offsets: (i, j) -> seconds that j is ahead of i. Hosts without a link to the first are reached through others.
    """
    known, waiting = {0: 0.0}, [0]
    while waiting:
        host = waiting.pop(0)
        for (one, other), ahead in offsets.items():
            for near, far, sign in ((one, other, 1), (other, one, -1)):
                if near == host and far not in known:
                    known[far] = known[host] + sign * ahead
                    waiting.append(far)
    middle = median(known.values())
    return {host: known[host] - middle for host in range(count) if host in known}


def clock_finding(host: str, ahead: float) -> Finding:
    """ahead: seconds, of the median clock of all hosts."""
    value = f"{abs(ahead):.3f} s {'ahead of' if ahead >= 0 else 'behind'} the median"
    figures = {"seconds_ahead": round(ahead, 6)}
    if abs(ahead) > MOST_SKEW:
        advice = f"more than {MOST_SKEW:g} s: logs and checkpoints of hosts cannot be put in order; run chrony or ntpd"
        return Finding("clocks", "clock", host, value, "warn", advice=advice, figures=figures)
    return Finding("clocks", "clock", host, value, figures=figures)


# ------------------------------------------------------------------------------------------------ agreement


def disagreements(area: str, values: Mapping[str, Mapping[str, str]], advice: str) -> list[Finding]:
    """A failing finding for each name that hosts have different values of, for each host that is not like most.

    values: host -> name -> value. A host that lacks a name has nothing to compare there.
    """
    findings = []
    for name in dict.fromkeys(name for own in values.values() for name in own):
        holders: dict[str, list[str]] = {}
        for host, own in values.items():
            if name in own:
                holders.setdefault(own[name], []).append(host)
        (usual, most), *others = sorted(holders.items(), key=lambda item: -len(item[1]))
        for value, hosts in others:
            text = f"{value}, but {', '.join(most)} {'has' if len(most) == 1 else 'have'} {usual}"
            findings += [Finding(area, name, host, text, "fail", advice=advice) for host in hosts]
    return findings
