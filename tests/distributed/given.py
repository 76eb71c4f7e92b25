"""A product's run whose responses are given: everything but the engine and the prompts' file is real."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.data.order import PromptOrder
from hybridflow.data.prompts import DrawnPrompts
from hybridflow.data.usable import Dropped
from hybridflow.flows.bookkeeping import OnlineBookkeeping
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.flows.run import Run
from hybridflow.flows.synchronous import SharedEngine, Synchronous
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.placed import place
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.pool import Pool
from hybridflow.rewards.specs import pool_limits, pool_specs
from hybridflow.roles.base import RunContext
from hybridflow.trainers.online import build_roles


class GivenResponses:
    """In the engine's place."""

    own_bytes = 0
    turn_counts = None  # no environment answers

    def __init__(self, rollout: RolloutBatch, greedy: RolloutBatch | None = None) -> None:
        self.rollout, self.greedy, self.costs = rollout, greedy, []

    def resharded(self) -> Any:
        return contextlib.nullcontext()

    def awake(self) -> Any:
        return contextlib.nullcontext()

    def pop_cache_use(self) -> dict[str, float]:
        return {}

    def count_work(self, rollout: RolloutBatch, watch: object) -> None:
        """No engine has computed anything."""

    def generate(self, prompts: PromptBatch, *, temperature: float | None = None, **how: Any) -> RolloutBatch:
        if temperature is None:
            return self.rollout
        assert self.greedy is not None, "no greedy responses are given"
        return self.greedy


class GivenPrompts:
    """In the place of a prompt file: reward models read tokens alone."""

    def __init__(self, count: int) -> None:
        self.count, self.dropped = count, Dropped()

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: list[int]) -> PromptBatch:
        ones = torch.ones(len(indices), dtype=torch.int64)
        return PromptBatch(input_ids=ones, lengths=ones, texts=("",) * len(indices), columns={})

    def order(self, seed: int, shuffle: bool, *, position: int = 0) -> PromptOrder:
        return PromptOrder(self.count, seed, shuffle, position=position)

    def start_ahead(self, order: PromptOrder, count: int) -> None:
        """No environment has instances to start."""

    def draw(self, order: PromptOrder, count: int) -> DrawnPrompts:
        numbers = tuple(order.next(count))
        return DrawnPrompts(self.batch(list(numbers)), numbers, Dropped())


def given_roles(config: ExperimentConfig, world: RunContext) -> Roles:
    """The models of a run. A reward function reads responses as token ids with spaces between them."""
    specs, num_ranks = pool_specs(config), world.platform.world_size
    pool = Pool(specs, pool_limits(config.reward, num_ranks)) if specs else None
    caller = FunctionCaller(lambda ids: " ".join(map(str, ids)), world.platform.rank, num_ranks, pool)
    return build_roles(place(config, world.platform.world_size), world, caller)


def trained_weights(roles: Roles) -> list[Tensor]:
    """All that their steps change, without main weights and states of an optimizer: plain SGD in float32 has none."""
    return [p.data for role in roles.trained() for chunk in role.chunks for p in chunk.parameters()]


def nobody_waits(config: ExperimentConfig, world: RunContext) -> OverlappedScoring:
    """Given responses are there at once: everything is scored when the rollout is whole."""
    layout = RolloutLayout(1, 1, ((0,),))
    return OverlappedScoring(
        [],
        None,
        layout,
        actor=None,
        sampling=config.sampling,
        rank=world.platform.rank,
        groups=world.groups,
        notices=None,
        exchange=world.exchange,
        watch=world.watch,
    )


def given_run(
    config: ExperimentConfig,
    rollout: RolloutBatch,
    world: RunContext,
    *,
    greedy: RolloutBatch | None = None,
    roles: Roles | None = None,
) -> tuple[Run, OnlineBookkeeping]:
    """A run of `config` that always generates `rollout`, and `greedy` where it is asked for that."""
    roles, hooks = roles or given_roles(config, world), RunHooks()
    prompts = GivenPrompts(config.data.prompts_per_iteration)
    source = Synchronous(
        SharedEngine(GivenResponses(rollout, greedy), roles, world.platform),
        nobody_waits(config, world),
        config.sampling,
        draws=PromptDraws(config, prompts),
        watch=world.watch,
        hooks=hooks,
    )
    book = OnlineBookkeeping(
        config,
        roles,
        prompts,
        source,
        exchange=world.exchange,
        watch=world.watch,
        watchdog=Watchdog(config.watchdog.deadlines(), StopRequest(1.0, signals=())),
        hooks=hooks,
    )
    return Run(config, book, source), book
