"""What a health check finds: one line for each thing looked at, and the report that they make up.

Findings travel between ranks, and to other programs, as JSON: `as_dict` and `from_dict` are each other's inverse.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
Figure = float | int | str | None
SEVERITY: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    area: str  # "packages", "links": the part of the table
    name: str  # what was looked at
    host: str  # the host, two of them joined by " - ", or "all"
    value: str  # what was found, for people
    status: Status = "ok"
    advice: str = ""  # what to do; never empty where the status is not ok
    figures: Mapping[str, Figure] = field(default_factory=dict)  # the numbers in `value`, units in their names

    def __post_init__(self) -> None:
        assert self.status == "ok" or self.advice, f"{self.area}, {self.name}: {self.status} without advice"


@dataclass(frozen=True)
class Host:
    """The ranks that one torchrun agent has started."""

    name: str  # "#NODE" tells two hosts of one name apart
    node: int  # torchrun's group rank
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HealthReport:
    """All that a health check has found, alike on every rank."""

    version: str  # hybridflow's
    world_size: int
    hosts: tuple[Host, ...]  # those that have answered
    device: str  # "CPU" or "CUDA"
    is_flash_attn_available: bool
    attention: Mapping[str, str]  # "training" and "rollout": the backend that each will use
    seconds: float  # that the check took
    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        """The worst status of the findings."""
        return worst(finding.status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0, or 1 where a finding fails; warnings do not fail."""
        return int(self.status == "fail")

    def as_dict(self) -> dict[str, Any]:
        """The report and the status as plain lists and dicts for JSON."""
        return {"status": self.status, **asdict(self)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "HealthReport":
        hosts = tuple(Host(host["name"], host["node"], tuple(host["ranks"])) for host in tree["hosts"])
        findings = tuple(Finding(**finding) for finding in tree["findings"])
        rest = {key: value for key, value in tree.items() if key not in ("status", "hosts", "findings")}
        return cls(hosts=hosts, findings=findings, **rest)


def worst(statuses: Iterable[Status]) -> Status:
    return max(statuses, key=SEVERITY.__getitem__, default="ok")


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):,.1f} GiB"


def rate(bytes_per_second: float) -> str:
    """In MB/s, of a million bytes, as networks count."""
    megabytes = bytes_per_second / 1e6
    return f"{megabytes:,.0f} MB/s" if megabytes >= 10 else f"{megabytes:.2g} MB/s"
