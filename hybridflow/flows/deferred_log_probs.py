"""Old log-probs of an iteration's first mini-batch: the mini-batch's update computes them.

Ratios are to the policy before the updates, and the first step starts from the same policy. A forward pass for the old
log-probs of the first mini-batch would compute the same numbers twice. So the pass leaves these rows out. Their old
log-probs are NaN until the step has been taken, so that nothing reads them before:

    deferred = DeferredLogProbs(actor, rollout, rows)     # rows: those of the first mini-batch
    deferred.others()                           # old log-probs of the other rows, for `Run.whole`
    deferred.with_step_log_probs(objective)     # takes for the old log-probs of these rows what the step computes
    deferred.mark_step_taken()                  # from here on batches have the old log-probs
    deferred.filled(batch, exchange)            # collective
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, Tokens, token_index
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.roles.objectives import PolicyObjective
from hybridflow.roles.policy import Actor

Batch = TypeVar("Batch", bound=RolloutBatch)


class DeferredLogProbs:
    """rows: (n,) int64 of the rollout: the first mini-batch, in order. Building an object computes nothing."""

    def __init__(self, actor: Actor, rollout: RolloutBatch, rows: Tensor) -> None:
        self._actor, self._rollout, self._others = actor, rollout, _all_but(rows, len(rollout))
        tokens = token_index(rollout.lengths, rows)  # of the mini-batch, by their places in the rollout
        self._tokens, self._places = tokens, tokens[rollout.response_mask[tokens]]
        self._computed: list[tuple[Tensor, Tensor]] = []  # places in the mini-batch, log-probs
        self._is_taken = False
        self._whole: Tensor | None = None

    def others(self) -> PartialTensor:
        return self._actor.log_probs(self._rollout, self._others) if len(self._others) else self._nothing()

    def masked(self, log_probs: Tensor) -> Tensor:
        """Whole (T,) log-probs of the other rows, NaN in rows of the first mini-batch until the step is taken."""
        return log_probs if self._is_taken else log_probs.index_fill(0, self._places, torch.nan)

    def with_step_log_probs(self, objective: PolicyObjective) -> PolicyObjective:
        """The objective, whose old log-probs are the step's own log-probs, detached, until `mark_step_taken`."""

        def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
            if self._is_taken:
                return objective.loss(log_probs, entropy, tokens)
            old = log_probs.detach()
            if self._actor.grid.contributes:
                self._computed.append((tokens.own(tokens.where), tokens.own(old)))
            return objective.loss(log_probs, entropy, tokens.with_given(log_probs=old))

        return replace(objective, loss=loss)

    def mark_step_taken(self) -> None:
        self._is_taken = True

    def filled(self, batch: Batch, exchange: Exchange) -> Batch:
        """`batch`, of the rollout's rows, with all old log-probs. Collective the first time."""
        if self._whole is None:
            own = self._nothing()
            if self._computed:
                where = self._tokens[torch.cat([where for where, _ in self._computed])]
                own = replace(own, where=where, values=torch.cat([values.float() for _, values in self._computed]))
            self._whole = exchange.gather(own)
            self._computed.clear()
        found = vars(batch)["log_probs"].clone()
        found[self._places] = self._whole[self._places]
        return replace(batch, **{"log_probs": found})

    def _nothing(self) -> PartialTensor:
        return PartialTensor.empty(len(self._rollout.input_ids))


def _all_but(rows: Tensor, number: int) -> Tensor:
    """Of 0 .. number - 1, ascending."""
    others = torch.ones(number, dtype=torch.bool)
    others[rows] = False
    return others.nonzero().flatten()
