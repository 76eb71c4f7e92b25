"""Which flows leave the old log-probs of the first mini-batch to the update. Pure; see `flows.first_step`.

Those that read old log-probs in ratios alone: not where the KL is taken off rewards, which come before the updates, nor
in distillation, whose advantages are made of them, nor in a user's flow, which may read them where it likes. Flows on
fixed data have none.
"""

from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import PPO, Algorithm, Custom, Distill
from hybridflow.config.fixed_algorithms import FixedAlgorithm, OneStep
from hybridflow.config.kinds import AnyConfig


def first_step_tells(algorithm: Algorithm | FixedAlgorithm, iteration: int) -> bool:
    """Whether the first mini-batch of this iteration, from 1, has old log-probs from the update."""
    if isinstance(algorithm, Custom | Distill | OneStep) or algorithm.policy.old_log_probs == "engine":
        return False
    if isinstance(algorithm, PPO) and iteration <= algorithm.critic_warmup_iterations:  # the actor takes no step
        return False
    return algorithm.kl.use != "reward"


def rows_told(config: AnyConfig) -> int:
    """Rows of an iteration after any warm-up whose old log-probs come with the first step."""
    algorithm = config.algorithm
    warmup = algorithm.critic_warmup_iterations if isinstance(algorithm, PPO) else 0
    if not first_step_tells(algorithm, warmup + 1):
        return 0
    rows = config.batch_size
    return min(algorithm.update.mini_batch_size or rows, rows)


def asks_for_log_probs(config: ExperimentConfig) -> bool:
    """Whether the actor makes a forward pass for old log-probs in an iteration after any warm-up."""
    return config.algorithm.policy.old_log_probs == "trainer" and rows_told(config) < config.batch_size
