"""The fastest layout of a config on so many devices, by the model of time and within their memory. Pure.

    found = search(SearchRequest(config, 64, profile, memory_bytes=80 << 30))
    found.plans[0].config                a config that `hybridflow.train` takes
    found.given                          the config as it is, where it fits

It goes over placements (HybridFlow's algorithm 1, arXiv 2409.19256, section 6) in the order of a bound that each has:
the seconds that the roles take at least, whatever the memory. A placement whose bound is no less than the seconds of
what is known already is not looked into, nor are those after it. What is left is placed as `hybridflow.plan` places it,
counted by the memory table of `hybridflow.plan` and timed by `predict`, which has the last word.

Where this departs from the paper: the engine may lie on ranks of its own; recomputation, offloading, micro-batches and
the KV cache are chosen, too; memory is the exact table and not a least number of devices; scoring and updates of groups
take the longest of them, as there, but what all ranks wait for is added up; branches are cut by bounds, not all tried.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.branch_search import BranchSearch
from hybridflow.automap.choices import Best, Choice, Counts
from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.engine_memory import EngineMemory
from hybridflow.automap.engine_options import EngineOption
from hybridflow.automap.options import Free, Options, everything
from hybridflow.automap.placements import Placement, placements
from hybridflow.automap.timing import Prediction, Work, predict, work_of
from hybridflow.config.auto import ENGINE
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError, Reasons
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.ranks import counted, shown
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.forecast import Fullest, fullest
from hybridflow.placement.host_bytes import fullest_host
from hybridflow.placement.hosts import HostRanks, check_hosts, equal_hosts
from hybridflow.placement.margin import least_margin
from hybridflow.placement.placed import PlacedModels, check_models, place
from hybridflow.placement.verdict import changed, verdict

SHOWN = 10
MOST_KEPT = 320  # choices that are timed in full, at most
SEARCHED = 0.75  # of the seconds: placements; the rest times in full what is kept
SAID_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class SearchRequest:
    """What is asked for. memory_bytes: of a rank, for the memory table, and on a GPU for libraries."""

    config: AnyConfig
    world_size: int
    profile: DeviceProfile
    memory_bytes: int
    work: Work | None = None  # None: `work_of`
    refused: str = ""  # why the config as it was given cannot be: `config` then has neutral values for what is chosen
    free: Free | None = None  # the keys that are chosen; None: all
    placement: Placement | None = None  # None: every one
    seconds: float = float("inf")  # to search
    shown: int = SHOWN
    first: bool = False  # the first that fits will do
    say: Callable[[str], None] = lambda line: None  # is given a line every few seconds

    @property
    def iteration(self) -> Work:
        return self.work or work_of(self.config, self.profile)

    @property
    def hosts(self) -> list[HostRanks]:
        return equal_hosts(self.world_size, self.iteration.ranks_per_host)


@dataclass(frozen=True)
class SearchedPlan:
    """A config that fits, with predicted seconds."""

    config: AnyConfig
    placed: PlacedModels
    prediction: Prediction
    fullest: Fullest
    choice: Choice | None = None  # None: the config as given, or as `hybridflow plan` suggests

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass(frozen=True)
class Found:
    """plans: fastest first. unseen: placements that time ran out for, untimed: kept choices. given: None where the
    config as given does not fit, is refused or is not complete: the end of a sentence in why_not."""

    request: SearchRequest
    plans: list[SearchedPlan]
    given: SearchedPlan | None
    why_not: str
    placements: int
    unseen: int
    untimed: int
    bounded: int  # placements that the bound left out
    closed: bool  # whether nothing that was left out can be among those shown
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0


def search(request: SearchRequest, *, known: EngineMemory | None = None, exhaustive: bool = False) -> Found:
    """The best plans, the config as given among them where it fits: never worse than that. No plan where none fits.

    known: `known_of` a request that differs in ranks or memory alone: what is found of options serves both.
    """
    began = _Search(request, known=known, exhaustive=exhaustive)
    with _said_every(SAID_EVERY, began.line, request.say):
        return began.run()


def known_of(request: SearchRequest) -> EngineMemory:
    """What searches of one config on one kind of device can share, whatever their ranks and their memory."""
    options = Options(
        request.config,
        specs_of(request.config),
        request.profile,
        work=request.iteration,
        free=request.free or everything(request.config),
        cuda=uses_cuda(request.config.platform),
    )
    return EngineMemory(options)


@contextlib.contextmanager
def _said_every(seconds: float, line: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """A thread says `line` every so many seconds within the block."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(seconds):
            say(line())

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Search:
    def __init__(self, request: SearchRequest, *, known: EngineMemory | None = None, exhaustive: bool) -> None:
        self.request, self.exhaustive = request, exhaustive
        self.engines = known or known_of(request)
        self.begun = time.monotonic()
        self.until, self.searched_until = (self.begun + share * request.seconds for share in (1.0, SEARCHED))
        self.untimed = 0  # of the choices kept last
        self.doing = "bounds of placements"
        self.counts = Counts()
        self.plans: dict[Any, SearchedPlan | None] = {}

    def run(self) -> Found:
        given, mended, why_not = self._given()
        branches = self._bounded()
        kept = self.request.shown + max(2, self.request.shown // 4)
        while True:
            best, unseen, bounded = self._searched(branches, kept)
            plans = self._timed(best)
            # what was left out takes as long as the last that was kept, or longer
            shown = plans[: self.request.shown]
            closed = not unseen and not self.untimed and (best.limit == float("inf") or self._proven(shown, best))
            if closed or self.request.first or kept >= MOST_KEPT or time.monotonic() > self.searched_until:
                break
            kept *= 2
        known = {plan.config.to_yaml() for plan in plans}
        plans += [plan for plan in mended if plan.config.to_yaml() not in known]
        plans.sort(key=lambda plan: plan.seconds)
        if given is not None and (not plans or given.seconds < plans[0].seconds):
            plans = [given, *plans]
        return Found(
            self.request,
            plans[: self.request.shown],
            given,
            why_not,
            placements=len(branches),
            unseen=unseen,
            untimed=self.untimed,
            bounded=bounded,
            closed=closed,
            counts=self.counts,
            seconds=time.monotonic() - self.begun,
        )

    def line(self) -> str:
        """How far the search is."""
        ranks, room = counted(self.request.world_size), f"{self.request.memory_bytes / (1 << 30):,.0f}"
        seconds = time.monotonic() - self.begun
        return f"search on {ranks} of {room} GiB: {self.doing}, {self.counts.branches:,} branches, {seconds:.0f} s"

    def _proven(self, shown: list[SearchedPlan], best: Best) -> bool:
        return len(shown) == self.request.shown and shown[-1].seconds <= best.limit

    @property
    def options(self) -> Options:
        return self.engines.options

    def _placements(self) -> Iterable[Placement]:
        request = self.request
        if request.placement is not None:
            return [request.placement]
        apart = ENGINE if request.config.generates_beside else None
        names = tuple(everything(request.config))
        found = placements(names, request.world_size, ranks_per_host=request.iteration.ranks_per_host, apart=apart)
        if request.config.algorithm.kl.resets:  # the reference lies as the actor does
            return [each for each in found if each["reference"] == each["actor"]]
        return found

    def _bounded(self) -> list[BranchSearch]:
        """By what they take at least, as far as it is known without a look at any role's options."""
        budget = self.request.memory_bytes - self.options.cuda * least_margin(self.request.world_size).total
        found = [BranchSearch(self.options, each, budget, self.engines) for each in self._placements()]
        return sorted(found, key=lambda each: each.floor)

    def _searched(self, branches: list[BranchSearch], kept: int) -> tuple[Best, int, int]:
        """The best choices by their bounds; placements that were not looked into for time, and for their bound."""
        best, bounded = Best(kept, first=self.request.first), 0
        for i, each in enumerate(branches):
            if each.floor >= best.limit and not self.exhaustive:
                return best, 0, bounded + len(branches) - i
            self.doing = f"placement {i + 1} of {len(branches)}"
            if time.monotonic() > self.searched_until:
                return best, len(branches) - i, bounded
            if each.bound >= best.limit and not self.exhaustive:
                bounded += 1
            elif not each.search(best, self.counts, exhaustive=self.exhaustive, until=self.searched_until):
                return best, len(branches) - i, bounded
        return best, 0, bounded

    def _timed(self, best: Best) -> list[SearchedPlan]:
        """In the order of their predicted seconds. Once time has run out, no more than one that fits."""
        found: list[SearchedPlan] = []
        self.untimed, self.doing = 0, "full timings"
        for choice in best.sorted():
            if choice.key not in self.plans:
                if found and time.monotonic() > self.until:
                    self.untimed += 1
                    continue
                self.plans[choice.key] = self._plan(choice)
            plan = self.plans[choice.key]
            if plan is not None:
                found.append(plan)
        return sorted(found, key=lambda plan: plan.seconds)

    def _plan(self, choice: Choice) -> SearchedPlan | None:
        """None where the exact table has more than there is, or a check of the config refuses it."""
        try:
            plan = plan_of(config_of(self.request, choice), self.request, choice)
        except ConfigError:
            return None
        return None if self._lacks(plan) else plan

    def _lacks(self, plan: SearchedPlan) -> str:
        """What the plan takes more than there is of a device's memory, or of a host's; "" where it fits."""
        request, most = self.request, plan.fullest
        if most.needed > request.memory_bytes:
            return f"it holds {gib(most.needed)} GiB on rank {most.rank} ({most.moment})"
        has, need = request.profile.host_memory_bytes, fullest_host(plan.placed, request.hosts)
        return "" if has is None or need.bytes <= has else f"{need.words} of {gib(has)}"

    def _given(self) -> tuple[SearchedPlan | None, list[SearchedPlan], str]:
        """The config as given where it fits; else what fits of `hybridflow plan`'s suggestions, and why it does not."""
        request = self.request
        if request.free is not None:
            return None, [], "is not complete"
        if request.refused:
            return None, [], f"is refused: {request.refused}"
        try:
            plan = plan_of(request.config, request, None)
        except ConfigError as error:
            return None, [], f"is refused: {error}"
        if not (lacks := self._lacks(plan)):
            return plan, [], ""
        return None, [] if request.first else self._mended(plan.placed), f"does not fit: {lacks}"

    def _mended(self, placed: PlacedModels) -> list[SearchedPlan]:
        found = verdict(placed, self.request.memory_bytes)
        together = [found.together] if found.together and found.ranks is None else []
        plans = []
        for changes in [(each,) for each in found.alone] or together:
            run = changed(placed, changes, self.request.memory_bytes)
            assert run is not None, "what is suggested can be placed"
            with contextlib.suppress(ConfigError):  # the plan knows no hosts
                plans.append(plan_of(run.config, self.request, None))
        return [plan for plan in plans if not self._lacks(plan)]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.3g}"


def specs_of(config: AnyConfig) -> dict[str, ModelSpec]:
    """By role. Errors: ConfigError with all reasons that no layout mends."""
    reasons = Reasons()
    specs = check_models(config, reasons)
    reasons.refuse()
    return specs


def plan_of(config: AnyConfig, request: SearchRequest, choice: Choice | None) -> SearchedPlan:
    """Errors: ConfigError where it cannot be placed on the ranks or hosts."""
    placed = with_room(place(config, request.world_size), request.memory_bytes)
    check_hosts(placed, request.hosts)
    return SearchedPlan(config, placed, predict(placed, request.profile, request.iteration), fullest(placed), choice)


def config_of(request: SearchRequest, choice: Choice) -> AnyConfig:
    """The config with the chosen values, checked like any other. Errors: ConfigError."""
    tree: dict[str, Any] = request.config.model_dump(mode="json")
    whole = tuple(range(request.world_size))
    for name, option in choice.roles.items():
        own = option.config
        if request.placement is None:
            own = own.model_copy(update={"ranks": None if choice.placement[name] == whole else choice.placement[name]})
        _section(tree, name).update(own.model_dump(mode="json"))
    if choice.engine is not None:
        tree["rollout"].update(_engine_keys(request, choice.placement, choice.engine))
    return type(request.config).from_tree(tree, "the search")


def _engine_keys(request: SearchRequest, placement: Placement, engine: EngineOption) -> dict[str, Any]:
    """Of the section rollout: those that were chosen."""
    free = (request.free or everything(request.config))[ENGINE]
    chosen = {
        "tensor_parallel_size": engine.tp,
        "pipeline_parallel_size": engine.pp,
        "kv_cache_gib": engine.kv_cache_gib,
    }
    found: dict[str, Any] = {key: value for key, value in chosen.items() if key in free}
    if request.placement is None:
        ranks = placement[ENGINE]
        found["ranks"] = None if ranks == placement["actor"] else shown(ranks)  # as the config writes them
    return found


def _section(tree: Mapping[str, Any], name: str) -> Any:
    """Of a role, by key: actor, reward.models.0."""
    node: Any = tree
    for key in name.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
    return node


# ------------------------------------------------------------------------------------------------ what would fit


@dataclass(frozen=True)
class Least:
    """The least that would fit. memory: with as many ranks; a plan that then fits. ranks: with as much memory.

    in_time: whether the time sufficed to look; without it None may be what was not looked for.
    """

    memory_bytes: int | None
    plan: SearchedPlan | None
    ranks: int | None
    in_time: bool = True


MOST_DOUBLINGS, PRECISION = 6, 128
UNBOUNDED = 1 << 60  # bytes
SECONDS_OF_ONE = 6.0  # to find one that fits


def least_that_fits(request: SearchRequest, *, until: float = math.inf) -> Least:
    """For a request that nothing fits: memory to 1 part in 128, ranks by doubling. until: as `time.monotonic`."""
    known = known_of(request)

    def any_of(asked: SearchRequest) -> SearchedPlan | None:
        """One that fits."""
        seconds = min(request.seconds, SECONDS_OF_ONE, max(0.0, until - time.monotonic()))
        found = search(replace(asked, shown=1, seconds=seconds, first=True), known=known)
        return found.plans[0] if found.plans else None

    plan = any_of(replace(request, memory_bytes=UNBOUNDED))
    low, high = request.memory_bytes, 0 if plan is None else plan.fullest.needed
    while plan is not None and high - low > high // PRECISION:
        found = any_of(replace(request, memory_bytes=(low + high) // 2))
        if time.monotonic() > until:  # that none was found says nothing
            break
        low, high, plan = ((low + high) // 2, high, plan) if found is None else (low, found.fullest.needed, found)
    ranks: int | None = None
    for doublings in range(1, MOST_DOUBLINGS + 1 if request.placement is None else 1):
        more = replace(request, world_size=request.world_size << doublings)
        if time.monotonic() < until and any_of(more) is not None:
            ranks = more.world_size
            break
    return Least(None if plan is None else plan.fullest.needed, plan, ranks, in_time=time.monotonic() < until)
