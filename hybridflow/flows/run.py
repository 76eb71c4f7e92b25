"""What a flow is given: the models, the engine or the rows of files, and the state of the run.

    def my_flow(run: Run, c: Custom) -> MyBatch:
        rollout = run.generate()                                       # by the engine, with the actor's weights
        known = run.whole(log_probs=run.actor.log_probs(rollout), raw_scores=run.scores(rollout))    # one exchange
        batch = MyBatch(**vars(rollout), **vars(known), advantages=...)
        for mini_batch in run.mini_batches(batch, c.update):
            run.actor.update(mini_batch, run.policy_loss(c.policy))
        return batch

Every rank runs the flow over the same global batch; the roles shard the work. A flow on the rows of files has
`examples` in place of `prompts`, and nothing generates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, overload

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import sequence_sums
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.config.losses import PolicyLoss, Update
from hybridflow.errors import ConfigError, FlowError
from hybridflow.flows.bookkeeping import Bookkeeping, IterationData
from hybridflow.flows.deferred_log_probs import DeferredLogProbs
from hybridflow.flows.generation import SAMPLED, Source
from hybridflow.flows.generation import Greedy as Greedy
from hybridflow.flows.generation import Sampled as Sampled
from hybridflow.flows.known import Known as Known
from hybridflow.flows.known import Pending, exchanged
from hybridflow.flows.mini_batches import mini_batch_rows
from hybridflow.flows.step_metrics import check_finite
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.placement.overlapped_scoring import defers_old_log_probs
from hybridflow.recording.iteration import Metrics
from hybridflow.rewards.scorer import Scores
from hybridflow.roles.objectives import KLTerm, PolicyObjective, policy_loss
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, TrainedRewardModel

Batch = TypeVar("Batch", bound=RolloutBatch)
Role = TypeVar("Role")


class Run(IterationData):
    """Gives a flow the models, prompts, rollouts and state. `iteration` counts from 1; a flow may add to `metrics`."""

    def __init__(self, config: AnyConfig, book: Bookkeeping, source: Source | None = None) -> None:
        super().__init__(RunState(kl_coef=config.algorithm.kl.coef))
        self._config, self._book, self._source = config, book, source

    # ---- models

    @property
    def actor(self) -> Actor:
        return self._there("actor", self._book.roles.actor)

    @property
    def critic(self) -> Critic:
        return self._there("critic", self._book.roles.critic)

    @property
    def reference(self) -> Reference:
        return self._there("reference", self._book.roles.reference)

    @property
    def reward_model(self) -> TrainedRewardModel:
        """The one that is trained, on pairs; others are asked by `scores`."""
        return self._there("reward_model", self._book.roles.reward_model)

    @property
    def has_reference(self) -> bool:
        """Whether algorithm.kl adds a KL to the reference. A flow without this KL may still have a reference."""
        return self._online.algorithm.kl.use != "none"

    @property
    def kl(self) -> KLTerm:
        return KLTerm(self._online.algorithm.kl, self.state.kl_coef)

    def policy_loss(self, config: PolicyLoss) -> PolicyObjective:
        """What the actor minimises, with the KL and the lengths of this run."""
        objective = policy_loss(config, self.kl, max_response_length=self._online.sampling.max_response_length)
        return objective if self.deferred is None else self.deferred.with_step_log_probs(objective)

    # ---- responses and their scores

    @property
    def samples_per_prompt(self) -> int:
        """sampling.samples_per_prompt. Where by_prompt_length sets other counts, read `samples`."""
        return self._online.sampling.samples_per_prompt

    @property
    def samples(self) -> LengthBuckets[int]:
        """How many responses a prompt has, by the prompt's length."""
        return self._online.sampling.samples

    @property
    def max_length(self) -> int:
        """data.max_length, tokens of a sequence. Only for flows on rows of files."""
        if not isinstance(self._config, FixedDataConfig):
            raise FlowError("the flow asks for run.max_length: only a run on the rows of files has data.max_length")
        return self._config.data.max_length

    @overload
    def generate(self, how: Sampled | Greedy = SAMPLED) -> RolloutBatch: ...

    @overload
    def generate(self, how: Sampled | Greedy, *more: Sampled | Greedy) -> tuple[RolloutBatch, ...]: ...

    def generate(
        self, how: Sampled | Greedy = SAMPLED, *more: Sampled | Greedy
    ) -> RolloutBatch | tuple[RolloutBatch, ...]:
        """Responses to the iteration's prompts; of several kinds with one reshard of the weights."""
        source = self._there("generate", self._source)
        self._book.enter("rollout", self.iteration)
        self.prompt_rows, self.prompts, rollouts = source.responses(
            (how, *more), self.prompt_rows, self.prompts, self._deferred_rows
        )
        self._book.enter("estimate", self.iteration)
        self._book.stop_if_requested(self.iteration)
        self.rollout = rollouts[0]
        for rollout in rollouts:
            check_finite({"rollout_log_probs": rollout.rollout_log_probs}, rollout)
        return rollouts if more else rollouts[0]

    @property
    def prompts_per_iteration(self) -> int:
        """data.prompts_per_iteration: prompts of a batch. Partial rollouts draw more."""
        return self._online.data.prompts_per_iteration

    def draw(self) -> None:
        """The next prompts in order take the place of `prompts`. The first of an iteration are drawn when it begins."""
        self._book.draw(self)

    def take(self, prompt_rows: Sequence[int], rollout: RolloutBatch, parts: Mapping[str, Tensor]) -> None:
        """Replace the iteration's prompts (by their numbers in the data set), rollout and parts of scores."""
        if self._source is None:
            raise FlowError("the flow calls run.take: a run on the rows of files chooses no prompts")
        self.prompt_rows, self.rollout, self.score_parts = tuple(prompt_rows), rollout, parts
        self.prompts = self._source.at(prompt_rows)
        self._book.send_routes(rollout, self.iteration)

    def scores(self, rollout: RolloutBatch) -> Scores:
        """(N,) weighted sums of reward models and functions, before penalties, normalisation and clipping."""
        return self._there("reward", self._book.roles.scorer).scores(rollout, self.prompts)

    def shaped(self, raw_scores: Tensor, rollout: RolloutBatch) -> Tensor:
        """(N,) scores as training sees them: penalties of cut and overlong responses, then normalised, then clipped.

        Each call updates the running moments in `state`.
        """
        scorer = self._there("reward", self._book.roles.scorer)
        scores, moments = scorer.shaped(raw_scores, rollout, self.state.score_moments)
        self.state = replace(self.state, score_moments=moments)
        return scores

    # ---- log-probs

    def old_log_probs(self, rollout: RolloutBatch) -> PartialTensor | Tensor:
        """(T,) log-probs in the ratio's denominator: the actor's before the updates, or the engine's.

        Some flows read old log-probs in ratios alone. There the first mini-batch has NaN until the update computes the
        values: see `flows.deferred_log_probs`.
        """
        if self._online.algorithm.policy.old_log_probs == "engine":
            return rollout.rollout_log_probs
        if not self._defers():
            return self.actor.log_probs(rollout)
        rows = self._rows(rollout.prompt_indices, self._online.algorithm.update)[0]
        self.deferred = DeferredLogProbs(self.actor, rollout, rows)
        return self.deferred.others()

    def ref_log_probs(self, rollout: RolloutBatch) -> dict[str, PartialTensor]:
        """The reference's log-probs, named ref_log_probs; an empty dict where the config has no KL."""
        return {"ref_log_probs": self.reference.log_probs(rollout)} if self.has_reference else {}

    def kl_in_reward(self, known: Known) -> Tensor:
        """(T,) the KL to the reference of each token where kl.use is reward, else zero."""
        if self._online.algorithm.kl.use != "reward":
            return known.log_probs.new_zeros(1).expand_as(known.log_probs)
        return self.kl.estimate(known.log_probs, known.ref_log_probs)

    def kl_of_responses(self, known: Known, rollout: RolloutBatch) -> Tensor:
        """(N,) the KL to the reference of each response where kl.use is reward, else zero."""
        if self._online.algorithm.kl.use != "reward":
            return known.log_probs.new_zeros(len(rollout))
        return sequence_sums(self.kl_in_reward(known), rollout.response_mask, lengths=rollout.lengths)

    # ---- from what ranks know to steps

    def whole(self, batch: RolloutBatch | None = None, /, **asked: Pending | Tensor) -> Known:
        """Exchange what each rank has computed, once, and return whole tensors by name. Waits for all ranks.

        batch: names the row in NonFinite; None: the last rollout. Errors: NonFinite for a NaN or an infinity.
        """
        known, parts = exchanged(asked, self._book.exchange, self.rollout if batch is None else batch)
        for name, x in asked.items():
            if isinstance(x, Scores):
                self._book.note_parts(self, x, parts[name])
        if self.deferred is not None and "log_probs" in known:
            known["log_probs"] = self.deferred.masked(known["log_probs"])
        return Known(**known)

    def mini_batches(self, batch: Batch, update: Update) -> Iterator[Batch]:
        """`epochs` passes over the batch in disjoint mini-batches, in an order that the run's seed gives."""
        if not self._book.trains:
            self._book.agree_on(batch, self.iteration)
            return
        self.about_to_step(batch)
        epochs = [self._rows(batch.prompt_indices, update, epoch) for epoch in range(update.epochs)]
        self._book.send_routes(batch, self.iteration, epochs)
        for epoch, mini_batches in enumerate(epochs):
            if epoch:
                batch = self._book.with_deferred(self, batch)
            for rows in mini_batches:
                yield batch.select(rows)
                self._book.note_rows(rows)
                if self.deferred is not None:
                    self.deferred.mark_step_taken()

    def about_to_step(self, batch: RolloutBatch, metrics: Metrics | None = None) -> None:
        """Begin the update phase: check that all ranks have the same batch; end the run after a request to end.

        metrics: of the loss, recorded as MODEL/NAME; for flows that give gradients, whose step knows no loss.
        """
        self._book.enter("update", self.iteration)
        self._book.agree_on(batch, self.iteration)
        self._book.stop_if_requested(self.iteration)
        name = self._book.roles.trained()[0].name
        self.metrics |= {f"{name}/{key}": value for key, value in (metrics or {}).items()}

    def say(self, line: str) -> None:
        """Print a line for the user."""
        self._book.hooks.say(line)

    # ---- inside

    @property
    def _online(self) -> ExperimentConfig:
        if not isinstance(self._config, ExperimentConfig):
            raise FlowError("the flow asks for sampling and rewards: a run on the rows of files generates nothing")
        return self._config

    def _rows(self, prompt_indices: Tensor, update: Update, epoch: int = 0) -> Sequence[Tensor]:
        seed, varies = self._config.seed, self.samples.varies
        order = {"seed": seed, "iteration": self.iteration, "epoch": epoch}
        return mini_batch_rows(prompt_indices, update, varies=varies, **order)

    def _defers(self) -> bool:
        return self._book.trains and defers_old_log_probs(self._online.algorithm, self.iteration)

    def _deferred_rows(self, prompts: PromptBatch) -> list[int]:
        """Rows of a rollout of these prompts whose old log-probs come with the first step: the first mini-batch."""
        if not self._defers():
            return []
        samples = torch.tensor(self.samples.for_lengths(prompts.lengths.tolist()))
        prompt_indices = torch.arange(len(samples)).repeat_interleave(samples)
        return self._rows(prompt_indices, self._online.algorithm.update)[0].tolist()

    def _there(self, name: str, role: Role | None) -> Role:
        if role is None:
            raise ConfigError(
                f"the flow asks for run.{name}, but algorithm {self._config.algorithm.name} of this config has no "
                f"{name}. A custom flow lists its models in algorithm.roles, and each of them has a section"
            )
        return role
