"""Plan an experiment without a run: grids, memory of each GPU, bytes of the reshard, and sizes of checkpoints.

    hybridflow plan mine.yaml [section.key=value ...] [--world-size N] [--json | --smallest]
    hybridflow plan mine.yaml --hosts worker-0=8,worker-1=8             also the grids of each host
    hybridflow plan mine.yaml --time [--profile NAME_OR_FILE]           also the predicted seconds of each phase
    hybridflow plan mine.yaml --search --gpus 64 [--output best.yaml]   the fastest layout, as a config for train
    torchrun --nproc-per-node 8 -m hybridflow.plan --profile-device [--output F]  measures the machine for --time

The command starts no process and reads no weights. Of each model it reads config.json. The roles are those of the
config's algorithm. Without --world-size the plan has the smallest number of ranks that fits. A run that cannot work is
refused with status 1, in three stages: keys; models, files and functions; rows by the tokenizer, and names of weights.
A stage tells all its reasons. `hybridflow train` tells the same ones. With --hosts the files that are on this machine
are checked too. A line names each one that is not: the hosts must have it.

The second line, and again the last one, says whether the run fits the memory of a device, and what would help. The
status is 3 where the run does not fit. The memory is that of --memory-gib, a profile, or the GPUs here. Without these
the line is of this machine's own memory, and the status is 0. --all prints all tables.
"""

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hybridflow import __version__
from hybridflow.checkpoint.listing import size_of
from hybridflow.checkpoint.store import CHECKPOINTS
from hybridflow.cli.command import argument_parser, positive, print_error
from hybridflow.cli.files_of_tree import read_config
from hybridflow.cli.plan_tables import GIB, WIDTH, print_plan
from hybridflow.config import RunConfig, read_tree
from hybridflow.config.auto import autos, replaceable, with_neutral
from hybridflow.config.files import base_file
from hybridflow.config.hub import fetch_models
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.config.staleness import partial_notes
from hybridflow.config.world_size import TRIED, smallest_world_size, world_size_to_try
from hybridflow.errors import ConfigError, UserError
from hybridflow.user_code import search_beside

if TYPE_CHECKING:
    from hybridflow.automap.auto import Facts
    from hybridflow.automap.device import DeviceProfile
    from hybridflow.placement.forecast import Report
    from hybridflow.placement.hosts import HostRanks
    from hybridflow.placement.placed import PlacedModels

DEFAULT_PROFILE = "h100-sxm"  # of --time
UNBOUNDED = 1 << 60
RANKS_PER_HOST = 8  # where no device is known
DOES_NOT_FIT = 3  # exit status; 2 is argparse's


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.plan", __doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the config")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--world-size", type=positive, default=None, metavar="N", help="ranks of the run")
    size.add_argument(
        "--hosts",
        metavar="NAME=N,...",
        help="the hosts of the run and their ranks, in order; with --search, a number of hosts",
    )
    parser.add_argument("--least-hosts", type=positive, default=None, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--for-launch", action="store_true", help=argparse.SUPPRESS
    )  # hybridflow/launcher/experiment.py
    parser.add_argument("--smallest", action="store_true", help="print only the smallest number of ranks")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--all", action="store_true", help="print all tables and notes of the plan")
    parser.add_argument("--time", action="store_true", help="also predict the seconds of an iteration")
    parser.add_argument(
        "--profile", metavar="FILE|NAME", help=f"the device's speed and memory (default {DEFAULT_PROFILE})"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, metavar="N", help="tokens of the mean prompt (default: the longest)"
    )
    parser.add_argument(
        "--response-tokens", type=positive, metavar="N", help="tokens of the mean response (default: sampling's)"
    )
    parser.add_argument("--profile-device", action="store_true", help="measure this machine's profile, with all ranks")
    parser.add_argument("--search", action="store_true", help="search the fastest layout on --gpus devices")
    parser.add_argument("--gpus", type=positive, metavar="N", help="devices to search on")
    parser.add_argument(
        "--memory-gib", type=_positive_float, metavar="GIB", help="memory of a device (default: the profile's)"
    )
    parser.add_argument(
        "--host-memory-gib", type=_positive_float, metavar="GIB", help="memory of a host (default: the profile's)"
    )
    parser.add_argument(
        "--minutes", type=_positive_float, default=0.8, metavar="M", help="minutes of the search (default 0.8)"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture of one iteration")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the file of --profile-device (default profile.json), or of the best config of --search (best.yaml)",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return _run(_checked(parser, arguments))


def _checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    options = parser.parse_intermixed_args(arguments)
    if options.config is None and not options.profile_device:
        parser.error("the following arguments are required: CONFIG")
    return options


def _run(options: argparse.Namespace) -> int:
    """The exit status."""
    try:
        if options.profile_device:
            from hybridflow.cli.plan_time import measure

            measure(options.output or "profile.json")
        elif options.search:
            _search(options)
        else:
            return _plan(options)
    except UserError as error:
        print_error(error, "hybridflow.plan")
        return 1
    return 0


def _search(options: argparse.Namespace) -> None:
    if options.gpus is None:
        raise ConfigError("--search: give --gpus, on how many devices")
    tree = with_neutral(read_tree(options.config, options.overrides))
    fetch_models(tree, weights=False)
    config, refused = _searchable(tree, options.config)
    search_beside(options.config)
    # torch loads for a second: a bad config fails before
    from hybridflow.automap.timing import work_of
    from hybridflow.cli.plan_lengths import with_lengths, work_with
    from hybridflow.cli.plan_search import print_search, ranks_per_host
    from hybridflow.cli.plan_verdict import on_devices_of
    from hybridflow.cli.refusals import check_before_search
    from hybridflow.trainers.auto import facts_by

    facts = facts_by(_profile(options, tree), _memory(options))
    with _base_suggested(config):
        missing = check_before_search(on_devices_of(config, facts))
    config = with_lengths(config, options.response_tokens)
    per_host = ranks_per_host(options.gpus, options.hosts, facts.profile.ranks_per_host)
    profile = facts.profile.model_copy(
        update={"ranks_per_host": per_host, "host_memory_bytes": _host_memory(options, facts)}
    )
    work = work_with(work_of(config, profile), options.prompt_tokens, options.response_tokens)
    print_search(
        config,
        replace(facts, profile=profile),
        options.gpus,
        _console(),
        minutes=options.minutes,
        output=Path(options.output or "best.yaml"),
        svg=None if options.svg is None else Path(options.svg),
        source=str(options.config),
        work=work,
        refused=refused,
        missing=missing,
    )


@contextlib.contextmanager
def _base_suggested(config: RunConfig) -> Iterator[None]:
    """A model may not be there yet: a refusal within the block then says what can be planned in its place."""
    try:
        yield
    except ConfigError as error:
        absent = [f"{name}.model=BASE" for name, role in config.roles().items() if not Path(role.model).exists()]
        if not absent:
            raise
        raise ConfigError(
            f"{error}\nto plan before a model is there, give a model of the same sizes, such as its base model: "
            f"{' '.join(absent)}"
        ) from error


def _searchable(tree: dict[str, Any], source: str) -> tuple[AnyConfig, str]:
    """The config, and "" or why it is refused as it is: then with neutral values for all that the search replaces.

    Errors: ConfigError where what stays is wrong.
    """
    try:
        return config_class(tree).from_tree(tree, source), ""
    except ConfigError as error:
        replaced = replaceable(tree)
        return config_class(replaced).from_tree(replaced, source), str(error)


def _profile(options: argparse.Namespace, tree: Mapping[str, Any]) -> "DeviceProfile":
    """As asked for, or as the config says, or the default."""
    from hybridflow.automap.device import load_profile

    return load_profile(options.profile or tree.get("device_profile") or DEFAULT_PROFILE)


def _memory(options: argparse.Namespace) -> int | None:
    return None if options.memory_gib is None else int(options.memory_gib * GIB)


def _host_memory(options: argparse.Namespace, facts: "Facts | None") -> int | None:
    """Bytes of a host; None: not known."""
    if options.host_memory_gib is not None:
        return int(options.host_memory_gib * GIB)
    return None if facts is None else facts.profile.host_memory_bytes


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _resolved(options: argparse.Namespace, world_size: int | None) -> AnyConfig:
    """The config, `auto` resolved for so many ranks, or for the smallest number on which something fits."""
    tree = read_tree(options.config, options.overrides)
    fetch_models(tree, weights=False)
    if not autos(tree):
        return read_config(tree, options.config)
    from hybridflow.trainers.auto import facts_by, resolved_for

    if options.for_launch:  # the machine that starts the ranks need not be like theirs
        facts = facts_by(_profile(options, tree), UNBOUNDED)
    elif options.profile or options.memory_gib or tree.get("device_profile"):
        facts = facts_by(_profile(options, tree), _memory(options))
        if tree.get("platform", "auto") == "auto":
            tree = {**tree, "platform": facts.platform}
    else:
        facts = None
    for count in [world_size] if world_size else TRIED:
        try:
            config, lines = resolved_for(tree, options.config, count, facts)
        except ConfigError:
            if world_size or count == TRIED[-1]:
                raise
            continue
        if not (options.json or options.smallest or options.for_launch):
            print("\n".join(lines) + "\n")
        options.world_size = None if options.hosts else count
        return config
    raise AssertionError("the last that is tried tells why it does not fit")


def _disk(config: RunConfig) -> "Report":
    """What this machine has for checkpoints where the config's output_dir lies, or will lie."""
    directory = Path(config.output_dir).absolute()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    own = config.run_dir / CHECKPOINTS
    return {
        "directory": config.output_dir,
        "free_bytes": shutil.disk_usage(there).free,
        "own_bytes": size_of(own) if own.is_dir() else 0,
    }


def _ranks_of(hosts: str | None) -> int | None:
    """Of all hosts that are named."""
    if hosts is None:
        return None
    from hybridflow.placement.hosts import parse_hosts

    return parse_hosts(hosts)[-1].ranks.stop


def _positive_float(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: a positive number")
    return number


def _plan(options: argparse.Namespace) -> int:
    """The exit status."""
    chosen = options.world_size is None and options.hosts is None
    search_beside(options.config)
    config = _resolved(options, options.world_size or _ranks_of(options.hosts))
    if options.smallest:
        print(options.world_size or smallest_world_size(config))
        return 0
    # torch loads for a second: a bad config fails before
    from hybridflow.cli.plan_lengths import with_lengths
    from hybridflow.cli.plan_verdict import known_facts, on_devices_of, verdict_report
    from hybridflow.cli.refusals import check_for_hosts, check_here, missing_here
    from hybridflow.placement.adapter_lines import adapter_lines
    from hybridflow.placement.cache_room import cache_report, cache_words, long_words, with_room
    from hybridflow.placement.forecast import forecast
    from hybridflow.placement.hosts import for_launch, parse_hosts, place_on_hosts, placement_lines
    from hybridflow.placement.placed import PlacedRun, place

    facts = known_facts(options, config, DEFAULT_PROFILE)
    if options.profile or options.memory_gib or config.device_profile:
        config = on_devices_of(config, facts)
    config = with_lengths(config, options.response_tokens)
    config.check_own_directory()
    plan: Report = {"config": str(options.config), "smallest_that_fits": chosen}
    hosts = None
    if options.hosts is None:
        world_size, problem = (options.world_size, None) if options.world_size else world_size_to_try(config)
        plan["missing"] = missing_here(config)
        if plan["missing"] and problem is not None:
            smallest_world_size(config)
        with _base_suggested(config):
            if not plan["missing"]:
                check_here(config, world_size)
            placed = place(config, world_size)
    else:
        given = parse_hosts(options.hosts)
        placed, hosts, unfit = place_on_hosts(config, given, options.least_hosts or len(given))
        if options.for_launch:
            base = base_file(options.config)
            print(json.dumps({**for_launch(placed, hosts, unfit), "base": None if base is None else str(base)}))
            return 0
        plan["elsewhere"] = check_for_hosts(config)
        plan["placement"] = placement_lines(placed, hosts)
    placed = placed if facts is None else with_room(placed, max(0, facts.memory_bytes - facts.margin_bytes))
    plan |= {**forecast(placed), "adapters": adapter_lines(placed)}
    if isinstance(placed, PlacedRun):
        lines = {"line": cache_words(placed, bounded=facts is not None), "long_line": long_words(placed)}
        plan["kv_cache"] = {**cache_report(placed), **lines}
        plan["rollout_notes"] = partial_notes(placed.config, cuda=placed.cuda)
    plan["checkpoint"] |= _disk(config)
    if options.time:
        plan["time"] = _timed(placed, options, None if facts is None else facts.memory_bytes)
    plan["host_memory"] = _of_hosts(placed, options, facts, hosts)
    plan["verdict"] = verdict_report(placed, facts, plan["host_memory"], elsewhere=options.hosts is not None)
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        print_plan(plan, _console(), whole=options.all)
    return DOES_NOT_FIT if plan["verdict"]["fits"] is False else 0


def _of_hosts(
    placed: "PlacedModels", options: argparse.Namespace, facts: "Facts | None", hosts: "Sequence[HostRanks] | None"
) -> "Report":
    """What the run keeps in their memory. hosts: None: alike in size."""
    from hybridflow.placement.host_bytes import host_report
    from hybridflow.placement.hosts import equal_hosts

    per_host = RANKS_PER_HOST if facts is None else facts.profile.ranks_per_host
    return host_report(placed, hosts or equal_hosts(placed.world_size, per_host), _host_memory(options, facts))


def _timed(placed: "PlacedModels", options: argparse.Namespace, memory_bytes: int | None) -> "Report":
    from hybridflow.automap.time_report import time_report
    from hybridflow.automap.timing import work_of
    from hybridflow.cli.plan_lengths import work_with

    profile = _profile(options, {"device_profile": placed.config.device_profile})
    profile = profile.model_copy(update={"memory_bytes": memory_bytes or profile.memory_bytes})
    work = work_with(work_of(placed.config, profile), options.prompt_tokens, options.response_tokens)
    return time_report(placed, profile, work)
