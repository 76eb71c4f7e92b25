"""A config whose `auto` is resolved for the devices that this run has, the same on every rank.

    config, lines = load_for_run("my.yaml", overrides)     collective over the ranks that torchrun has started

Rank 0 chooses, by the memory of the rank that has least, and the others take what it has chosen: a search that ends by
the clock may find another layout on another rank. Without `auto` no rank waits for another.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybridflow.automap.auto import Facts, resolve
from hybridflow.automap.device import DeviceProfile, load_profile
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.config.auto import autos, with_neutral
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.errors import ConfigError, DisagreementError, UserError
from hybridflow.parallel import torchrun
from hybridflow.parallel.device import choose_platform, uses_cuda
from hybridflow.parallel.host_memory import LEAST_MEMORY, host_memory
from hybridflow.placement.hosts import parse_hosts

Kind = TypeVar("Kind", ExperimentConfig, FixedDataConfig)
WAIT = timedelta(minutes=10)  # for rank 0, which may search for a minute
CPU_PROFILE, GPU_PROFILE = "cpu", "a100-80gb-sxm"  # where nothing is known of the device
# part of the name that CUDA has for a device -> profile; the first that is in it
BY_NAME = (("H200", "h200"), ("H100", "h100-sxm"), ("L40S", "l40s"), ("A100", "a100-80gb-sxm"))


def say(line: str) -> None:
    """How far a search is."""
    print(line, file=sys.stderr, flush=True)


def load_for_run(path: str | Path, overrides: Sequence[str] = ()) -> tuple[AnyConfig, tuple[str, ...]]:
    """The config, and what was chosen and why. Errors: ConfigError, on all ranks where nothing fits."""
    tree = read_tree(path, tuple(overrides))
    if not autos(tree):
        return config_class(tree).from_tree(tree, path), ()
    choose_platform(tree.get("platform", "auto"))
    rank, world_size = torchrun.torchrun_rank()
    store = torchrun.meeting_store(WAIT)
    store.set(f"memory/{rank}", str(memory_here()))
    if rank == 0:
        try:
            facts = facts_of(tree, min(int(store.get(f"memory/{other}")) for other in range(world_size)))
            found = resolve(tree, path, world_size, facts, say=say)
        except UserError as error:
            store.set("resolved", json.dumps({"error": str(error)}))
            raise
        store.set("resolved", json.dumps({"tree": found.tree, "lines": found.lines}))
    answer = json.loads(store.get("resolved"))
    if "error" in answer:
        raise ConfigError(answer["error"])
    return config_class(answer["tree"]).from_tree(answer["tree"], path), tuple(answer["lines"])


def read_for_run(kind: type[Kind], path: str | Path, overrides: Sequence[str] = ()) -> Kind:
    """The config of a file, which must be of this kind; rank 0 prints the choices. Errors: as `load_for_run`."""
    tree = read_tree(path, tuple(overrides))
    if not autos(tree):
        return kind.from_tree(tree, path)
    kind.from_tree(with_neutral(tree), path)  # one of the other kind is refused before any rank waits
    config, lines = load_for_run(path, overrides)
    if not isinstance(config, kind):
        raise DisagreementError(f"{path}: is a {kind.__name__} here, and a {type(config).__name__} on rank 0")
    if torchrun.torchrun_rank()[0] == 0:
        print("\n".join(lines), flush=True)
    return config


def resolved_for(
    tree: dict[str, Any], path: str | Path, world_size: int, facts: Facts | None = None
) -> tuple[AnyConfig, tuple[str, ...]]:
    """For one process that plans a run: resolves for `world_size` devices like the process's device, or for others."""
    if not autos(tree):
        return config_class(tree).from_tree(tree, path), ()
    if facts is None:
        facts = facts_of(tree, memory_here(world_size))
    found = resolve(tree, path, world_size, facts, say=say)
    return config_class(found.tree).from_tree(found.tree, path), found.lines


def memory_here(world_size: int | None = None) -> int:
    """Bytes of this rank's device; on a CPU a share of the host's memory, by the ranks that torchrun started there.

    world_size: without torchrun, so many on this host. All of the memory, not what is free now, which is another number
    at the next start.
    """
    if uses_cuda():
        return int(torch.cuda.get_device_properties(torchrun.started().local_rank).total_memory)
    return host_memory()[1] // (world_size or torchrun.started().local_world_size)


def facts_of(tree: dict[str, Any], memory_bytes: int) -> Facts:
    """Of the devices that this process computes on."""
    given = tree.get("device_profile")
    hosts = parse_hosts(torchrun.hosts_of_ranks())
    per_host = max(len(host.ranks) for host in hosts)
    changes = {"ranks_per_host": per_host, "host_memory_bytes": host_memory()[1]}
    if uses_cuda():
        name = torch.cuda.get_device_name()
        known = next((profile for part, profile in BY_NAME if part in name), None)
        profile = load_profile(given or known or GPU_PROFILE)
        whose = "" if given or known else ", which is another device: give device_profile"
        what = f"{name} (profile {profile.name}{whose})"
        return Facts(profile.model_copy(update=changes), memory_bytes, 0, what)
    profile = load_profile(given or CPU_PROFILE)
    whose = "" if given else ", a default that is of no particular machine: `hybridflow.plan --profile-device` measures"
    return Facts(
        profile.model_copy(update=changes), memory_bytes, LEAST_MEMORY, f"a CPU (profile {profile.name}{whose})"
    )


def facts_of_gpus(tree: dict[str, Any]) -> Facts | None:
    """Of the GPUs of this machine; None where there are none, or the config's run would not use any."""
    return facts_of(tree, memory_here()) if uses_cuda() and uses_cuda(tree.get("platform", "auto")) else None


def facts_by(profile: DeviceProfile, memory_bytes: int | None) -> Facts:
    """Of devices that need not be here."""
    margin = LEAST_MEMORY if profile.shared is not None else 0
    return Facts(profile, memory_bytes or profile.memory_bytes, margin, profile.name)
