"""Flows that the worker runs, as tests.flows.flows:NAME."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import PerToken, RolloutBatch, Tokens
from hybridflow.config.algorithms import Custom
from hybridflow.flows.run import Greedy, Run, Sampled
from hybridflow.roles.objectives import PolicyObjective, policy_loss

BAD_ROW = 2


@dataclass(frozen=True)
class Marked(RolloutBatch):
    log_probs: PerToken
    advantages: PerToken


def marked(run: Run, advantages: float = 1.0) -> Marked:
    rollout = run.generate()
    log_probs = run.whole(log_probs=run.actor.log_probs(rollout)).log_probs
    return Marked(**vars(rollout), log_probs=log_probs, advantages=advantages * rollout.response_mask)


def raises(run: Run, c: Custom) -> RolloutBatch:
    batch = marked(run)
    return helper(batch)


def helper(batch: RolloutBatch) -> RolloutBatch:
    raise KeyError("nothing here")


def returns_nothing(run: Run, c: Custom) -> None:
    marked(run)


def wants_a_critic(run: Run, c: Custom) -> RolloutBatch:
    batch = marked(run)
    run.critic.values(batch)
    return batch


def bad_loss(run: Run, c: Custom) -> RolloutBatch:
    """One good step, one with a NaN in a row, and one more that must not be taken."""
    batch = marked(run)
    poisoned = batch.advantages.clone()
    last = int(batch.lengths.cumsum(0)[BAD_ROW]) - 1
    poisoned[last] = float("nan")
    whole = c.update
    for advantages in (batch.advantages, poisoned, batch.advantages):
        used = Marked(**{**vars(batch), "advantages": advantages})
        for mini_batch in run.mini_batches(used, whole):
            run.actor.update(mini_batch, policy_loss(c.policy, run.kl))
    return batch


def infinite_gradient(run: Run, c: Custom) -> RolloutBatch:
    """Every loss is finite, and sqrt has an infinite slope at 0."""
    batch = marked(run)

    def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        return (log_probs - log_probs.detach()).abs().sqrt(), {}

    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, PolicyObjective(loss))
    return batch


def sampled_and_greedy(run: Run, c: Custom) -> RolloutBatch:
    sampled, greedy = run.generate(Sampled(), Greedy())
    assert len(greedy) == len(run.prompts) and len(sampled) == 2 * len(greedy)
    run.metrics["test/greedy_tokens"] = greedy.num_response_tokens
    return sampled


def sampled_again(run: Run, c: Custom) -> RolloutBatch:
    """How often each row is the same as in another generation of the iteration's prompts."""
    first, second = run.generate(Sampled(), Sampled())
    third, fourth = run.generate(), run.generate()
    found = [
        [x.tolist() for x in rollout.input_ids.split(rollout.lengths.tolist())]
        for rollout in (first, second, third, fourth)
    ]
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    run.metrics["test/rows_alike"] = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
    run.metrics["test/prompts_alike"] = sum(
        a.prompt_indices.tolist() == first.prompt_indices.tolist() for a in (second, third, fourth)
    )
    return fourth


def products(run: Run, c: Custom) -> RolloutBatch:
    """A loss that couples sequences: the square of the sum of all log-probs, through the global tensor."""
    batch = marked(run)
    log_probs = batch.log_probs.clone().requires_grad_()
    (1e-4 * log_probs[batch.response_mask].sum().square()).backward()
    run.actor.step(batch, log_probs.grad)
    return batch


def few_rows(run: Run, c: Custom) -> RolloutBatch:
    """One row a step, for two replicas."""
    batch = marked(run).select(torch.tensor([1]))
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, policy_loss(c.policy, run.kl))
    return batch


def no_response(run: Run, c: Custom) -> RolloutBatch:
    """No token counts: nothing moves, nothing fails."""
    batch = marked(run)
    batch = Marked(**{**vars(batch), "response_mask": torch.zeros_like(batch.response_mask)})
    for mini_batch in run.mini_batches(batch, c.update):
        run.actor.update(mini_batch, policy_loss(c.policy, run.kl))
    return batch
