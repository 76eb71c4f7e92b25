"""What is built of a config: models, the processes of reward functions, and the engine. For training and evaluation.

caller = function_caller(config, inputs, platform)
roles = build_roles(placed, world, caller, reencoders(placed, inputs.decode))
generator = build_generator(placed, roles, inputs, world)
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.data.inputs import Inputs
from hybridflow.data.reencode import Reencoder
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.mini_batches import epochs_of_mini_batches
from hybridflow.flows.models import Roles, training_memory_offloaded
from hybridflow.parallel import torchrun
from hybridflow.placement.hosts import parse_hosts
from hybridflow.placement.placed import PlacedRun
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.pool import Pool
from hybridflow.rewards.scorer import Scorer
from hybridflow.rewards.specs import pool_limits
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor, ActorAsReference, Reference
from hybridflow.roles.values import Critic, RewardModel
from hybridflow.trainers.environments import environments_of


def heldout_sets(
    config: ExperimentConfig, inputs: Inputs, iteration: int = 0, *, whole: bool = True
) -> list[HeldoutSet]:
    """Those to evaluate after an iteration. Collective where an environment begins rows. whole: all of them."""
    return [
        HeldoutSet(name, inputs.heldout[name].all_that_start(), each.samples, each.temperature)
        for name, each in config.data.heldout_sets.items()
        if whole or iteration % (each.interval or 1) == 0
    ]


def most_ranks_of_a_host() -> int:
    """How many ranks the host with the most has."""
    return max(len(host.ranks) for host in parse_hosts(torchrun.hosts_of_ranks()))


def function_caller(
    config: ExperimentConfig, inputs: Inputs, group: dist.ProcessGroup, *, calls: bool = True
) -> FunctionCaller:
    """The caller's processes start while the models are built. group: of the ranks that call the functions.

    calls: whether this rank is one of them.
    """
    specs, scoring = inputs.functions, config.reward or ScoringConfig()
    pool = Pool(specs, pool_limits(scoring, most_ranks_of_a_host())) if specs and calls else None
    return FunctionCaller(inputs.decode, group.rank(), group.size(), pool, scoring.error_score)


def reencoders(placed: PlacedRun, decode: Callable[[list[int]], str]) -> dict[int, Reencoder]:
    """Of reward models that have tokenizers of their own, by their numbers."""
    models = placed.config.reward.models if placed.config.reward is not None else ()
    return {
        i: Reencoder.for_model(
            f"reward.models.{i}",
            model.model,
            decode,
            min(model.micro_batch_tokens, placed.reward_models[i].spec.max_positions),
        )
        for i, model in enumerate(models)
        if model.reencode
    }


def build_roles(
    placed: PlacedRun,
    world: RunContext,
    caller: FunctionCaller,
    reencode: Mapping[int, Reencoder] | None = None,
    *,
    trains: bool = True,
) -> Roles:
    """The models of the run, those that it has. Collective over the world. trains: the actor has an optimizer."""
    config, models, temperature = placed.config, placed.models, placed.config.sampling.temperatures
    actor = Actor(
        placed.actor,
        temperature=temperature,
        world=world,
        routing=placed.routing,
        engines=(placed.rollout, placed.stages),
        mini_batches=partial(
            epochs_of_mini_batches,
            update=config.algorithm.update,
            seed=config.seed,
            varies=config.sampling.samples.varies,
        ),
        of_rollouts=getattr(config.algorithm, "dynamic_sampling", None) is None,
        trains=trains,
    )
    critic = None
    if "critic" in models:
        critic = Critic(models["critic"], world=world, base=actor if placed.critic_shares_base else None)
    reference = None
    if "reference" in models:
        reference = Reference(models["reference"], temperature=temperature, world=world)
    elif config.reference_is_base:
        keeps = config.algorithm.kl.resets or placed.begins_with_adapters
        reference = ActorAsReference(actor, world=world, keeps=keeps)
    scorer = None
    if config.reward is not None:
        rewards = [RewardModel(model, world=world) for model in placed.reward_models]
        limits = config.sampling.limits
        scorer = Scorer(
            config.reward,
            rewards,
            caller=caller,
            watch=world.watch,
            limits=limits,
            reencoders=reencode or {},
            environment=config.data.environment,
        )
    return Roles(actor, critic, reference, scorer)


def build_generator(placed: PlacedRun, roles: Roles, inputs: Inputs, world: RunContext) -> Generator:
    """The engine over the actor's weights. Collective over the world."""
    platform = world.platform
    with training_memory_offloaded(roles, platform):
        assert roles.actor is not None, "every algorithm here trains one"
        return Generator(
            placed,
            roles.actor,
            eos_token_ids=inputs.ends.ids,
            platform=platform,
            exchange=world.with_engines or world.exchange,
            environments=environments_of(inputs, placed.config, platform.rank, placed.actor.spec.vocab_size),
            groups=world.groups,
        )
