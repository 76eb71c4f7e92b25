"""Which rank lies on which host: those of a host stand side by side, and tensor-parallel groups stay within one. Pure.

hosts = parse_hosts("worker-0=8,worker-1=8")
check_hosts(placed, hosts)                      # errors: ConfigError
print(placement_lines(placed, hosts))
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError, Reasons, remedy
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.parallel.ranks import counted, shown
from hybridflow.placement.placed import PlacedModels, PlacedRun, place


@dataclass(frozen=True)
class HostRanks:
    """A host of a run, with the host's ranks."""

    name: str
    ranks: range


def parse_hosts(text: str) -> list[HostRanks]:
    """`NAME=RANKS,...`, in the order of the ranks. Errors: ConfigError."""
    hosts: list[HostRanks] = []
    for part in text.split(","):
        found = re.fullmatch(r"([^=,]+)=([1-9][0-9]{0,6})", part)
        if not found:
            raise ConfigError(
                f"hosts {text!r}: {part!r} is not NAME=N, a host and the number of the host's ranks. Name all hosts of "
                "the run: worker-0=8,worker-1=8. A number of hosts goes with `hybridflow plan --search` alone"
            )
        first = hosts[-1].ranks.stop if hosts else 0
        hosts.append(HostRanks(found[1], range(first, first + int(found[2]))))
    return hosts


def equal_hosts(world_size: int, per_host: int) -> list[HostRanks]:
    """As many hosts as it takes; the last may have fewer ranks."""
    starts = range(0, world_size, per_host)
    return [HostRanks(f"host {i}", range(at, min(at + per_host, world_size))) for i, at in enumerate(starts)]


def check_hosts(placed: PlacedModels, hosts: Sequence[HostRanks]) -> None:
    """Errors: ConfigError unless each tensor-parallel group lies on one host, or the config says that it need not.

    Such ranks exchange activations several times a layer: over a network between hosts that takes most of the time.
    """
    if placed.config.tensor_parallel_across_hosts:
        return
    reasons, of = Reasons(), _host_of(hosts)
    for key, groups in _tensor_parallel_groups(placed):
        for group in groups:
            met = list(dict.fromkeys(of[rank] for rank in group))
            if len(met) > 1:
                size = gcd(len(group), *(len(host.ranks) for host in hosts))
                settings: dict[str, list[Any]] = {key.split()[0]: [size], "tensor_parallel_across_hosts": [True]}
                reasons.lines.append(
                    f"{key} = {len(group)}: ranks {shown(group)} lie on {' and '.join(met)} "
                    f"({', '.join(f'{host.name} has {shown(host.ranks)}' for host in hosts if host.name in met)}): a "
                    f"tensor-parallel group stays on one host{remedy(settings)}"
                )
                break  # one group of a role tells enough
    reasons.refuse()


def place_on_hosts(
    config: AnyConfig, hosts: Sequence[HostRanks], least: int
) -> tuple[PlacedModels, Sequence[HostRanks], dict[int, str]]:
    """The run on as many of the first hosts as it fits on, `least` or more; these; and why not on other numbers.

    Errors: ConfigError with the sum, where it fits on no number of them.
    """
    found, unfit = None, dict[int, str]()
    for count in range(len(hosts), least - 1, -1):
        try:
            placed = _placed_on(config, hosts[:count])
            found = found or (placed, hosts[:count])
        except ConfigError as error:
            unfit[count] = str(error)
    if found is None:
        lines = unfit[len(hosts)].splitlines()
        raise ConfigError("\n".join(f"{_sum(hosts)}: {line}" for line in lines))
    return *found, {count: reason.splitlines()[0] for count, reason in unfit.items()}


def _placed_on(config: AnyConfig, hosts: Sequence[HostRanks]) -> PlacedModels:
    placed = place(config, hosts[-1].ranks.stop)
    check_hosts(placed, hosts)
    return placed


def _sum(hosts: Sequence[HostRanks]) -> str:
    """`3 hosts with 2 + 2 + 2 = 6 ranks`"""
    sizes = [len(host.ranks) for host in hosts]
    if len(sizes) == 1:
        return f"1 host with {counted(sizes[0])}"
    parts = f"{len(sizes)} x {sizes[0]}" if len(sizes) > 8 and len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    return f"{len(sizes)} hosts with {parts} = {sum(sizes)} ranks"


def for_launch(placed: PlacedModels, hosts: Sequence[HostRanks], unfit: Mapping[int, str]) -> dict[str, Any]:
    """What hybridflow/launcher/experiment.py reads, as JSON."""
    config = placed.config
    return {
        "run_dir": str(config.run_dir),
        "loads_own": config.checkpoint.load == "auto",
        "environment": config.env_vars,
        "grace_seconds": config.checkpoint.grace_seconds,
        "computes_on_cpu": config.platform == "cpu",
        "num_hosts": len(hosts),
        "unfit": unfit,
        "placement": placement_lines(placed, hosts),
    }


def placement_lines(placed: PlacedModels, hosts: Sequence[HostRanks]) -> str:
    """A line a host and a column a model: coordinates there."""
    layouts: dict[str, Layout | RolloutLayout] = {name: model.layout for name, model in placed.models.items()}
    if placed.rollout is not None:
        layouts["engine"] = placed.rollout
    rows = [["host", "ranks", *layouts]]
    for host in hosts:
        rows.append([host.name, shown(host.ranks), *(_coordinates(layout, host.ranks) for layout in layouts.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _tensor_parallel_groups(placed: PlacedModels) -> Iterable[tuple[str, list[tuple[int, ...]]]]:
    for name, model in placed.models.items():
        yield f"{name}.tensor_parallel_size", model.layout.groups("tp")
    if not isinstance(placed, PlacedRun):
        return
    key = "rollout.tensor_parallel_size"
    groups = [tuple(group) for group in placed.rollout.tp_groups()]
    yield key if placed.config.rollout.tensor_parallel_size else f"{key} (the actor's)", groups


def _host_of(hosts: Iterable[HostRanks]) -> dict[int, str]:
    return {rank: host.name for host in hosts for rank in host.ranks}


def _coordinates(layout: Layout | RolloutLayout, ranks: range) -> str:
    """`tp 0-1 dp 0 pp 0` of those ranks that are in the layout; cp where ranks share tokens."""
    found = [layout.coordinates(rank)._asdict() for rank in ranks if rank in layout]
    axes = [axis for axis in found[0] if axis != "cp" or getattr(layout, axis) > 1] if found else []
    return " ".join(f"{axis} {shown(sorted({each[axis] for each in found}))}" for axis in axes) or "-"
