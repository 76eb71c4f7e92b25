"""What is compared before anything starts: the same code and versions on every host, GPUs alike, and enough of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.launcher.hostfile import LaunchHost

Facts = Mapping[str, Any]  # of a host, as hybridflow/launcher/node.py tells them


def differences(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line for each thing that has to be alike and is not, with which host has what."""
    names = dict.fromkeys(name for facts in found.values() for name in facts["alike"])
    lines = []
    for name in names:
        values = {host: facts["alike"].get(name, "none") for host, facts in found.items()}
        if len(set(values.values())) == 1:
            continue
        if name == "the code of hybridflow":
            values = {host: f"{value}{_revision(found[host])}" for host, value in values.items()}
        lines.append(f"{name} differs: {_by_value(values)}")
    return lines


def missing(found: Mapping[LaunchHost, Facts], python: str, packages: Sequence[str]) -> list[str]:
    """A line for each package that the ranks need and no host has: where one has it, `differences` tells."""
    lines = []
    for package in packages:
        if all(facts["alike"].get(package, "none") == "none" for facts in found.values()):
            lines.append(f"{package} is not installed for {python}: `bash launch/setup.sh` installs it")
    return lines


def unlike_gpus(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line where hosts have other GPUs than others."""
    kinds = {host: _gpus(facts["gpus"]) for host, facts in found.items()}
    if len(set(kinds.values())) < 2:
        return []
    return [f"GPUs differ: {_by_value(kinds)}; --allow-unlike-gpus starts all the same"]


def too_few_gpus(found: Mapping[LaunchHost, Facts]) -> list[str]:
    """A line for each host with more slots than GPUs. Hosts without any are left to the config's platform."""
    return [
        f"{host}: slots={host.slots}, but it has {len(facts['gpus'])} GPUs: each rank needs its own"
        for host, facts in found.items()
        if facts["gpus"] and host.slots > len(facts["gpus"])
    ]


def _revision(facts: Facts) -> str:
    return f" (git {facts['revision']})" if facts["revision"] else ""


def _gpus(names: Sequence[str]) -> str:
    counted = [f"{count} x {name}" for name, count in Counter(names).items()]
    return " and ".join(counted) or "none"


def _by_value(values: Mapping[LaunchHost, str]) -> str:
    """`2.13.0 on a, b; 2.11.0 on c`"""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host.name)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in hosts.items())
