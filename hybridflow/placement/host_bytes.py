"""Host memory that a run takes for its devices: optimizer state, and copies for checkpoints. Pure.

    host_bytes(run)                            of each rank, by key=value of the config: actor.offload_optimizer=always
    need = fullest_host(run, hosts)            of the host whose ranks take most
    check_host_memory(run, host, available)    before a run begins; errors: ConfigError

On GPUs this memory is page-locked, never goes to disk, and is there from the start of a run to its end. On CPUs a state
that waits during generation takes what it gives back. Not counted are data, reward workers and other processes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridflow.config import TrainedRoleConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.host_memory import GIB, LEAST_MEMORY, locked_bytes, part_blocks
from hybridflow.parallel.ranks import counted
from hybridflow.placement.footprint import stage_optimizer_bytes
from hybridflow.placement.hosts import HostRanks
from hybridflow.placement.placed import PlacedModels
from hybridflow.placement.saving import copied_bytes

ASYNC_SAVE = "checkpoint.async_save=true"


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the ranks of a host take. by_key: by `key=value` of the config. libraries: 0 on CPUs."""

    host: HostRanks
    by_key: dict[str, int]
    libraries: int

    @property
    def bytes(self) -> int:
        return sum(self.by_key.values()) + self.libraries if self.by_key else 0

    @property
    def words(self) -> str:
        parts = [*self.by_key.items(), *([("libraries", self.libraries)] if self.libraries else [])]
        each = ", ".join(f"{what} {gib(size)}" for what, size in parts)
        return f"{counted(len(self.host.ranks))} take {gib(self.bytes)} GiB of the host's memory ({each})"

    def remedy(self, available: int) -> str:
        """The key that takes least of those of which one suffices, else all."""
        lacking = self.bytes - available
        enough = [key for key, size in sorted(self.by_key.items(), key=lambda item: item[1]) if size >= lacking]
        keys = " ".join(f"{key.partition('=')[0]}=false" for key in enough[:1] or self.by_key)
        return f"Set {keys}, or take hosts with more memory"


def host_bytes(run: PlacedModels) -> list[Counter[str]]:
    """Of each rank, by `key=value` of the config. Empty where nothing goes to host memory."""
    found = [Counter[str]() for _ in range(run.world_size)]
    for name, model in run.models.items():
        config, layout = model.config, model.layout
        if not isinstance(config, TrainedRoleConfig) or not config.offload_optimizer:
            continue
        staged = config.offload_optimizer == "always"
        if not staged and not run.cuda:
            continue
        states = stage_optimizer_bytes(model.spec, model.head, layout, config)
        sizes = [_blocks(size) if staged else locked_bytes(size) for size in states]
        for rank in layout.ranks:
            key = f"{name}.offload_optimizer={'always' if staged else 'true'}"
            found[rank][key] += sizes[layout.coordinates(rank).pp]
    if run.config.checkpoint.async_save:
        for rank, size in copied_bytes(run).items():
            found[rank][ASYNC_SAVE] += size
    return found


def _blocks(state_bytes: int) -> int:
    number, size = part_blocks(state_bytes)
    return number * size


def needs(run: PlacedModels, hosts: Iterable[HostRanks]) -> list[HostNeed]:
    """Of each host."""
    of_ranks, library = host_bytes(run), LEAST_MEMORY if run.cuda else 0
    sums = ((host, sum((of_ranks[rank] for rank in host.ranks), Counter[str]())) for host in hosts)
    return [HostNeed(host, dict(found), library * len(host.ranks)) for host, found in sums]


def fullest_host(run: PlacedModels, hosts: Iterable[HostRanks]) -> HostNeed:
    """The first of those alike."""
    return max(needs(run, hosts), key=lambda need: need.bytes)


def check_host_memory(run: PlacedModels, host: HostRanks, available: int) -> None:
    """available: bytes, before the ranks have loaded anything.

    Errors: ConfigError where the ranks of the host will take more, and the config has something in host memory.
    """
    (need,) = needs(run, [host])
    if not run.cuda and not any(key.endswith("=always") for key in need.by_key):
        return  # as before the key: a CPU's host may swap
    if need.bytes > available:
        raise ConfigError(f"{host.name}: {need.words}, {gib(available)} GiB are available. {need.remedy(available)}")


def host_report(run: PlacedModels, hosts: Iterable[HostRanks], has: int | None) -> dict[str, Any]:
    """For `hybridflow plan`, of the fullest host; empty where nothing is there. has: bytes of a host; None: unknown.

    lacks: whether that is too little.
    """
    need = fullest_host(run, hosts)
    if not need.by_key:
        return {}
    lacks = has is not None and need.bytes > has
    if has is None:
        line = f"{need.words}; --host-memory-gib says what a host has."
    else:
        line = f"{need.words}, a host has {gib(has)} GiB." + (f" {need.remedy(has)}." if lacks else "")
    return {
        "bytes": need.bytes,
        "by_key": need.by_key,
        "libraries_bytes": need.libraries,
        "has_bytes": has,
        "lacks": lacks,
        "line": line,
    }


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}".rstrip("0").rstrip(".") if num_bytes >= GIB / 100 else f"{num_bytes / GIB:.6f}"
