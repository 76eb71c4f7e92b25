"""How the engine may run on so many ranks: parallel sizes and the KV cache, with their seconds. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Device
from hybridflow.automap.generation_time import generation_cost
from hybridflow.automap.sizes import at_once, deals_experts, shares_experts, stage_counts, tensor_sizes, values
from hybridflow.automap.timing import Work, share_of_responses
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Cut, Layout, RolloutLayout
from hybridflow.placement.kv_cache import KVCacheSize, gib_of, size_kv_cache
from hybridflow.reshard.groups import engine_stages, standalone_layout

LARGE_PART = 8 << 30  # bytes: of parts no larger there are no halves
CACHES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)  # of what the batch takes


@dataclass(frozen=True)
class EngineOption:
    """The engine on n ranks, with the KV cache as a config gives it."""

    tp: int
    pp: int
    kv_cache_gib: float | None
    kv_cache: KVCacheSize
    generating: float  # seconds
    expert_parallel: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tp, self.pp, self.expert_parallel

    @property
    def cut(self) -> Cut:
        return RolloutLayout(self.tp, self.pp, (), self.expert_parallel).cut


@dataclass(frozen=True)
class EngineOptions:
    """Of one config. free: the keys that may be chosen."""

    config: ExperimentConfig
    actor: ModelSpec
    work: Work
    free: frozenset[str]
    device: Device
    cuda: bool

    def on(self, num_ranks: int) -> list[EngineOption]:
        """Fastest first."""
        found = [option for sizes in self._sizes(num_ranks) for option in self._caches(*sizes, num_ranks)]
        return sorted(found, key=lambda option: (option.generating, option.kv_cache.whole, *option.sizes))

    def _sizes(self, num_ranks: int) -> Iterator[tuple[int, int, bool]]:
        """(tp, pp, whether ranks have whole experts); all that there may be where it is as the actor has it."""
        given = self.config.rollout
        across = self.config.tensor_parallel_across_hosts
        tps = tensor_sizes(self.actor, num_ranks, self.work.ranks_per_host, across=across)
        if given.tensor_parallel_size is not None:
            tps = values(self.free, given, "tensor_parallel_size", tps)
        for tp in tps:
            for pp in values(self.free, given, "pipeline_parallel_size", stage_counts(self.actor, num_ranks, tp)):
                if num_ranks % (tp * pp) == 0:
                    yield from ((tp, pp, whole) for whole in self._whole_experts(tp))

    def _whole_experts(self, tp: int) -> Iterator[bool]:
        for whole, fits in ((False, shares_experts(self.actor, tp)), (True, deals_experts(self.actor, tp))):
            if fits and self.config.rollout.enable_expert_parallel in (None, whole):
                yield whole

    def _caches(self, tp: int, pp: int, expert_parallel: bool, num_ranks: int) -> Iterator[EngineOption]:
        ranks = tuple(range(num_ranks))
        rollout = standalone_layout(ranks, tp, pp, expert_parallel=expert_parallel)
        stages = engine_stages(self.actor.num_layers, Layout(1, 1, num_ranks, ranks), rollout)
        given = self.config.rollout.kv_cache_gib
        if given is None and "kv_cache_gib" not in self.free:
            # the run takes what there is room for: a size of these at least
            default = self._sized(None, rollout, stages)
            if default is not None:  # else stages would have other shares of each kind of layer
                yield from (self._option(rollout, None, replace(default, whole=size)) for size in _parts_of(default))
            return
        gibs: list[float | None] = [given]
        if "kv_cache_gib" in self.free:
            whole = self._sized(None, rollout, stages)
            if whole is None:
                return
            gibs = [*(float(gib_of(size)) for size in _parts_of(whole)), *([given] if given is not None else [])]
        for gib in dict.fromkeys(gibs):
            sized = self._sized(gib, rollout, stages)
            if sized is not None:
                yield self._option(rollout, gib, sized)

    def _sized(self, gib: float | None, rollout: RolloutLayout, stages: Any) -> KVCacheSize | None:
        """None: it holds no sequence, or its stages have other shares of each kind of layer."""
        rollout_config = self.config.rollout.model_copy(update={"kv_cache_gib": gib})
        config = self.config.model_copy(update={"rollout": rollout_config})
        try:
            return size_kv_cache(config, self.actor, rollout, stages, cuda=self.cuda)
        except ConfigError:
            return None

    def _option(self, rollout: RolloutLayout, gib: float | None, cache: KVCacheSize) -> EngineOption:
        replicas = len(rollout.replicas)
        cost = generation_cost(
            self.actor,
            cut=rollout.cut,
            pp=rollout.pp,
            dtype=self.config.actor.dtype,
            responses=share_of_responses(self.config, replicas, cache, self.work, cuda=self.cuda),
            device=self.device,
        )
        hosts = max(1, rollout.tp * rollout.pp * replicas // self.work.ranks_per_host)
        seconds = at_once(cost, replicas, hosts=hosts)
        return EngineOption(rollout.tp, rollout.pp, gib, cache, seconds, expert_parallel=rollout.expert_parallel)


def _parts_of(cache: KVCacheSize) -> list[int]:
    """Bytes of the whole and of parts, the largest first: of a large cache also small ones, which go in anywhere."""
    parts = [cache.whole * part for part in CACHES]
    while parts[-1] > LARGE_PART:
        parts.append(parts[-1] / 2)
    return sorted({max(int(part), cache.least) for part in parts}, reverse=True)
