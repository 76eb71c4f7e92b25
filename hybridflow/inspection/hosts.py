"""Who is on which host, and who does not answer. Pure."""

from collections.abc import Mapping, Sequence

from hybridflow.inspection.findings import Finding, Host
from hybridflow.parallel.ranks import shown


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
