"""A product's run whose responses are given: everything but the engine and the prompts' file is real."""

import contextlib
from typing import Any

import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.flows.run import Run
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.planning.placed import place
from hybridflow.rewards.scorer import FunctionCaller
from hybridflow.roles.base import World
from hybridflow.trainer import build_roles


class GivenResponses:
    """In the engine's place."""

    own_bytes = 0

    def __init__(self, rollout: RolloutBatch) -> None:
        self.rollout, self.costs = rollout, []

    def resharded(self) -> Any:
        return contextlib.nullcontext()

    def awake(self) -> Any:
        return contextlib.nullcontext()

    def generate(self, prompts: PromptBatch, **how: Any) -> RolloutBatch:
        return self.rollout


class GivenPrompts:
    """In the place of a prompt file: reward models read tokens alone."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: list[int]) -> PromptBatch:
        ones = torch.ones(len(indices), dtype=torch.int64)
        return PromptBatch(input_ids=ones, lengths=ones, texts=("",) * len(indices), columns={})


def given_run(config: ExperimentConfig, rollout: RolloutBatch, world: World) -> Run:
    """A run of `config` that always generates `rollout`."""
    caller = FunctionCaller(lambda ids: "", world.platform.rank, world.platform.world_size)
    return Run(
        config,
        build_roles(place(config, world.platform.world_size), world, caller),
        GivenResponses(rollout),
        GivenPrompts(config.data.prompts_per_iteration),
        platform=world.platform,
        exchange=world.exchange,
        watch=world.watch,
        watchdog=Watchdog(config.watchdog.deadlines(), StopRequest(1.0, signals=())),
    )
