"""Best-of-n self-imitation: of each prompt's responses the best are learnt by heart. See best_of_n.yaml."""

from dataclasses import dataclass

import torch

from hybridflow.batch import PerSequence, RolloutBatch
from hybridflow.config.algorithms import Custom
from hybridflow.flows.run import Run
from hybridflow.roles.objectives import PolicyObjective

IMITATE = PolicyObjective(lambda log_probs, entropy, tokens: (-log_probs, {}))


@dataclass(frozen=True)
class BestBatch(RolloutBatch):
    raw_scores: PerSequence


def best_of_n(run: Run, c: Custom) -> BestBatch:
    rollout = run.generate()
    scores = run.whole(raw_scores=run.scores(rollout)).raw_scores
    groups = scores.view(len(run.prompts), -1)  # the responses of a prompt stand side by side
    first = torch.arange(0, scores.numel(), groups.shape[1])[:, None]
    best = (groups.topk(c.options["keep"]).indices + first).flatten()
    batch = BestBatch(**vars(rollout.select(best)), raw_scores=scores[best])
    run.metrics["reward/score_all_mean"] = scores.mean()
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, IMITATE)
    return batch
