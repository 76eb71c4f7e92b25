"""How a role may run on so many ranks: every choice of the free keys, with seconds and memory. Pure.

    options = Options(config, specs, profile, free=ALL)
    options.of_role("actor", 64)       each RoleOption that is valid and not worse in all than another of the same sizes
    options.of_engine(64)              tp, pp and KV cache of the engine

HybridFlow's algorithm 2 (arXiv 2409.19256, section 6) goes over tensor and pipeline parallel sizes and takes the
fastest. Here memory decides which sizes go together, so that all are kept that are fastest for their memory. Seconds
and memory that do not depend on what is offloaded are computed once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from hybridflow.architecture.flops import mean_mixing_flops
from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.engine_options import EngineOption, EngineOptions
from hybridflow.automap.mean_rows import MeanRows
from hybridflow.automap.role_time import Model
from hybridflow.automap.sizes import (
    at_once,
    context_sizes,
    deals_experts,
    expert_sizes,
    shares_experts,
    stage_counts,
    tensor_sizes,
    values,
)
from hybridflow.automap.state_places import at, is_staged, places, staging
from hybridflow.automap.timing import (
    Work,
    offload_cost,
    scored_rows,
    scoring_cost,
    scoring_order,
    training_cost,
    updated_rows,
)
from hybridflow.config import ExperimentConfig, RoleConfig, TrainedRoleConfig
from hybridflow.config.auto import ENGINE, ENGINE_KEYS, ROLE_KEYS, SIZES, TRAINED_KEYS
from hybridflow.config.kinds import AnyConfig
from hybridflow.parallel.layout import Layout, expert_tensor_parallel
from hybridflow.placement.context_parallel import shares_tokens
from hybridflow.placement.footprint import Footprint, staged_bytes
from hybridflow.placement.forecast import resting, role_memory, rows_together
from hybridflow.placement.margin import role_bytes
from hybridflow.placement.overlapped_scoring import asks_for
from hybridflow.placement.placed import PlacedModel, head_of
from hybridflow.placement.recomputation import steps

GIB = 1 << 30
ROUNDED = 1 - 1e-9  # a sum in another order may be as much less
MODEL_CHUNKS = (1, 2, 4)  # a stage
MOST_EXPERT_HOSTS = 4  # that the ranks of an expert group lie on
SEQUENCES = (1, 2, 4, 8, 16, 32)  # of the longest, that micro_batch_tokens holds

Free = Mapping[str, frozenset[str]]  # role, or `engine` -> keys that may be chosen


@dataclass(frozen=True)
class RoleOption:
    """A role with all keys chosen. The layout lies over the ranks 0 to n - 1. Bytes are of each pipeline stage."""

    name: str
    config: RoleConfig
    layout: Layout
    alone: float  # seconds in which all ranks of the run wait: optimizer state goes to host memory and back
    scoring: float
    early: float  # no less than `scoring`: where the role may begin before the rollout is whole
    updating: float
    held: tuple[int, ...]  # while models train, without activations
    activations: tuple[int, ...]  # with the role's communicators: roles may share those, and the largest count
    resting: tuple[int, ...]  # while the engine generates

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.layout.tp, self.layout.pp, self.layout.ep, self.layout.cp

    @property
    def numbers(self) -> tuple[float, ...]:
        """All in which less is better."""
        return (self.alone, self.scoring, self.early, self.updating, *self.held, *self.activations, *self.resting)


def everything(config: AnyConfig) -> Free:
    """All keys that a search may choose."""
    roles = {
        name: frozenset(TRAINED_KEYS if isinstance(role, TrainedRoleConfig) else ROLE_KEYS)
        for name, role in config.roles().items()
    }
    return roles | {ENGINE: frozenset(ENGINE_KEYS)} if config.generates else roles


class Options:
    """Of one config on one kind of device. What was asked for is kept."""

    def __init__(
        self,
        config: AnyConfig,
        specs: Mapping[str, ModelSpec],
        profile: DeviceProfile,
        *,
        work: Work,
        free: Free,
        cuda: bool,
    ) -> None:
        self.config, self.specs, self.free, self.work = config, specs, free, work
        self.device, self.cuda = Device(profile), cuda
        self._roles: dict[tuple[str, int], list[RoleOption]] = {}
        self._least: dict[tuple[str, int], tuple[float, float, float] | None] = {}
        self._engines: dict[int, list[EngineOption]] = {}
        self._scored = set(scoring_order(config, config.roles()))

    @property
    def generating(self) -> ExperimentConfig:
        """The config, of a run that has an engine."""
        assert isinstance(self.config, ExperimentConfig), "a run on fixed data has no engine"
        return self.config

    # ---------------------------------------------------------------------------------------- roles

    def of_role(self, name: str, num_ranks: int) -> list[RoleOption]:
        """Those that are valid on so many ranks, fastest first."""
        if (name, num_ranks) not in self._roles:
            found = [self._option(name, config, layout) for config, layout in self._layouts(name, num_ranks)]
            found = [option for same in _by_sizes(found) for option in undominated(same)]
            found.sort(key=lambda option: (option.alone + option.scoring + option.updating, *option.sizes))
            self._roles[name, num_ranks] = found
        return self._roles[name, num_ranks]

    def of_engine(self, num_ranks: int) -> list[EngineOption]:
        """Fastest first."""
        if num_ranks not in self._engines:
            found = EngineOptions(
                self.generating, self.specs["actor"], self.work, self.free[ENGINE], self.device, cuda=self.cuda
            )
            self._engines[num_ranks] = found.on(num_ranks)
        return self._engines[num_ranks]

    def least(self, name: str, num_ranks: int) -> tuple[float, float, float] | None:
        """(alone, scoring, updating) that no option is below; None where there is none. Of the engine: generating."""
        if (name, num_ranks) not in self._least:
            self._least[name, num_ranks] = self._find_least(name, num_ranks)
        return self._least[name, num_ranks]

    def _find_least(self, name: str, num_ranks: int) -> tuple[float, float, float] | None:
        if name == ENGINE:
            engines = self.of_engine(num_ranks)
            return (engines[0].generating, 0.0, 0.0) if engines else None
        options = self.of_role(name, num_ranks)
        if not options:
            return None
        return min(o.alone for o in options), min(o.scoring for o in options), min(o.updating for o in options)

    def may_wait(self, name: str) -> bool:
        """Whether the flow asks for what this role scores before the rollout is whole, were the ranks such."""
        config = self.config
        if not isinstance(config, ExperimentConfig):
            return False
        waits = config.rollout.scores_while_waiting(cuda=self.cuda)
        return name in self._scored and waits and asks_for(config, name)

    def floor(self, name: str, num_ranks: int) -> tuple[float, float, float] | None:
        """As `least`, and no more than that, without looking at any option: products and attention at their best rate,
        shared evenly by all ranks."""
        if name == ENGINE:
            return self.least(name, num_ranks)
        scoring, updating = self._of_one_rank[name]
        return 0.0, ROUNDED * scoring / num_ranks, ROUNDED * updating / num_ranks

    @cached_property
    def _of_one_rank(self) -> dict[str, tuple[float, float]]:
        """By role: seconds of scoring and updating, of products and attention at their best rate."""
        return {name: self._at_best_rate(name) for name in self.config.roles()}

    def _at_best_rate(self, name: str) -> tuple[float, float]:
        role, spec = self.config.roles()[name], self.specs[name]
        scoring, updating = self._whole[name]
        scores = self._fastest(spec, role, name, scoring) if name in self._scored else 0.0
        if not isinstance(role, TrainedRoleConfig):
            return scores, 0.0
        return scores, sum(self._fastest(spec, role, name, updating, backward=each) for each in (False, True))

    @cached_property
    def _whole(self) -> dict[str, tuple[MeanRows, MeanRows]]:
        """By role: the rows of an iteration that it scores, and that it is updated by."""
        found = {}
        for name in self.config.roles():
            rows, steps = updated_rows(name, self.config, self.work)
            found[name] = scored_rows(name, self.config, self.work), replace(rows, number=rows.number * steps)
        return found

    def _fastest(
        self, spec: ModelSpec, role: RoleConfig, name: str, rows: MeanRows, *, backward: bool = False
    ) -> float:
        """Seconds of one rank."""
        profile = self.device.profile
        model = Model(spec, 1, role.dtype, head_of(name), False, device=self.device)
        in_layer = sum(2 * k * n for k, n in model.matrices)
        if model.experts:
            in_layer += model.experts.copies * sum(2 * k * n for k, n in model.experts.matrices)
        at_end = 2 * spec.hidden_size * spec.padded_vocab_size if model.head == "lm" else 0
        products = (2 if backward else 1) * (rows.tokens * in_layer * spec.num_layers + rows.outputs * at_end)
        mixing = mean_mixing_flops(spec, pairs=rows.pairs, tokens=rows.tokens)
        attention = mixing * spec.num_layers * (2.5 if backward else 1.0)
        rate = profile.attention_backward if backward else profile.attention_forward
        return products / profile.product_rates(role.dtype).best + attention / rate

    def _layouts(self, name: str, num_ranks: int) -> Iterator[tuple[RoleConfig, Layout]]:
        given = self.config.roles()[name]
        ranks = tuple(range(num_ranks))
        for sizes in self._sizes(name, given, num_ranks):
            resized = given.model_copy(update=sizes)
            try:
                layout = resized.layout_on(ranks)
                layout.chunks(self.specs[name].num_layers)
            except ValueError:  # the layers do not go up in the stages
                continue
            if isinstance(given, TrainedRoleConfig) and layout.dp > self.config.fewest_rows:
                continue
            for changes in self._ways(name, given, layout):
                yield resized.model_copy(update=changes), layout

    def _sizes(self, name: str, given: RoleConfig, num_ranks: int) -> Iterator[dict[str, Any]]:
        free = self.free[name]
        across = self.config.tensor_parallel_across_hosts
        tps = tensor_sizes(self.specs[name], num_ranks, self.work.ranks_per_host, across=across)
        for tp in values(free, given, "tensor_parallel_size", tps):
            for pp in values(free, given, "pipeline_parallel_size", stage_counts(self.specs[name], num_ranks, tp)):
                if num_ranks % (tp * pp):
                    continue
                chunks = values(free, given, "virtual_pipeline_parallel_size", MODEL_CHUNKS)
                for vpp in chunks if pp > 1 else [vpp for vpp in chunks if vpp == 1]:
                    sizes = dict(zip(SIZES[:3], (tp, pp, vpp), strict=True))
                    if "pipeline_parallel_size" in free and pp == 1:
                        ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
                        sizes |= dict.fromkeys(ends, None)
                    for replicas in self._replicas(name, given, tp, num_ranks // (tp * pp)):
                        experts = self._experts(name, given, tp, num_ranks // (tp * pp))
                        yield from (sizes | replicas | each for each in experts)

    def _replicas(self, name: str, given: RoleConfig, tp: int, copies: int) -> Iterator[dict[str, Any]]:
        """Of so many copies of the model: those that have rows of their own, and those that share rows' tokens."""
        free, own = self.free[name], given.data_parallel_size
        sizes = context_sizes(self.specs[name], tp, self.config.max_sequence_length)
        for cp in values(free, given, "context_parallel_size", sizes):
            exact = self.cuda and given.dtype == "float32"  # `check_context` has the rules
            if copies % cp or (cp > 1 and (exact or not shares_tokens(self.specs[name], tp, cp))):
                continue
            if "data_parallel_size" in free:
                yield {"context_parallel_size": cp, "data_parallel_size": copies // cp}
            elif own is None or own * cp == copies:
                yield {"context_parallel_size": cp, "data_parallel_size": own}

    def _experts(self, name: str, given: RoleConfig, tp: int, copies: int) -> Iterator[dict[str, Any]]:
        """Whole ones on each tensor-parallel rank or over several replicas, or a share of each; as the config says
        where it says so."""
        spec = self.specs[name]
        all_sizes = expert_sizes(spec, tp, copies, most=MOST_EXPERT_HOSTS * self.work.ranks_per_host)
        for ep in values(self.free[name], given, "expert_parallel_size", all_sizes):
            etp = None if "expert_parallel_size" in self.free[name] else given.expert_tensor_parallel_size
            fits = deals_experts(spec, ep) if ep > 1 else True
            each = expert_tensor_parallel(tp, ep, etp)
            fills = each * ep % tp == 0 and copies % (each * ep // tp) == 0
            if fits and fills and shares_experts(spec, each):
                yield {"expert_parallel_size": ep, "expert_tensor_parallel_size": etp}

    def _ways(self, name: str, given: RoleConfig, layout: Layout) -> Iterator[dict[str, Any]]:
        """Of the other keys."""
        free = self.free[name]
        choices: dict[str, Iterable[Any]] = {
            "sequence_parallel": (False, True),
            "micro_batch_tokens": self._budgets(given, layout),
        }
        if isinstance(given, TrainedRoleConfig):
            choices |= {
                "recompute": steps(self.specs[name]),
                "offload_optimizer": places(
                    self._model(name, given, layout), self.config, self.work, self.device, cuda=self.cuda
                ),
                "offload_gradients": (False, True) if self._offloads else (False,),
            }
        found: list[dict[str, Any]] = [{}]
        for key, all_values in choices.items():
            found = [{**one, key: value} for one in found for value in values(free, given, key, all_values)]
        for one in found:
            apart = layout.tp > 1 and layout.dense_per_expert_copy > 1  # `RoleConfig` has the rule
            if one["sequence_parallel"] in ((True,) if apart else (False, True) if layout.tp > 1 else (False,)):
                yield one

    def _budgets(self, given: RoleConfig, layout: Layout) -> list[int]:
        """Micro-batches of some of the longest sequences, up to all that a replica has; and what the config says."""
        longest = self.config.max_sequence_length
        rows = ceil(rows_together(self.config, given) / layout.dp)
        found = {longest * min(count, rows) for count in SEQUENCES}
        if longest <= given.micro_batch_tokens <= longest * rows:
            found.add(given.micro_batch_tokens)
        return sorted(found)

    @property
    def _offloads(self) -> bool:
        """Whether models wait while an engine works."""
        return self.config.generates and not self.config.generates_beside

    def _option(self, name: str, config: RoleConfig, layout: Layout) -> RoleOption:
        model = self._model(name, config, layout)
        footprints, links = self._footprints(model), role_bytes(model, cuda=self.cuda)
        activations, rest = zip(*((each.activations, resting(each, config).total) for each in footprints), strict=True)
        scoring, early, updating = self._seconds(model)
        alone = offload_cost(model, self.device).on_share(1.0) if self._offloads else 0.0
        return RoleOption(
            name,
            config,
            layout,
            alone,
            scoring,
            early=early,
            updating=updating,
            held=tuple(each.total - each.activations for each in footprints),
            activations=tuple(map(sum, zip(activations, links, strict=True))),
            resting=tuple(map(sum, zip(rest, links, strict=True))) if name == "actor" else rest,  # those stay
        )

    def _model(self, name: str, config: RoleConfig, layout: Layout) -> PlacedModel:
        return PlacedModel(name, config, self.specs[name], layout, head_of(name))

    def _footprints(self, model: PlacedModel) -> tuple[Footprint, ...]:
        key, staged = self._without_offloading(model), is_staged(model)
        if key not in self._kept:
            self._kept[key] = role_memory(self.config, at(model, False) if staged else model).training
        found = self._kept[key]
        return tuple(replace(each, optimizer=staged_bytes(each.optimizer)) for each in found) if staged else found

    @cached_property
    def _kept(self) -> dict[tuple[Any, ...], tuple[Footprint, ...]]:
        return {}

    @cached_property
    def _known_seconds(self) -> dict[tuple[Any, ...], tuple[float, float, float]]:
        return {}

    @staticmethod
    def _without_offloading(model: PlacedModel) -> tuple[Any, ...]:
        config, layout = model.config, model.layout
        recompute = config.recompute if isinstance(config, TrainedRoleConfig) else ""
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.expert_tp, len(layout.ranks))
        return (model.name, *sizes, config.sequence_parallel, config.micro_batch_tokens, recompute)

    def _seconds(self, model: PlacedModel) -> tuple[float, float, float]:
        """(scoring, early, updating) of an iteration, see `RoleOption`."""
        key = self._without_offloading(model)
        if key not in self._known_seconds:
            scoring = early = updating = 0.0
            hosts = len(model.layout.ranks) // self.work.ranks_per_host
            if model.name in self._scored:
                cost = scoring_cost(model, self.config, self.work, self.device)
                early = scoring = at_once(cost, model.layout.copies("dense"), hosts=hosts)
            if self.may_wait(model.name):
                cost = scoring_cost(model, self.config, self.work, self.device, in_units=True)
                early = max(scoring, at_once(cost, model.layout.copies("dense"), hosts=hosts))
            if isinstance(model.config, TrainedRoleConfig):
                updating = training_cost(at(model, False), self.config, self.work, self.device).on_share(1.0)
            self._known_seconds[key] = scoring, early, updating
        scoring, early, updating = self._known_seconds[key]
        staged = staging(model, self.config, self.work, self.device).on_share(1.0) if is_staged(model) else 0.0
        return scoring, early, updating + staged


def undominated(options: Sequence[RoleOption]) -> list[RoleOption]:
    """Those that no other is at least as good as in all numbers; of those alike the first."""
    numbers = np.array([option.numbers for option in options])
    kept: list[int] = []
    for i in np.lexsort(numbers.T[::-1]):  # whatever is as good in all stands before
        if not kept or not bool((numbers[kept] <= numbers[i]).all(axis=1).any()):
            kept.append(int(i))
    return [options[i] for i in kept]


def _by_sizes(options: Iterable[RoleOption]) -> list[list[RoleOption]]:
    found: dict[tuple[int, ...], list[RoleOption]] = {}
    for option in options:
        found.setdefault(option.sizes, []).append(option)
    return list(found.values())
