"""Which models score finished responses while other engine replicas still generate, and which flows let the first
update compute its old log-probs. Pure.

A model can score where the ranks of one engine replica, which finish at the same moment, hold all of it: collectives
need them all. Only what the flow is known to ask for of the very rollout is computed. It takes no more memory than
training: a rank that waits has given the KV cache and the engine's weights back.

A flow leaves the old log-probs of the first mini-batch to the update where it reads them in ratios alone: not where the
KL is taken off rewards, nor in distillation, nor in a user's flow. Flows on fixed data have none.
"""

from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import PPO, Algorithm, Custom, Distill, ReMax
from hybridflow.config.fixed_algorithms import FixedAlgorithm, OneStep
from hybridflow.config.kinds import AnyConfig
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.placement.placed import PlacedRun, reencodes

UNITS_PER_BLOCK = 4  # that the rows of a replica are cut in: one may be under way when the last response is there
Block = tuple[int, ...]  # the ranks of one data-parallel replica of a model, ascending


def overlapped_models(run: PlacedRun) -> tuple[str, ...]:
    """Names of the models that compute ahead on some rank, in the order in which they do."""
    if not run.config.rollout.scores_while_waiting(cuda=run.cuda) or len(run.rollout.replicas) == 1:
        return ()
    asked = [name for name in run.computing if asks_for(run.config, name)]
    asked.sort(key=lambda name: not name.startswith("reward"))  # which every flow asks for
    return tuple(name for name in asked if blocks_within(run.computing[name].layout, run.rollout))


def asks_for(config: ExperimentConfig, name: str) -> bool:
    """Whether the flow asks for the results of this model of what `run.generate()` gave, as it was given."""
    algorithm = config.algorithm
    if reencodes(config, name):  # which takes the prompts' texts
        return False
    if isinstance(algorithm, ReMax):  # scores both kinds of responses as one batch
        return False
    if getattr(algorithm, "dynamic_sampling", None) is not None:  # the others see the groups that are kept
        return name.startswith("reward")
    if name == "actor":
        if algorithm.policy.replay_routing:  # others tell their tokens before a rollout is whole, not their experts
            return False
        return not isinstance(algorithm, Custom) and asks_for_log_probs(config)
    return True


def blocks_within(layout: Layout, rollout: RolloutLayout) -> dict[int, list[Block]]:
    """The blocks that lie within each engine replica; those that lie within none are left out.

    There are none where replicas share experts: they compute together, and others still generate.
    """
    found: dict[int, list[Block]] = {}
    if layout.dense_per_expert_copy > 1:
        return found
    for block in layout.groups("tp", "cp", "pp"):
        replicas = {rollout.coordinates(rank).replica if rank in rollout else None for rank in block}
        if len(replicas) == 1 and (replica := replicas.pop()) is not None:
            found.setdefault(replica, []).append(block)
    return found


def defers_old_log_probs(algorithm: Algorithm | FixedAlgorithm, iteration: int) -> bool:
    """Whether the first mini-batch of this iteration, from 1, has old log-probs from the update."""
    if isinstance(algorithm, Custom | Distill | OneStep) or algorithm.policy.old_log_probs == "engine":
        return False
    if isinstance(algorithm, PPO) and iteration <= algorithm.critic_warmup_iterations:  # the actor takes no step
        return False
    return algorithm.kl.use != "reward"


def num_deferred_rows(config: AnyConfig) -> int:
    """Rows of an iteration after any warm-up whose old log-probs come with the first step."""
    algorithm = config.algorithm
    warmup = algorithm.critic_warmup_iterations if isinstance(algorithm, PPO) else 0
    if not defers_old_log_probs(algorithm, warmup + 1):
        return 0
    rows = config.batch_size
    return min(algorithm.update.mini_batch_size or rows, rows)


def asks_for_log_probs(config: ExperimentConfig) -> bool:
    """Whether the actor makes a forward pass for old log-probs in an iteration after any warm-up."""
    return config.algorithm.policy.old_log_probs == "trainer" and num_deferred_rows(config) < config.batch_size
