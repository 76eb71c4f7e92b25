"""A flow for runs with stale rollouts."""

from hybridflow.batch import RolloutBatch
from hybridflow.config.algorithms import Custom
from hybridflow.flows.run import Run
from tests.flows.flows import marked


def poisoned_once(run: Run, c: Custom) -> RolloutBatch:
    """The third iteration has an advantage that is not a number."""
    batch = marked(run)
    if run.iteration == 3:
        batch.advantages[-1] = float("nan")
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, run.policy_loss(c.policy))
    return batch
