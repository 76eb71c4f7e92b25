"""Whether a config fits the ranks that there are, their memory and their disks. Pure but for config.json.

Of memory it asks for what `placement.forecast` counts; what libraries take beside it is a margin that warns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import UserError
from hybridflow.inspection.findings import Finding, Host, gigabytes
from hybridflow.parallel.host_memory import LEAST_MEMORY
from hybridflow.parallel.ranks import counted, shown
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.forecast import Fullest, forecast, memory_of, peaks
from hybridflow.placement.host_bytes import HostNeed, needs
from hybridflow.placement.hosts import HostRanks, check_hosts
from hybridflow.placement.placed import PlacedModels, place

AREA = "plan"
LESS = (
    "rollout.kv_cache_gib, micro_batch_tokens, offload_optimizer=always on GPUs, or more ranks; hybridflow.plan shows "
    "what takes it"
)


@dataclass(frozen=True)
class Free:
    """Bytes that are free now."""

    gpus: Mapping[int, int]  # by rank; empty where ranks compute on CPUs
    memory: Mapping[str, int]  # of hosts by name
    disk: Mapping[str, int]  # where output_dir lies, of hosts by name


def fit_findings(config: AnyConfig, world_size: int, hosts: tuple[Host, ...], free: Free) -> list[Finding]:
    """Every reason why the config cannot run on so many ranks; else what it will hold against what is free."""
    try:
        run = place(config, world_size, cuda=bool(free.gpus))
        run = with_room(run, min(free.gpus.values())) if free.gpus else run
        lie_on = [HostRanks(host.name, range(host.ranks[0], host.ranks[-1] + 1)) for host in hosts]
        check_hosts(run, lie_on)
    except UserError as error:
        advice = f"python -m hybridflow.plan CONFIG --world-size {world_size} says the same without any rank"
        return [Finding(AREA, "layout", "all", line, "fail", advice=advice) for line in str(error).splitlines()]
    lie = {name: model.layout.ranks for name, model in run.models.items()}
    if run.rollout is not None and run.rollout.ranks != run.trained.layout.ranks:
        lie["engine"] = run.rollout.ranks
    roles = ", ".join(f"{name} on {shown(ranks)}" for name, ranks in lie.items())
    needed, taken = peaks(memory_of(run), range(run.world_size)), {need.host.name: need for need in needs(run, lie_on)}

    return [
        Finding(AREA, "layout", "all", f"{counted(world_size)}: {roles}"),
        *(
            finding
            for host in hosts
            for finding in _memory_findings(host, [needed[rank] for rank in host.ranks], taken[host.name], free)
        ),
        *_disk_findings(run, free, hosts[0]),
    ]


def gpu_finding(host: Host, needed: Sequence[Fullest], free: Free) -> Finding:
    """Of the rank with least room. needed: of the ranks of the host."""
    most = min(needed, key=lambda each: free.gpus[each.rank] - each.needed)
    rank, beside, bytes_needed, bytes_free = most.rank, most.margin, most.bytes, free.gpus[most.rank]
    holds = f"rank {rank} will hold {gigabytes(bytes_needed)} ({most.moment}), libraries {gigabytes(beside.total)}"
    value = f"{holds} ({beside.words}); {gigabytes(bytes_free)} are free"
    figures = {"rank": rank, "needed_bytes": bytes_needed, "margin_bytes": beside.total, "free_bytes": bytes_free}
    if bytes_needed > bytes_free:
        return Finding(AREA, "GPU memory", host.name, value, "fail", advice=f"too little: less {LESS}", figures=figures)
    if bytes_needed + beside.total > bytes_free:
        advice = f"too little for what libraries take, which is an estimate: less {LESS}"
        return Finding(AREA, "GPU memory", host.name, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "GPU memory", host.name, value, figures=figures)


def _memory_findings(host: Host, needed: Sequence[Fullest], taken: HostNeed, free: Free) -> list[Finding]:
    if not free.gpus:
        return [memory_finding(host, needed, taken, free)]
    return [gpu_finding(host, needed, free), *([host_finding(host, taken, free)] if taken.by_key else [])]


def host_finding(host: Host, taken: HostNeed, free: Free) -> Finding:
    """What the host's ranks take of its memory for their GPUs."""
    available = free.memory[host.name]
    value = f"{taken.words}, {gigabytes(available)} are available"
    figures = {"needed_bytes": taken.bytes, "available_bytes": available}
    if taken.bytes > available:
        return Finding(AREA, "memory", host.name, value, "fail", advice=taken.remedy(available), figures=figures)
    return Finding(AREA, "memory", host.name, value, figures=figures)


def memory_finding(host: Host, needed: Sequence[Fullest], taken: HostNeed, free: Free) -> Finding:
    """Of all ranks of a host, which share the host's memory. taken: what is not in the table of device memory."""
    bytes_needed, available = sum(each.bytes for each in needed) + taken.bytes, free.memory[host.name]
    ranks = counted(len(host.ranks), "rank")
    value = f"{ranks} there will hold {gigabytes(bytes_needed)}, {gigabytes(available)} are available"
    figures = {"needed_bytes": bytes_needed, "available_bytes": available}
    if bytes_needed > available:
        return Finding(AREA, "memory", host.name, value, "fail", advice=f"too little: less {LESS}", figures=figures)
    margin = len(host.ranks) * LEAST_MEMORY
    if bytes_needed + margin > available:
        advice = f"Python and libraries take about {gigabytes(margin)} more: less {LESS}"
        return Finding(AREA, "memory", host.name, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "memory", host.name, value, figures=figures)


def _disk_findings(run: PlacedModels, free: Free, host: Host) -> list[Finding]:
    """Of the first host, by the sum of all ranks' checkpoints: the output directory is one for all."""
    if host.name not in free.disk:
        return []
    kept, room = forecast(run)["checkpoint"]["kept_bytes"], free.disk[host.name]
    value = f"checkpoints take {gigabytes(kept)} at most, {gigabytes(room)} are free"
    figures = {"needed_bytes": kept, "free_bytes": room}
    if kept > room:
        advice = "less checkpoint.keep_last, a larger disk for output_dir, or remove old runs"
        return [Finding(AREA, "checkpoints", host.name, value, "warn", advice=advice, figures=figures)]
    return [Finding(AREA, "checkpoints", host.name, value, figures=figures)]
