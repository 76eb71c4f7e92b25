"""Seconds of a piece of work on some ranks, by what bounds them, and how much of their host it keeps busy. Pure.

A `Part` takes `seconds` where its ranks have what they need. Ranks that share a host's processors may not: `load` is
the share of them that the part keeps busy at full speed, 0 on devices of one's own, and with a share s of them it takes

    seconds x max(1, load / s)

`Device` turns sizes into parts with the numbers of a profile.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import ceil, log2
from typing import Literal

from hybridflow.automap.device import Collective, DeviceProfile, Link

Bound = Literal["products", "attention", "memory", "links", "launches", "waiting"]
SUM_BYTES = 4  # of a gradient's sum, float32
LOGIT_PASSES = 8  # over float32 logits, each way, in parallel/vocab.py


@dataclass(frozen=True)
class Part:
    bound: Bound
    seconds: float
    load: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Parts, one after another. waits: of them, seconds in which the ranks of each pipeline stage wait for others; ()
    where there is one stage."""

    parts: tuple[Part, ...] = ()
    waits: tuple[float, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """On devices of one's own."""
        return sum(part.seconds for part in self.parts)

    @cached_property
    def load(self) -> float:
        """The mean over the seconds."""
        return sum(part.seconds * part.load for part in self.parts) / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> Bound:
        """What takes most of it."""
        sums: dict[Bound, float] = {}
        for part in self.parts:
            sums[part.bound] = sums.get(part.bound, 0.0) + self._stretched(part, 1.0)
        return max(sums, key=lambda bound: sums[bound]) if sums else "waiting"

    def on_share(self, share: float) -> float:
        """Seconds with this share of the host's processors."""
        return sum(self._stretched(part, share) for part in self.parts)

    @staticmethod
    def _stretched(part: Part, share: float) -> float:
        return part.seconds * max(1.0, part.load / share)

    def __add__(self, other: "Cost") -> "Cost":
        return total((self, other))

    def times(self, count: float, *, busy: float = 1.0) -> "Cost":
        """So often one after another, on `busy` times as many ranks at once."""
        parts = tuple(Part(part.bound, part.seconds * count, part.load * busy) for part in self.parts)
        return Cost(parts, tuple(count * seconds for seconds in self.waits))

    def wait_of(self, stage: int) -> float:
        """The share of the seconds in which a rank of the stage waits."""
        return self.waits[stage] / self.seconds if self.waits and self.seconds else 0.0


def total(costs: Iterable[Cost]) -> Cost:
    """One after another; parts alike but for their seconds become one."""
    sums: dict[tuple[Bound, float], float] = {}
    waits: tuple[float, ...] = ()
    for cost in costs:
        if cost.waits:
            waits = tuple(map(sum, zip_longest(waits, cost.waits, fillvalue=0.0)))
        for part in cost.parts:
            key = (part.bound, part.load)
            sums[key] = sums.get(key, 0.0) + part.seconds
    return Cost(tuple(Part(bound, seconds, load) for (bound, load), seconds in sums.items() if seconds), waits)


class Device:
    """A profile, asked for the cost of operations on `busy` ranks at once. What was asked for is kept."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._rates: dict[tuple[str, float, float, float], float] = {}
        self._known: dict[Hashable, Cost] = {}

    def known(self, key: Hashable, find: Callable[[], Cost]) -> Cost:
        """The cost that was found for this key before, else what `find` says."""
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    # ---- on a rank

    def product(self, m: float, k: float, n: float, *, dtype: str, busy: float = 1.0) -> Cost:
        """2 m k n operations, or reading both matrices and writing the result: the longer of the two."""
        if min(m, k, n) <= 0:
            return Cost()
        computed = 2 * m * k * n / self._rate(m, k, n, dtype)
        if self.profile.product_rates(dtype).table:  # a measured rate is of the product as a whole
            return self._of("products", computed, busy)
        moved = self.itemsize(dtype) * (m * k + k * n + m * n) / self.profile.memory_bandwidth
        return self._of("products", computed, busy) if computed >= moved else self._of("memory", moved, busy)

    def grouped(self, m: float, k: float, n: float, groups: float, *, dtype: str, busy: float = 1.0) -> Cost:
        """As many products in one kernel, at their share of the rate of a single one."""
        if min(m, k, n, groups) <= 0:
            return Cost()
        rates = self.profile.product_rates(dtype)
        computed = groups * 2 * m * k * n / (self._rate(m, k, n, dtype) * self.profile.grouped_efficiency)
        if rates.table:
            return self._of("products", computed, busy)
        moved = groups * self.itemsize(dtype) * (m * k + k * n + m * n) / self.profile.memory_bandwidth
        return self._of("products", computed, busy) if computed >= moved else self._of("memory", moved, busy)

    def attention(self, operations: float, *, backward: bool = False, busy: float = 1.0) -> Cost:
        profile = self.profile
        rate = profile.attention_backward if backward else profile.attention_forward
        return self._of("attention", operations / rate, busy)

    def elementwise(self, num_bytes: float, *, backward: bool = False, busy: float = 1.0) -> Cost:
        profile = self.profile
        measured = profile.elementwise_backward if backward else None
        return self._of("memory", num_bytes / (measured or profile.elementwise_bandwidth), busy)

    def gradients(self, number: float, *, dtype: str, busy: float = 1.0) -> Cost:
        """Of so many elements, added to their float32 sum: read, and the sum read and written."""
        bandwidth = self.profile.gradient_bandwidth
        num_bytes = number * (self.itemsize(dtype) + 2 * SUM_BYTES)
        return self._of("memory", num_bytes / bandwidth, busy) if bandwidth else Cost()

    def logits(self, number: float, *, backward: bool, busy: float = 1.0) -> Cost:
        """Log-probs and entropy of rows of logits: so many passes over them, or as measured."""
        measured = self.profile.logits_backward if backward else self.profile.logits_forward
        if measured is None:
            return self.elementwise(LOGIT_PASSES * 4 * number, busy=busy)
        return self._of("memory", number / measured, busy)

    def memory(self, num_bytes: float, *, busy: float = 1.0) -> Cost:
        return self._of("memory", num_bytes / self.profile.memory_bandwidth, busy)

    def to_host(self, num_bytes: float, *, busy: float = 1.0) -> Cost:
        return self._of("memory", num_bytes / self.profile.host_bandwidth, busy)

    def to_disk(self, num_bytes: float) -> Cost:
        """Of a host, all ranks together."""
        return self._of("memory", num_bytes / self.profile.disk_bandwidth, 1.0)

    def overhead(self, seconds: float, *, busy: float = 1.0) -> Cost:
        return self._of("launches", seconds, busy)

    def launched(self, work: Cost, seconds: float, *, busy: float = 1.0) -> Cost:
        """Work whose launches take `seconds`: a device of its own works meanwhile, and waits for what is more.

        On a CPU launching is work like any other.
        """
        if self.profile.shared is None:
            seconds = max(0.0, seconds - work.seconds)
        return work + self.overhead(seconds, busy=busy)

    @staticmethod
    def itemsize(dtype: str) -> int:
        return {"float32": 4, "bfloat16": 2}[dtype]

    # ---- between ranks

    def all_reduce(self, num_bytes: float, ranks: int, *, hosts: int = 1, groups: int = 1) -> Cost:
        """A ring sends 2 (k - 1) / k of the bytes over each link, a tree has 2 log2 k messages in a row.

        hosts: that the ranks lie on. groups: of as many ranks, at once.
        """
        return self._collective(num_bytes, ranks, 2.0, hosts=hosts, groups=groups)

    def all_gather(self, num_bytes: float, ranks: int, *, hosts: int = 1, groups: int = 1) -> Cost:
        """num_bytes: of the whole, as of `reduce_scatter`: half of an all-reduce."""
        return self._collective(num_bytes, ranks, 1.0, hosts=hosts, groups=groups)

    reduce_scatter = all_gather

    def send(self, num_bytes: float, *, hosts: int = 1) -> Cost:
        """From a rank to another."""
        link = self._link(hosts)
        seconds = link.latency + num_bytes / link.bandwidth
        return Cost((Part("links", seconds, self._message_load()),))

    def all_to_all(self, num_bytes: float, ranks: int) -> Cost:
        """Each of neighbouring ranks sends so many bytes, as many to each, itself among them. Ranks of the host get
        theirs by the link inside, those of other hosts by the link between, at the same time: the longer counts."""
        profile = self.profile
        here = min(ranks, profile.ranks_per_host)
        of_one = num_bytes / ranks
        seconds = profile.inside.latency + (here - 1) * of_one / profile.inside.bandwidth
        if ranks > here:
            away = (ranks - here) * of_one * min(profile.between.sharers, here)
            seconds = max(seconds, profile.between.latency + away / profile.between.bandwidth)
        return Cost((Part("links", seconds, self._message_load()),))

    def _collective(self, num_bytes: float, ranks: int, passes: float, *, hosts: int, groups: int) -> Cost:
        if ranks <= 1:
            return Cost()
        if hosts == 1 and self.profile.collectives:
            one, more = self._measured(ranks)
            waits = Part("links", passes / 2 * more * one.latency, one.latency_load * groups)
            moves = Part("links", passes / 2 * more * num_bytes / one.bandwidth, one.bandwidth_load * groups)
            return Cost((waits, moves))
        link = self._link(hosts)
        shared = min(link.sharers, groups) if hosts > 1 else 1  # groups side by side share the host's adapter
        seconds = passes * (
            ceil(log2(ranks)) * link.latency + (ranks - 1) / ranks * num_bytes * shared / link.bandwidth
        )
        return Cost((Part("links", seconds, self._message_load() * ranks * groups),))

    def _measured(self, ranks: int) -> tuple[Collective, float]:
        """The smallest measured group that is as large, or the largest and how many times longer this one takes."""
        found = sorted(self.profile.collectives, key=lambda one: one.ranks)
        at = next((one for one in found if one.ranks >= ranks), found[-1])
        return at, max(1.0, ranks / at.ranks)

    def _link(self, hosts: int) -> Link:
        return self.profile.inside if hosts == 1 else self.profile.between

    # ---- inside

    def _rate(self, m: float, k: float, n: float, dtype: str) -> float:
        key = (dtype, m, k, n)
        if key not in self._rates:
            self._rates[key] = self.profile.product_rates(dtype).rate(m, k, n)
        return self._rates[key]

    def _of(self, bound: Bound, seconds: float, busy: float) -> Cost:
        return Cost((Part(bound, seconds, self._load(bound, busy)),)) if seconds else Cost()

    def _load(self, bound: Bound, busy: float) -> float:
        """Of so many ranks that do this at once."""
        shared = self.profile.shared
        if shared is None:
            return 0.0
        together = {"products": shared.products, "attention": shared.products, "memory": shared.memory}
        return busy / together.get(bound, shared.overhead)

    def _message_load(self) -> float:
        return 0.0 if self.profile.shared is None else 1 / self.profile.shared.overhead
