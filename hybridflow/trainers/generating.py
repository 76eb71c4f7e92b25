"""How a run has responses generated, by the config: in turn with training, beside it, partly, or from files; and what
is scored meanwhile.
"""

from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.dynamic_sampling import SURPLUS, with_records
from hybridflow.flows.engine_ranks import EnginesApart
from hybridflow.flows.generation import Source
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles
from hybridflow.flows.one_step_off import NEXT, OneStepOff
from hybridflow.flows.overlapped_scoring import OverlappedModel, OverlappedScoring
from hybridflow.flows.partial import UNDER_WAY, Partial
from hybridflow.flows.replay import Replay, ReplaySource
from hybridflow.flows.synchronous import SharedEngine, Synchronous
from hybridflow.parallel.platform import fresh_store
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.store_client import StoreClient
from hybridflow.placement.overlapped_scoring import blocks_within, overlapped_models
from hybridflow.placement.placed import PlacedRun
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.rollout.routing_records import RoutingRecords


def source_of(
    config: ExperimentConfig,
    generator: Generator | Replay,
    scoring: OverlappedScoring,
    roles: Roles,
    *,
    apart: EnginesApart | None,
    manager: CheckpointManager,
    draws: PromptDraws,
    stop: StopRequest,
    world: RunContext,
    hooks: RunHooks,
) -> Source:
    """Build the config's source of rollouts. After a fork or a noticed change, a checkpoint's rollouts are not used."""
    kept = manager.state.kept if manager.state is not None and manager.may_load_rollout else {}
    if isinstance(generator, Replay):
        return ReplaySource(generator, scoring, config.sampling, draws=draws, watch=world.watch)
    if apart is not None:
        return OneStepOff(
            generator,
            scoring,
            roles.actor,
            config,
            draws=draws,
            orders=apart.orders,
            everyone=apart.everyone,
            stop=lambda: stop.ask("a signal to a rank of the engine"),
            hooks=hooks,
            kept=kept.get(NEXT),
            goes_on=manager.state is not None,
        )
    engine = SharedEngine(generator, roles, world.platform)
    if config.rollout.partial is not None:
        under_way = kept.get(UNDER_WAY)
        return Partial(engine, scoring, roles.actor, config, draws=draws, kept=under_way, watch=world.watch)
    return Synchronous(engine, scoring, config.sampling, draws=draws, watch=world.watch, hooks=hooks)


DROPPED = {
    NEXT: "the next rollout of the checkpoint is dropped, and its prompts are drawn again",
    UNDER_WAY: "responses under way in the checkpoint are dropped, with their prompts",
}


def state_of_flows(manager: CheckpointManager, records: RoutingRecords | None) -> RunState | None:
    """The state of the checkpoint, without what sources kept; None where there is none. Notes say what is dropped.

    A fork may have other prompts, and a surplus has numbers of the old prompts: it is dropped.
    """
    if manager.state is None:
        return None
    if not manager.may_load_rollout:
        manager.notes += [line for name, line in DROPPED.items() if name in manager.state.kept]
    state = manager.state.keeping(NEXT, None).keeping(UNDER_WAY, None)
    return with_records(state.keeping(SURPLUS, None) if manager.is_fork else state, records)


def overlapped_scoring(placed: PlacedRun, roles: Roles, world: RunContext) -> OverlappedScoring:
    """With the notices between the ranks that score. Collective over the world."""
    rank, known = world.platform.rank, roles.scoring()
    models = [
        OverlappedModel(*known[name], blocks_within(placed.computing[name].layout, placed.rollout))
        for name in overlapped_models(placed)
        if placed.config.data.environment is None  # what it has written is not announced
    ]
    return OverlappedScoring(
        models,
        roles.scorer,
        placed.rollout,
        actor=roles.actor,
        sampling=placed.config.sampling,
        rank=rank,
        groups=world.groups,
        notices=StoreClient(fresh_store(), "while waiting") if models else None,
        exchange=world.exchange,
        watch=world.watch,
    )
