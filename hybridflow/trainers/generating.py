"""How a run has responses generated, by the config: in turn with training, beside it, or partly; and what is scored
meanwhile.
"""

from typing import Any

from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.config import ExperimentConfig
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.generation import Generation
from hybridflow.flows.models import Roles
from hybridflow.flows.one_step_off import OneStepOffGeneration
from hybridflow.flows.overlapped_scoring import OverlappedModel, OverlappedScoring
from hybridflow.flows.partial import PartialGeneration
from hybridflow.flows.replay import Replay
from hybridflow.parallel.platform import fresh_store
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.store_client import StoreClient
from hybridflow.placement.overlapped_scoring import blocks_within, models_that_wait
from hybridflow.placement.placed import PlacedRun
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.trainers.engine_ranks import EnginesApart


def generation_of(
    config: ExperimentConfig,
    generator: Generator | Replay,
    scoring: OverlappedScoring,
    roles: Roles,
    *,
    apart: EnginesApart | None,
    manager: CheckpointManager,
    draws: PromptDraws,
    stop: StopRequest,
    **given: Any,
) -> Generation:
    """given: platform, watch and hooks. Saves have beside the state what was generated ahead."""
    state = manager.state
    if isinstance(generator, Replay):
        return Generation(generator, scoring, roles, config.sampling, **given)
    if config.rollout.partial is not None:
        under_way = None if state is None or state.under_way is None else dict(state.under_way)
        partial = PartialGeneration(
            generator, scoring, roles, config.sampling, config=config, draws=draws, under_way=under_way, **given
        )
        manager.completed = partial.completed
        return partial
    if apart is None:
        return Generation(generator, scoring, roles, config.sampling, **given)
    generation = OneStepOffGeneration(
        generator,
        scoring,
        roles,
        config.sampling,
        draws=draws,
        begins_rows=config.data.environment is not None,
        orders=apart.orders,
        everyone=apart.everyone,
        stop=lambda: stop.ask("a signal to a rank of the engine"),
        following=None if state is None else state.next_rollout,
        goes_on=state is not None,
        **given,
    )
    manager.completed = generation.completed
    return generation


def overlapped_scoring(
    placed: PlacedRun, roles: Roles, world: RunContext
) -> tuple[OverlappedScoring, StoreClient | None]:
    """With the notices between the ranks that score. Collective over the world."""
    rank, known = world.platform.rank, roles.scoring()
    models = [
        OverlappedModel(*known[name], blocks_within(placed.computing[name].layout, placed.rollout))
        for name in models_that_wait(placed)
        if placed.config.data.environment is None  # what it has written is not announced
    ]
    notices = StoreClient(fresh_store(), "while waiting") if models else None
    scoring = OverlappedScoring(
        models,
        roles.scorer,
        placed.rollout,
        rank=rank,
        groups=world.groups,
        notices=notices,
        exchange=world.exchange,
        watch=world.watch,
    )
    return scoring, notices
