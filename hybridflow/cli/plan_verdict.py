"""The last line of `hybridflow plan`: whether the run fits the memory of a device, and what would help."""

import argparse
from typing import TYPE_CHECKING, TypeVar

from hybridflow.config import RunConfig
from hybridflow.parallel.ranks import counted
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.forecast import fullest
from hybridflow.placement.host_bytes import host_bytes
from hybridflow.placement.placed import PlacedRun
from hybridflow.placement.verdict import Change, Verdict, verdict

if TYPE_CHECKING:
    from hybridflow.automap.auto import Facts
    from hybridflow.placement.forecast import Report
    from hybridflow.placement.placed import PlacedModels

GIB = 1 << 30
Config = TypeVar("Config", bound=RunConfig)
OTHERS = "For GPUs give --memory-gib, --profile, or device_profile in the config."
UNKNOWN = f"No verdict: no device memory is known. {OTHERS}"


def known_facts(options: argparse.Namespace, config: RunConfig, default_profile: str) -> "Facts | None":
    """Of the devices that are named, or are here; None where none are known."""
    from hybridflow.automap.device import load_profile
    from hybridflow.trainers.auto import facts_by, facts_of_gpus

    memory = None if options.memory_gib is None else int(options.memory_gib * GIB)
    named = options.profile or config.device_profile
    if named or options.memory_gib:
        return facts_by(load_profile(named or default_profile), memory)
    here = facts_of_gpus({"platform": config.platform, "device_profile": None})
    return facts_by(load_profile(default_profile), None) if here is None and options.time else here


def on_devices_of(config: Config, facts: "Facts | None") -> Config:
    """The config with the platform of the devices that are planned for, where its own is `auto`: other rules hold."""
    if config.platform != "auto" or facts is None:
        return config
    return config.model_copy(update={"platform": facts.platform})


def verdict_report(run: "PlacedModels", facts: "Facts | None", host: "Report", *, elsewhere: bool = False) -> "Report":
    """fits: None where no device is named: a config may be meant for other machines than this one.

    host: `host_bytes.host_report`: a run whose hosts lack memory does not fit. elsewhere: the hosts of the run are
    named, and need not be this one.
    """
    found = _of_devices(run, facts, elsewhere=elsewhere)
    if not host.get("lacks"):
        return found
    devices = f" {found['line']}" if found["fits"] is False else ""
    return {**found, "fits": False, "line": f"Does not fit: {host['line']}{devices}"}


def _of_devices(run: "PlacedModels", facts: "Facts | None", *, elsewhere: bool) -> "Report":
    if facts is None:
        here = "" if elsewhere else _of_this_machine(run)
        return {"fits": None, "line": f"{here}{OTHERS}" if here else UNKNOWN}
    found = verdict(run, max(0, facts.memory_bytes - facts.margin_bytes))
    fullest = found.fullest
    report: Report = {
        "fits": found.fits,
        "memory_bytes": facts.memory_bytes,
        "room_bytes": found.room - fullest.margin.total,
        "margin": vars(fullest.margin) | {"communicators": fullest.margin.communicators},
        "rank": fullest.rank,
        "moment": fullest.moment,
        "bytes": fullest.bytes,
        "left_bytes": found.left,
        "help": {"alone": dict(found.alone), "together": dict(found.together), "ranks": found.ranks},
    }
    libraries, margin = f"libraries: {fullest.margin.words}" if run.cuda else "libraries", fullest.margin.total
    taken = facts.margin_bytes + margin
    room = f"{_gib(found.room - margin)} GiB ({_gib(facts.memory_bytes)} less {_gib(taken)} for {libraries})"
    where = f"rank {fullest.rank} in {fullest.moment}"
    sized = isinstance(run, PlacedRun) and not run.kv_cache.is_given and fullest.moment == "generation"
    takes_all = sized and found.left < GIB // 10
    if found.fits:
        left = "the KV cache takes what is free" if takes_all else f"{_gib(found.left)} GiB are left"
        line = f"Fits: {where} is fullest: {_gib(fullest.bytes)} of {room}; {left}."
    else:
        line = f"Does not fit: {where} needs {_gib(fullest.bytes)} GiB, {_gib(-found.left)} more than {room}. " + _help(
            found.alone, found.together, found.ranks, run.world_size
        )
    return {**report, "line": line}


def _of_this_machine(run: "PlacedModels") -> str:
    """What the memory of this machine, without a GPU, means for a run on CPUs; nothing for any other."""
    from hybridflow.parallel.host_memory import LEAST_MEMORY, host_memory
    from hybridflow.trainers.auto import facts_of_gpus

    if run.cuda or run.config.platform == "cuda" or facts_of_gpus({}) is not None:
        return ""
    memory = host_memory()[1] // run.world_size
    room = memory - LEAST_MEMORY - max(each.total() for each in host_bytes(run))
    if room <= 0:  # a run of other machines
        return ""
    found = Verdict(fullest(with_room(run, room)), room)
    where, needed = f"rank {found.fullest.rank} in {found.fullest.moment}", _gib(found.fullest.bytes)
    verdict = f"fits: {where} is fullest, with" if found.fits else f"does not fit: {where} needs"
    ranks = f"{'each of ' if run.world_size > 1 else ''}{counted(run.world_size)}"
    here = f"{_gib(memory)} GiB of memory for {ranks}, of which libraries take {_gib(LEAST_MEMORY)}"
    return f"This machine has no GPU, and {here}. Here the run {verdict} {needed} GiB. "


def _help(alone: tuple[Change, ...], together: tuple[Change, ...], ranks: int | None, world_size: int) -> str:
    search = f"the option --search --gpus {ranks or world_size} looks for another layout."
    if alone:
        return f"Would help: {', or '.join(map(_word, alone))}; {search}"
    words = " ".join(map(_word, together))
    if ranks is None:
        return (
            f"Would help: {words}; {search}"
            if together
            else f"Neither smaller micro-batches nor more ranks suffice; {search}"
        )
    return f"Would help: {ranks} ranks{f' with {words}' if together else ''}; {search}"


def _word(change: Change) -> str:
    key, value = change
    if isinstance(value, tuple):  # of names
        return f"{key}=[{','.join(value)}]"
    return f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def _gib(num_bytes: int) -> str:
    """Two digits, or of little as many as tell something."""
    return f"{num_bytes / GIB:.{2 if num_bytes >= GIB / 100 or not num_bytes else 6}f}".rstrip("0").rstrip(".")
