"""`auto` in a config: sizes that are chosen at the start, from the devices that there are. Pure: trees in, trees out.

    actor: {tensor_parallel_size: auto, micro_batch_tokens: auto, recompute: auto}
    rollout: {kv_cache_gib: auto}

    resolved = resolve(tree, "my.yaml", 8, facts)       what `auto` stands for is searched, all other values stay
    resolved.tree, resolved.lines                       plain values; each with the reason

A run that is started again resolves anew, on as many devices as there are then: `checkpoint.changes` lets all of these
keys change. The search is that of `automap.search`, on the one placement that the config has.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.explained import memory_words
from hybridflow.automap.placements import given_placement
from hybridflow.automap.search import Found, SearchRequest, gib, least_that_fits, search
from hybridflow.config import ExperimentConfig
from hybridflow.config.auto import ENGINE, Tree, autos, sections, with_neutral
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.errors import ConfigError, Reasons
from hybridflow.parallel.layout import PlatformName
from hybridflow.parallel.ranks import counted

SECONDS = 60.0  # that it may take to choose


@dataclass(frozen=True)
class Facts:
    """Of the devices, alike for all ranks. what: for people, with where the profile comes from.

    memory_bytes: of a rank; margin_bytes: of these, what is left to libraries on a CPU. On a GPU the layout decides.
    """

    profile: DeviceProfile
    memory_bytes: int
    margin_bytes: int
    what: str

    @property
    def platform(self) -> PlatformName:
        return "cpu" if self.profile.shared is not None else "cuda"


@dataclass(frozen=True)
class Resolved:
    """A config's tree without `auto`, and what was chosen."""

    tree: Tree
    lines: tuple[str, ...]


def config_of_tree(tree: Mapping[str, Any], source: object) -> AnyConfig:
    """The config, with neutral values for `auto`. Errors: ConfigError of what else is wrong."""
    neutral = with_neutral(tree)
    return config_class(neutral).from_tree(neutral, str(source))


def resolve(
    tree: Mapping[str, Any],
    source: object,
    world_size: int,
    facts: Facts,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Resolved:
    """say: is given a line every few seconds.

    Errors: ConfigError where the rest of the config is wrong, or nothing fits, with the least that would."""
    free, config = autos(tree), config_of_tree(tree, source)
    request = replace(request_of(config, free, world_size, facts), say=say)
    found = search(request)
    if not found.plans:
        raise ConfigError(f"{source}: " + "\n".join(why_nothing_fits(found, facts.what)))
    chosen = found.plans[0].config.model_dump(mode="json")
    resolved: Tree = copy.deepcopy(dict(tree))
    before = {name: section for name, section, _ in sections(resolved)}
    lines = []
    for name, section, _ in sections(chosen):
        for key in sorted(free.get(name, ())):
            before[name][key] = section[key]
            lines.append(f"{'rollout' if name == ENGINE else name}.{key} = {section[key]}  (auto)")
    return Resolved(resolved, (*lines, *reasons_of(found, facts)))


def request_of(config: AnyConfig, free: Mapping[str, frozenset[str]], world_size: int, facts: Facts) -> SearchRequest:
    """Of the keys that are free, on the ranks that the config gives the roles."""
    reasons, whole = Reasons(), tuple(range(world_size))
    reasons.collect(_check_ranks, config, world_size)
    reasons.refuse()
    engine = config.rollout_ranks(world_size) if isinstance(config, ExperimentConfig) else None
    placement = given_placement({name: role.ranks or whole for name, role in config.roles().items()}, engine)
    none: frozenset[str] = frozenset()
    return SearchRequest(
        config,
        world_size,
        facts.profile,
        facts.memory_bytes - facts.margin_bytes,
        free={name: free.get(name, none) for name in placement},
        placement=placement,
        seconds=SECONDS,
    )


def _check_ranks(config: AnyConfig, world_size: int) -> None:
    lie = {name: role.ranks for name, role in config.roles().items()}
    if isinstance(config, ExperimentConfig):
        lie = {"rollout": config.rollout.ranks, **lie}
    for name, ranks in lie.items():
        if ranks is not None and ranks[-1] >= world_size:
            raise ConfigError(f"{name}.ranks names rank {ranks[-1]}, the run has {counted(world_size)}")


def reasons_of(found: Found, facts: Facts) -> list[str]:
    """Why these values."""
    best, room = found.plans[0], facts.memory_bytes - facts.margin_bytes
    lines = [
        f"auto: on {counted(found.request.world_size)} of {facts.what}, the fastest predicted layout that fits in "
        f"{gib(room)} GiB a rank: {best.seconds:.3g} s an iteration, {gib(best.fullest.needed)} GiB on rank "
        f"{best.fullest.rank} ({best.fullest.moment})"
    ]
    if len(found.plans) > 1:
        lines.append(f"auto: the next best layout of other sizes is predicted to take {found.plans[1].seconds:.3g} s")
    if not found.closed:
        lines.append(f"auto: the search ended after {SECONDS:g} s, before all layouts were searched")
    return lines


def why_nothing_fits(found: Found, what: str, *, until: float = math.inf) -> list[str]:
    """The tightest constraint, and the least that would fit; or that the search ended before all layouts were searched.

    until: when the time to look for the least ends, as `time.monotonic`.
    """
    request, ranks = found.request, counted(found.request.world_size)
    room = gib(request.memory_bytes)
    if not found.closed and request.memory_bytes > 0:
        return [
            f"the search ended after {found.seconds:.3g} s before all layouts on {ranks} of {what} were searched. None "
            f"of those that were searched fits in {room} GiB a rank",
            f"others may fit: hybridflow plan --search --gpus {request.world_size} --minutes M searches for longer",
        ]
    least = least_that_fits(request, until=until)
    lines = [f"no layout fits on {ranks} of {what} with room for {room} GiB a rank"]
    if request.memory_bytes <= 0:
        lines.append(
            "nothing is left of a rank's memory: `hybridflow plan --memory-gib`, or device_profile in the config, "
            "plans for another machine"
        )
    elif least.plan is None and least.in_time:
        lines.append("no memory suffices: the model's or the batch's sizes do not fit this number of ranks")
    elif least.plan is not None:
        fullest = least.plan.fullest
        words = memory_words(fullest, 4)
        much = f"the least is {gib(fullest.needed)} GiB" if least.in_time else f"{gib(fullest.needed)} GiB suffice"
        lines.append(f"{much}, on rank {fullest.rank} in {fullest.moment}: {words}")
    if least.ranks is not None:
        lines.append(f"with {room} GiB a rank the run fits on {counted(least.ranks)}")
    elif not least.in_time:
        lines.append("the time ended before larger numbers of ranks were searched")
    return lines
