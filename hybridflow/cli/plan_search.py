"""What `hybridflow plan --search` prints and writes."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.cli.command import as_typed
from hybridflow.cli.plan_tables import print_missing
from hybridflow.cli.plan_verdict import on_devices_of
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.ranks import counted

if TYPE_CHECKING:
    from hybridflow.automap.auto import Facts
    from hybridflow.automap.engine_memory import EngineMemory
    from hybridflow.automap.search import Found, SearchedPlan, SearchRequest
    from hybridflow.automap.timing import Work

FIRST_SHARE = 0.6  # of the minutes: the search itself; what is left is for the two questions after it
GIB = 1 << 30
SHOWN_ROLES = ("actor", "critic", "reward_model", "engine")  # columns of the table, for the roles of the run
OF_OTHERS = ("actor", "reward_model", "engine")  # columns of the table for other clusters
STAGES = ("generation", "scoring", "updates")


def ranks_per_host(world_size: int, hosts: str | None, of_profile: int) -> int:
    """--hosts of a search is a number; without it as many ranks as the profile's hosts have. Errors: ConfigError."""
    if hosts is None:
        count = -(-world_size // of_profile)
    elif hosts.isdecimal() and int(hosts):
        count = int(hosts)
    else:
        raise ConfigError(f"--hosts {hosts}: with --search give a number of hosts of equal size, such as --hosts 8")
    if world_size % count:
        raise ConfigError(
            f"--gpus {world_size} on {count} hosts: {world_size} = {world_size // count} x {count} + "
            f"{world_size % count}; hosts are alike in size: give another --hosts"
        )
    return world_size // count


def print_search(
    config: AnyConfig,
    facts: "Facts",
    world_size: int,
    console: Console,
    *,
    minutes: float,
    output: Path | None,
    svg: Path | None,
    source: str,
    work: "Work",
    refused: str,
    missing: Sequence[str],
) -> None:
    """refused: see `SearchRequest`. missing: why this machine cannot train the config, a line each.

    Errors: ConfigError where nothing fits, with the least that would, and where a file cannot be written.
    """
    from hybridflow.automap.auto import why_nothing_fits
    from hybridflow.automap.search import SearchRequest, known_of, search
    from hybridflow.trainers.auto import say

    began, seconds = time.monotonic(), 60 * minutes
    room = facts.memory_bytes - facts.margin_bytes
    request = SearchRequest(
        on_devices_of(config, facts),
        world_size,
        facts.profile,
        room,
        work=work,
        refused=refused,
        seconds=FIRST_SHARE * seconds,
        say=say,
    )
    known = known_of(request)
    found = search(request, known=known)
    if not found.plans:
        raise ConfigError("\n".join(why_nothing_fits(found, facts.what, until=began + seconds)))
    console.print(Text(f"{source}: {config.name} on {world_size} x {_device(facts)}\n"))
    console.print(Text(f"{_lengths(work)}\n"))
    print_missing(missing, console)
    console.print(_plans_table(found))
    for line in _distinguished(found):
        console.print(Text(line))
    console.print()
    console.print(_phases_table(found))
    for line in (*_why(found), *_looked(found)):
        console.print(Text(line))
    console.print()
    for line in _otherwise(request, known, found.plans[0], seconds - (time.monotonic() - began)):
        console.print(Text(line))
    best = found.plans[0]
    asked = best.config.model_copy(update={"platform": config.platform})
    _written(replace(best, config=asked), output, svg, source, console)
    if output is not None:
        command = _command(output, world_size, facts.profile.ranks_per_host)
        console.print(Text(command), soft_wrap=True)  # to be copied


def _lengths(work: "Work") -> str:
    responses = f"responses of {work.mean:g} tokens in the mean and {work.longest:g} at most"
    return f"By the load of {work.sequences:,} sequences: prompts of {work.prompt:g} tokens, {responses}"


def _device(facts: "Facts") -> str:
    profile = facts.profile
    where = "measured" if profile.measured else "not measured here"
    return f"{profile.name} ({where}), {profile.ranks_per_host} a host, {facts.memory_bytes / GIB:.4g} GiB each" + (
        f", {facts.margin_bytes / GIB:.2g} of them for libraries" if facts.margin_bytes else ""
    )


def _plans_table(found: "Found") -> Table:
    from hybridflow.automap.explained import groups, summary

    table = Table(title="The fastest that fit, by the model of time", title_justify="left")
    roles = [name for name in SHOWN_ROLES if name in summary(found.plans[0])]
    for column in ("", "s", "tokens/s/GPU", "GiB", "placement", *roles):
        right = column in ("", "s", "tokens/s/GPU", "GiB")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for i, plan in enumerate(found.plans, 1):
        words = summary(plan)
        cells = [
            str(i),
            f"{plan.seconds:.4g}",
            f"{plan.prediction.tokens_per_second_per_device:,.0f}",
            f"{plan.fullest.needed / GIB:.4g}",
            groups(plan),
            *(words[name] for name in roles),
        ]
        table.add_row(*cells)
    return table


def _distinguished(found: "Found") -> list[str]:
    from hybridflow.automap.explained import differences

    lines = ["What sets each apart from the first:"]
    for i, plan in enumerate(found.plans[1:], 2):
        keys = differences(plan.config, found.plans[0].config)
        lines.append(f"  {i}: {', '.join(f'{key} {mine}' for key, (mine, _) in keys.items())}")
    return lines if len(found.plans) > 1 else []


def _phases_table(found: "Found") -> Table:
    from hybridflow.automap.explained import stages

    others = {"first": found.plans[0]}
    if len(found.plans) > 1:
        others["second"] = found.plans[1]
    if found.given is not None:
        others["as given"] = found.given
    table = Table(title="Seconds by phase, of the rank that takes longest", title_justify="left")
    table.add_column("phase")
    for name in others:
        table.add_column(name, justify="right")
    phases = dict.fromkeys(phase for plan in others.values() for phase in plan.prediction.phases)
    for phase in phases:
        table.add_row(phase, *(f"{plan.prediction.phases.get(phase, 0.0):.3f}" for plan in others.values()))
    table.add_section()
    there = [stages(plan) for plan in others.values()]
    for stage in [each for each in STAGES if any(each in one for one in there)]:
        table.add_row(f"{stage}, whole", *(f"{one.get(stage, 0.0):.3f}" for one in there))
    table.add_section()
    table.add_row("iteration", *(f"{plan.seconds:.3f}" for plan in others.values()), style="bold")
    table.add_row("idle, mean of the ranks", *(_idle(plan) for plan in others.values()))
    return table


def _idle(plan: "SearchedPlan") -> str:
    return f"{sum(plan.prediction.idle) / len(plan.prediction.idle):.1%}"


def _why(found: "Found") -> list[str]:
    from hybridflow.automap.explained import memory_words, why

    best = found.plans[0]
    lines = [
        f"Memory of the first is fullest on rank {best.fullest.rank} in {best.fullest.moment}: "
        f"{memory_words(best.fullest)}."
    ]
    if len(found.plans) > 1:
        lines += why(best, found.plans[1], "the second")
    if found.given is None:
        lines.append(f"The config as given {found.why_not.splitlines()[0]}.")
    elif found.given.config == best.config:
        lines.append("The config as given is the first.")
    else:
        lines += why(best, found.given, "the config as given")
    return lines


def _looked(found: "Found") -> list[str]:
    counts = found.counts
    lines = [
        f"{found.placements} placements, {found.bounded} left out by their bound; {counts.branches:,} branches, of "
        f"these {counts.tight:,} too large for the memory; {found.seconds:.0f} s."
    ]
    if found.unseen:
        lines.append(
            f"warning: time ran out before {found.unseen} placements were searched to the end. One of them may have a "
            "better layout: give more --minutes"
        )
    if found.untimed:
        lines.append(
            f"warning: time ran out before {found.untimed} kept layouts were timed in full. One of them may be faster: "
            "give more --minutes"
        )
    elif not found.unseen and not found.closed:
        lines.append("warning: layouts without a full timing may rank between these")
    return lines


def _otherwise(request: "SearchRequest", known: "EngineMemory", best: "SearchedPlan", seconds: float) -> list[str]:
    """With twice the devices, and with half the memory."""
    from hybridflow.automap.explained import groups, summary
    from hybridflow.automap.search import search

    rooms = {
        f"With twice the GPUs ({2 * request.world_size})": replace(request, world_size=2 * request.world_size),
        f"With half the memory ({request.memory_bytes / GIB / 2:.3g} GiB of room)": replace(
            request, memory_bytes=request.memory_bytes // 2
        ),
    }
    lines = []
    for what, asked in rooms.items():
        found = search(replace(asked, shown=1, seconds=max(5.0, seconds / len(rooms))), known=known)
        ended = " (time ran out)" if found.unseen else ""
        if not found.plans:
            lines.append(f"{what}: nothing {'was found in the time' if found.unseen else 'fits'}.")
            continue
        plan = found.plans[0]
        words = ", ".join(f"{name} {text}" for name, text in summary(plan).items() if name in OF_OTHERS)
        ratio = f"{best.seconds / plan.seconds:.2f} times as fast"
        lines.append(f"{what}: {plan.seconds:.4g} s, {ratio}{ended}; {groups(plan)}, {words}.")
    return lines


def _written(best: "SearchedPlan", output: Path | None, svg: Path | None, source: str, console: Console) -> None:
    from hybridflow.automap.gantt import gantt

    files: list[tuple[Path, str]] = []
    if output is not None:
        files.append((output, f"# Found by `hybridflow plan --search` of {source}.\n{best.config.to_yaml()}"))
    if svg is not None:
        title = f"{best.config.name}: an iteration on {counted(best.placed.world_size)}, {best.seconds:.4g} s predicted"
        files.append((svg, gantt(best.prediction.spans, best.placed.world_size, title=title)))
    for path, text in files:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        console.print(Text(f"wrote {path}"))


def _command(config: Path, world_size: int, ranks_per_host: int) -> str:
    """What trains with the config that was written."""
    if world_size > ranks_per_host:
        return f"{as_typed()} launch --hostfile HOSTS {shlex.quote(str(config))}"
    return f"{as_typed()} train {shlex.quote(str(config))} --nproc {world_size}"
