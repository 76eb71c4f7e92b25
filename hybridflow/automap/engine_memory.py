"""What the engine takes beside the roles on each of the actor's layouts: memory, and seconds of the hand-off. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod

from hybridflow.automap.engine_options import EngineOption
from hybridflow.automap.options import Options
from hybridflow.automap.timing import Moved, moving_cost
from hybridflow.config.auto import ENGINE
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.parallel.ranks import Ranks
from hybridflow.placement.footprint import ITEM_BYTES
from hybridflow.placement.forecast import engine_bytes, kept_by_sampler, storage_elements
from hybridflow.placement.margin import engine_bytes_beside, vllm_bytes
from hybridflow.placement.reshard import EngineHoldings
from hybridflow.reshard.groups import copies_for_engine, engine_stages, rollout_layout
from hybridflow.reshard.plan import plan_reshard


@dataclass(frozen=True)
class _HandOff:
    """shards: (stage, the engine's own weights less what is released, layers of the engine's stage), each once.

    sources: where in training the first rank's shards come from: (tp, copy of the dense weights, pp).
    """

    shards: list[tuple[int, int, int]]
    moved: Moved
    sources: list[tuple[int, int, int]]


@dataclass
class EngineMemory:
    """What an engine adds on each pipeline stage of the actor, or on ranks of its own. What is known is kept."""

    options: Options
    _known: dict[tuple[object, ...], "_HandOff"] = field(default_factory=dict)
    _on_hosts: dict[tuple[object, ...], bool] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], bool] = field(default_factory=dict)  # see `Branches`

    def least(self, option: EngineOption) -> int:
        """On a rank, whichever the actor's layout: the engine's weights may lie in the actor's memory."""
        return self._beside(option) + (option.kv_cache.whole if option.pp == 1 else 0)

    def awake(self, option: EngineOption) -> int:
        """While models train."""
        config, libraries = self.options.generating, self._libraries(option)
        if config.rollout.sleep_level != 0:
            return libraries
        return libraries + option.kv_cache.whole + kept_by_sampler(config, self.options.specs["actor"], pp=option.pp)

    def _beside(self, option: EngineOption) -> int:
        spec = self.options.specs["actor"]
        needed = engine_bytes(self.options.generating, spec, cut=option.cut, pp=option.pp)
        return needed + self._libraries(option)

    def _libraries(self, option: EngineOption) -> int:
        """At least: of several stages, which need not be alike, without the graphs."""
        if not self.options.cuda:
            return 0
        layers = self.options.specs["actor"].num_layers if option.pp == 1 else 0
        captures = not self.options.generating.rollout.enforce_eager
        return sum(engine_bytes_beside(layers, option.tp, captures=captures)) + vllm_bytes(option.tp, option.pp)

    def most_bytes(
        self, train: Layout, option: EngineOption, ranks: Sequence[int], *, colocated: bool
    ) -> tuple[int, ...] | None:
        """By stage, of the rank with most; None where a tensor-parallel group would leave a host, or is none."""
        config = self.options.generating
        if config.rollout.tensor_parallel_size is None and "tensor_parallel_size" not in self.options.free[ENGINE]:
            if option.tp != train.tp:
                return None
        if config.rollout.enable_expert_parallel is None and option.tp > 1:
            if option.expert_parallel != (train.ep > 1):
                return None
        if colocated and not self._on_one_host(train, option, ranks):
            return None
        shards = self._hand_off(train, option, colocated=colocated).shards
        # a stage of the engine has a part of the cache by layers
        most = max(layers for _, _, layers in shards)
        beside = self._beside(option)
        by_stage: dict[int, int] = {}
        for stage, size, layers in shards:
            needed = size + option.kv_cache.whole * layers // most + beside
            by_stage[stage] = max(by_stage.get(stage, 0), needed)
        return tuple(by_stage[stage] for stage in sorted(by_stage))

    def seconds(self, train: Layout, option: EngineOption, ranks: Ranks, actor_ranks: Ranks) -> float:
        """Of the hand-off, at least: on the actor's ranks `reshard_cost`, on others what the engine has to receive."""
        per_host, whole = self.options.work.ranks_per_host, replace(train, ranks=actor_ranks)
        found = self._hand_off(train, option, colocated=ranks == actor_ranks)
        host = ranks[0] // per_host
        if ranks == actor_ranks:
            sources = [whole.rank_at(whole.at(*source)) for source in found.sources]
            crosses = ranks[-1] // per_host != host and any(source // per_host != host for source in sources)
        elif set(ranks) & set(actor_ranks):
            return 0.0  # some have a part of it
        else:
            crosses = not any(rank // per_host == host for rank in actor_ranks)
        cost = moving_cost(found.moved, self.options.device, hosts=2 if crosses else 1, busy=len(ranks))
        return cost.on_share(1.0)

    def _hand_off(self, train: Layout, option: EngineOption, *, colocated: bool) -> "_HandOff":
        corner = _one_of_each(train, option) if colocated else Layout(1, 1, 1, (0,))
        key = (corner, option.sizes, colocated)
        if key not in self._known:
            self._known[key] = self._find(corner, option, colocated=colocated)
        return self._known[key]

    def _find(self, train: Layout, option: EngineOption, *, colocated: bool) -> "_HandOff":
        spec, config = self.options.specs["actor"], self.options.generating
        beside = tuple(range(1, 1 + option.tp * option.pp))
        alone = RolloutLayout(option.tp, option.pp, (beside,), option.expert_parallel)
        whole = option.expert_parallel
        rollout = rollout_layout(train, option.tp, option.pp, expert_parallel=whole) if colocated else alone
        bucket_elements = config.rollout.bucket_bytes(cuda=True) // ITEM_BYTES[config.actor.dtype]
        plan = plan_reshard(spec, train, rollout, bucket_elements=bucket_elements, dtype=config.actor.dtype)
        holdings = EngineHoldings(
            plan, spec, itemsize=ITEM_BYTES[config.actor.dtype], bucket_elements=storage_elements(config)
        )
        stages = engine_stages(spec.num_layers, train, rollout)
        found: set[tuple[int, int, int]] = set()
        for rank in rollout.ranks:
            own, released = holdings.own_and_released(rank)
            engine = rollout.coordinates(rank)
            stage = train.coordinates(rank).pp if colocated else engine.pp
            found.add((stage if colocated else 0, own - released, len(stages[engine.pp])))
        moved = Moved.from_plan(plan, ITEM_BYTES[config.actor.dtype])
        if not colocated:  # whichever rank sends, and however the shards come about
            moved = Moved(received=moved.received, sent=0, permuted=0)
        sources = [(at.tp, train.copy_index("dense", at), at.pp) for at in plan.sources(rollout.ranks[0])]
        return _HandOff(sorted(found), moved, sources)

    def _on_one_host(self, train: Layout, option: EngineOption, ranks: Sequence[int]) -> bool:
        """Whether each tensor-parallel group of the engine does."""
        per_host = self.options.work.ranks_per_host
        if self.options.generating.tensor_parallel_across_hosts or ranks[-1] < per_host:
            return True
        key = (train.tp, train.pp, train.copies("dense"), option.sizes, ranks[0] % per_host)
        if key not in self._on_hosts:
            groups = rollout_layout(train, option.tp, option.pp).tp_groups()
            self._on_hosts[key] = all(len({ranks[rank] // per_host for rank in group}) == 1 for group in groups)
        return self._on_hosts[key]


def _one_of_each(train: Layout, option: EngineOption) -> Layout:
    """With only as many copies as an engine replica, or a copy of the experts, reaches over: the others are alike."""
    tp, pp = min(option.tp, train.tp), min(option.pp, train.pp)
    if max(option.tp, train.tp) % tp or max(option.pp, train.pp) % pp:
        return train  # an engine of neighbours, wherever they lie
    copies = lcm(prod(copies_for_engine(train, option.tp // tp, option.pp // pp)), train.dense_per_expert_copy)
    return replace(train, dp=copies, cp=1, ranks=tuple(range(train.tp * train.pp * copies)))
