"""An iteration on fixed data: one batch of rows, judged by the algorithm's loss, and one step along the gradient.

sft           Supervised fine-tuning: the mean of -log pi over all tokens of the batch that count.
reward_model  A Bradley-Terry model of pairs. Ouyang et al. 2022, arXiv 2203.02155.
dpo           Rafailov et al. 2023, arXiv 2305.18290; with loss: ipo Azar et al. 2023, arXiv 2310.12036.
kto           Ethayarajh et al. 2024, arXiv 2402.01306.
"""

from collections.abc import Sequence

import torch

from hybridflow.batch import RolloutBatch
from hybridflow.config.fixed_algorithms import DPO, KTO, SFT, FixedAlgorithm, RewardModeling
from hybridflow.data.example_batches import given_batch
from hybridflow.data.examples import Example
from hybridflow.flows.fixed_losses import LossResult, judge_dpo, judge_kto, judge_reward_model, judge_sft, means
from hybridflow.flows.run import Run
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.objectives import negative_log_likelihood


def sft(run: Run) -> RolloutBatch:
    """One pass and one step: this loss couples nothing."""
    batch = given_batch(run.examples)
    run.about_to_step(batch)
    run.actor.update(batch, negative_log_likelihood())
    return batch


def reward_model(run: Run) -> RolloutBatch:
    judged = judge_reward_model(run, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.reward_model.step(judged.batch, judged.gradients())
    return judged.batch


def dpo(run: Run, c: DPO) -> RolloutBatch:
    judged = judge_dpo(run, c, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.actor.step(judged.batch, judged.gradients())
    return judged.batch


def kto(run: Run, c: KTO) -> RolloutBatch:
    judged = judge_kto(run, c, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.actor.step(judged.batch, judged.gradients())
    return judged.batch


def fixed_flow(run: Run, algorithm: FixedAlgorithm) -> RolloutBatch:
    """An iteration of the algorithm."""
    match algorithm:
        case SFT():
            return sft(run)
        case RewardModeling():
            return reward_model(run)
        case DPO():
            return dpo(run, algorithm)
        case KTO():
            return kto(run, algorithm)


def judge(run: Run, algorithm: FixedAlgorithm, examples: Sequence[Example]) -> LossResult[RolloutBatch]:
    """Rows by the algorithm's loss, without a step."""
    match algorithm:
        case SFT():
            return judge_sft(run, examples)
        case RewardModeling():
            return judge_reward_model(run, examples)
        case DPO():
            return judge_dpo(run, algorithm, examples)
        case KTO():
            return judge_kto(run, algorithm, examples)


def evaluate_fixed(
    run: Run, algorithm: FixedAlgorithm, examples: Sequence[Example], batch_size: int
) -> dict[str, float]:
    """The means of what `judge` tells over all held-out rows, in batches of `batch_size` and fewer than twice that."""
    parts = torch.arange(len(examples)).tensor_split(max(len(examples) // batch_size, 1))
    found = [judge(run, algorithm, [examples[i] for i in part.tolist()]).each for part in parts]
    each: Metrics = means({name: torch.cat([part[name].detach() for part in found]) for name in found[0]})
    return {f"eval/{name}": float(value) for name, value in each.items()}
