"""What the engine takes of a rank beside the roles, on each of the actor's layouts. Pure; what is known is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

from hybridflow.auto_values import ENGINE
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.planning.engine_options import EngineOption
from hybridflow.planning.footprint import ITEM_BYTES
from hybridflow.planning.forecast import engine_bytes, kept_by_sampler, storage_elements
from hybridflow.planning.options import Options
from hybridflow.planning.reshard import EngineHoldings
from hybridflow.reshard.groups import engine_stages, rollout_layout
from hybridflow.reshard.plan import plan_reshard


@dataclass
class EngineMemory:
    """What an engine adds on each pipeline stage of the actor, or on ranks of its own. What is known is kept."""

    options: Options
    _known: dict[tuple[object, ...], list[tuple[int, int, int]]] = field(default_factory=dict)
    _on_hosts: dict[tuple[object, ...], bool] = field(default_factory=dict)
    blocks: dict[tuple[object, ...], bool] = field(default_factory=dict)  # see `Branches`

    def least(self, option: EngineOption) -> int:
        """On a rank, whichever the actor's layout."""
        return self._beside(option)

    def awake(self, option: EngineOption) -> int:
        """While models train."""
        config = self.options.generating
        if config.rollout.sleep_level != 0:
            return 0
        return option.kv_cache.whole + kept_by_sampler(config, self.options.specs["actor"], pp=option.pp)

    def _beside(self, option: EngineOption) -> int:
        return engine_bytes(self.options.generating, self.options.specs["actor"], tp=option.tp, pp=option.pp)

    def of(
        self, train: Layout, option: EngineOption, ranks: Sequence[int], *, colocated: bool
    ) -> tuple[int, ...] | None:
        """By stage, of the rank with most; None where a tensor-parallel group would leave its host, or is none."""
        config = self.options.generating
        if config.rollout.tensor_parallel_size is None and "tensor_parallel_size" not in self.options.free[ENGINE]:
            if option.tp != train.tp:
                return None
        if colocated and not self._on_one_host(train, option, ranks):
            return None
        corner = _one_of_each(train, option) if colocated else Layout(1, 1, 1, (0,))
        key = (corner, option.sizes, colocated)
        if key not in self._known:
            self._known[key] = self._shards(corner, option, colocated=colocated)
        shards = self._known[key]
        # a stage of the engine has its part of the cache by its layers
        most = max(layers for _, _, layers in shards)
        beside = self._beside(option)
        by_stage: dict[int, int] = {}
        for stage, size, layers in shards:
            needed = size + option.kv_cache.whole * layers // most + beside
            by_stage[stage] = max(by_stage.get(stage, 0), needed)
        return tuple(by_stage[stage] for stage in sorted(by_stage))

    def _shards(self, train: Layout, option: EngineOption, *, colocated: bool) -> list[tuple[int, int, int]]:
        """(stage, the engine's own weights less what is released, layers of the engine's stage), each once."""
        spec, config = self.options.specs["actor"], self.options.generating
        beside = tuple(range(1, 1 + option.tp * option.pp))
        alone = RolloutLayout(option.tp, option.pp, (beside,))
        rollout = rollout_layout(train, option.tp, option.pp) if colocated else alone
        bucket_elements = config.rollout.bucket_bytes(cuda=True) // ITEM_BYTES[config.actor.dtype]
        plan = plan_reshard(spec, train, rollout, bucket_elements=bucket_elements)
        holdings = EngineHoldings(
            plan, spec, itemsize=ITEM_BYTES[config.actor.dtype], bucket_elements=storage_elements(config)
        )
        stages = engine_stages(spec.num_layers, train, rollout)
        found = set()
        for rank in rollout.ranks:
            own, released = holdings.of(rank)
            engine = rollout.coordinates(rank)
            stage = train.coordinates(rank).pp if colocated else engine.pp
            found.add((stage if colocated else 0, own - released, len(stages[engine.pp])))
        return sorted(found)

    def _on_one_host(self, train: Layout, option: EngineOption, ranks: Sequence[int]) -> bool:
        """Whether each tensor-parallel group of the engine does."""
        per_host = self.options.work.ranks_per_host
        if self.options.generating.tensor_parallel_across_hosts or ranks[-1] < per_host:
            return True
        key = (train.tp, train.pp, train.dp, option.sizes, ranks[0] % per_host)
        if key not in self._on_hosts:
            groups = rollout_layout(train, option.tp, option.pp).tp_groups()
            self._on_hosts[key] = all(len({ranks[rank] // per_host for rank in group}) == 1 for group in groups)
        return self._on_hosts[key]


def _one_of_each(train: Layout, option: EngineOption) -> Layout:
    """With only as many replicas as an engine replica reaches over: the others are alike."""
    tp, pp = min(option.tp, train.tp), min(option.pp, train.pp)
    if max(option.tp, train.tp) % tp or max(option.pp, train.pp) % pp:
        return train  # an engine of neighbours, wherever they lie
    for_tp = gcd(option.tp // tp, train.dp)
    dp = for_tp * gcd(option.pp // pp, train.dp // for_tp)
    return Layout(
        train.tp,
        train.pp,
        dp,
        tuple(range(train.tp * train.pp * dp)),
        vpp=train.vpp,
        first_stage_layers=train.first_stage_layers,
        last_stage_layers=train.last_stage_layers,
    )
