"""What a flow is given: the models, the engine, and the state of the run. It alone times, reports and checks.

    def my_flow(run: Run, c: Custom) -> MyBatch:
        rollout = run.generate()                                       # the actor's weights are lent to the engine
        known = run.whole(log_probs=run.actor.log_probs(rollout), raw_scores=run.scores(rollout))    # one exchange
        batch = MyBatch(**vars(rollout), **vars(known), advantages=...)
        for mini_batch in run.mini_batches(batch, c.update):
            run.actor.update(mini_batch, policy_loss(c.policy, run.kl))
        return batch

Every rank runs the flow over the same global batch; the roles shard the work.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.config.losses import PolicyLoss, Update
from hybridflow.data.left_out import dropped_metrics
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.usable import Dropped
from hybridflow.errors import ConfigError, Stopped
from hybridflow.flows.deferred_log_probs import Deferred, DeferredLogProbs
from hybridflow.flows.finite import check_finite
from hybridflow.flows.models import Roles, training_memory_offloaded
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.flows.replay import Replay
from hybridflow.flows.step_metrics import shuffled, step_metrics
from hybridflow.models.optimizer import NO_BYTES
from hybridflow.parallel.agreement import check_agreement, digest_tensors
from hybridflow.parallel.exchange import Contribution, Exchange
from hybridflow.parallel.platform import Platform, world_group
from hybridflow.parallel.seeds import request_seed
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.deferred_log_probs import first_step_tells
from hybridflow.recording.iteration import Iteration, Metrics, batch_metrics, cost_metrics, length_metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.scorer import FunctionCalls, Scores, call_metrics
from hybridflow.roles.generator import Generator
from hybridflow.roles.objectives import KLTerm, PolicyObjective, policy_loss
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic

Batch = TypeVar("Batch", bound=RolloutBatch)
STAGES = {"rollout": "generating", "estimate": "scoring", "update": "updating"}  # of an iteration, and as shown


@dataclass(frozen=True)
class Sampled:
    """Responses drawn as the config's `sampling` says."""


@dataclass(frozen=True)
class Greedy:
    """One response a prompt, the likeliest token always."""


class Known:
    """Whole tensors by the names that `Run.whole` was given them under."""

    def __init__(self, **tensors: Tensor) -> None:
        vars(self).update(tensors)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"run.whole was not asked for {name}; it gave {', '.join(vars(self)) or 'nothing'}")


class Run:
    """See the module. `iteration` counts from 1; a flow may add to `metrics`.

    trains: otherwise the run generates and scores: there are no mini-batches, and no role takes a step.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        roles: Roles,
        generator: Generator | Replay,
        prompts: PromptDataset,
        *,
        ahead: OverlappedScoring,
        platform: Platform,
        exchange: Exchange,
        watch: Stopwatch,
        watchdog: Watchdog,
        trains: bool = True,
    ) -> None:
        self._config, self._roles, self._generator, self._dataset = config, roles, generator, prompts
        self._platform, self._exchange, self._watch, self._watchdog = platform, exchange, watch, watchdog
        self._ahead, self._trains = ahead, trains
        for role in roles.trained():
            role.takes_steps = trains
        self.state = RunState(kl_coef=config.algorithm.kl.coef)
        self._stage_stack = contextlib.ExitStack()
        self._show: Callable[[str], None] = lambda text: None
        self.say: Callable[[str], None] = lambda text: None  # a line for the person who watches
        # what the trainer may want to know and to do in between; collective
        self.stops: Callable[[], bool] = lambda: False  # whether all ranks are to end here
        self.keep_rollout: Callable[[int, Mapping[str, Tensor]], None] = lambda iteration, tensors: None
        self.kept_rollout: Callable[[PromptBatch, int], RolloutBatch | None] = lambda prompts, iteration: None
        self.metrics: Metrics = {}
        self._passed_over: list[Dropped] = []  # of the iteration, by draw
        self._first_step: DeferredLogProbs | None = None  # where it tells old log-probs
        self._told: set[str] = set()  # reasons for which rows are left out
        self.score_parts: Mapping[str, Tensor] = {}  # by name, of `rollout`
        self._calls: list[FunctionCalls] = []

    # ---- what a flow works with

    @property
    def iteration(self) -> int:
        return self.state.iteration

    @property
    def samples_per_prompt(self) -> int:
        """That of the section; `samples` has those of prompts whose length says otherwise."""
        return self._config.sampling.samples_per_prompt

    @property
    def samples(self) -> LengthBuckets[int]:
        """How many responses a prompt has, by its length."""
        return self._config.sampling.samples

    @property
    def actor(self) -> Actor:
        return self._roles.actor

    @property
    def critic(self) -> Critic:
        if self._roles.critic is None:
            raise self._absent("critic")
        return self._roles.critic

    @property
    def reference(self) -> Reference:
        if self._roles.reference is None:
            raise self._absent("reference")
        return self._roles.reference

    @property
    def has_reference(self) -> bool:
        """Whether there is a KL to a reference; without one none is loaded."""
        return self._config.algorithm.kl.use != "none"

    @property
    def kl(self) -> KLTerm:
        return KLTerm(self._config.algorithm.kl, self.state.kl_coef)

    def policy_loss(self, config: PolicyLoss) -> PolicyObjective:
        """What the actor minimises, with the KL and the lengths of this run."""
        objective = policy_loss(config, self.kl, max_response_length=self._config.sampling.max_response_length)
        return objective if self._first_step is None else self._first_step.told(objective)

    @overload
    def generate(self, how: Sampled | Greedy = Sampled()) -> RolloutBatch: ...

    @overload
    def generate(self, how: Sampled | Greedy, *more: Sampled | Greedy) -> tuple[RolloutBatch, ...]: ...

    def generate(
        self,
        how: Sampled | Greedy = Sampled(),
        *more: Sampled | Greedy,
    ) -> RolloutBatch | tuple[RolloutBatch, ...]:
        """Responses to the iteration's prompts; of several kinds with one hand-off of the weights."""
        self._enter("rollout")
        rollouts = self._generated((how, *more))
        self._enter("estimate")
        self._stop_if_told()
        self.rollout = rollouts[0]
        for rollout in rollouts:
            check_finite({"rollout_log_probs": rollout.rollout_log_probs}, rollout)
        return rollouts if more else rollouts[0]

    def scores(self, rollout: RolloutBatch) -> Scores:
        """Of (N,): the weighted sum of reward models and functions, before penalties, normalisation and clipping."""
        if self._roles.scorer is None:
            raise self._absent("reward")
        return self._roles.scorer.scores(rollout, self.prompts)

    def old_log_probs(self, rollout: RolloutBatch) -> Contribution | Tensor | Deferred:
        """Those that ratios are to, of (T,): the actor's before the updates or the engine's (policy.old_log_probs).

        In a flow of ours that reads them in ratios alone, those of the first mini-batch are NaN until its update, which
        computes them: see `flows.first_step`.
        """
        if self._config.algorithm.policy.old_log_probs == "engine":
            return rollout.rollout_log_probs
        if not self._first_step_tells():
            return self.actor.log_probs(rollout)
        self._first_step = DeferredLogProbs(self.actor, rollout, self._first_rows(rollout.prompt_indices))
        return self._first_step.others()

    def ref_log_probs(self, rollout: RolloutBatch) -> dict[str, Contribution]:
        """Those of the reference under the name ref_log_probs; nothing where there is no KL."""
        return {"ref_log_probs": self.reference.log_probs(rollout)} if self.has_reference else {}

    def whole(self, **asked: Contribution | Scores | Tensor | Deferred) -> Known:
        """Whole tensors by name, in one exchange: it waits until all ranks have done what they can.

        A tensor is taken for whole as it is.

        Errors: NonFinite where a number is not finite.
        """
        flat = [x for pending in asked.values() for x in _contributions(pending)]
        wholes = iter(self._exchange.wholes(flat) if flat else [])
        known = {}
        for name, pending in asked.items():
            found = [next(wholes) for _ in _contributions(pending)]
            known[name] = _put_together(pending, found)
            if isinstance(pending, Scores):
                self._note_parts(pending, found)
        check_finite(known, self.rollout)
        return Known(**known | {name: x.of(known[name]) for name, x in asked.items() if isinstance(x, Deferred)})

    def shaped(self, raw_scores: Tensor, rollout: RolloutBatch) -> Tensor:
        """(N,) scores as training sees them: cut responses penalised, then normalised, then clipped."""
        assert self._roles.scorer is not None, "there are no scores without a scorer"
        scores, moments = self._roles.scorer.shaped(raw_scores, rollout, self.state.score_moments)
        self.state = replace(self.state, score_moments=moments)
        return scores

    def kl_in_reward(self, known: Known) -> Tensor:
        """(T,) the KL to the reference of each token where kl.use is reward, else zero."""
        if self._config.algorithm.kl.use != "reward":
            return torch.zeros_like(known.log_probs)
        return self.kl.estimate(known.log_probs, known.ref_log_probs)

    def mini_batches(self, batch: Batch, update: Update) -> Iterator[Batch]:
        """`epochs` passes over the batch in disjoint mini-batches, in an order that the run's seed gives."""
        if not self._trains:
            self._agree_on(batch)
            return
        self._enter("update")
        self._agree_on(batch)
        self._stop_if_told()
        for epoch in range(update.epochs):
            if epoch:
                batch = self._filled(batch)
            for rows in self._mini_batch_rows(batch.prompt_indices, update, epoch):
                yield batch.select(rows)
                self._note_rows(rows)
                if self._first_step is not None:
                    self._first_step.taken()

    def draw(self) -> None:
        """The next prompts in order take the place of `prompts`. The first of an iteration are drawn when it begins."""
        data = self._config.data
        order = self._dataset.order(self._config.seed, data.shuffle, position=self.state.num_prompts_drawn)
        self._first_prompt, self._num_sampled = order.position, 0
        drawn = self._dataset.draw(order, data.prompts_per_iteration)
        self._note_passed_over(drawn.dropped)
        self.prompt_rows, self.prompts = drawn.numbers, drawn.batch
        self.state = replace(self.state, num_prompts_drawn=order.position)

    def _note_passed_over(self, dropped: Dropped) -> None:
        """Rows that were left out when their turn came: counted, and the first for a reason is told."""
        self._passed_over.append(dropped)
        for reason in [reason for reason in dropped.first if reason not in self._told]:
            self._told.add(reason)
            self.say(f"data.train: a row is left out, and those to come that are {reason}: {dropped.first[reason]}")

    def take(self, prompt_rows: Sequence[int], rollout: RolloutBatch, parts: Mapping[str, Tensor]) -> None:
        """These are the iteration's prompts, by their numbers in the data set, their responses, and parts of scores."""
        self.prompt_rows, self.rollout, self.score_parts = tuple(prompt_rows), rollout, parts
        self.prompts = self._dataset.batch(list(prompt_rows))

    # ---- what the trainer does with it

    def skip_to(self, iteration: int) -> None:
        """Have this iteration come next: the prompts of those that were left out count as drawn."""
        if self.state.iteration != iteration - 1:
            drawn = (iteration - 1) * self._config.data.prompts_per_iteration
            self.state = replace(self.state, iteration=iteration - 1, num_prompts_drawn=drawn)

    def begin(self, iteration: int, num_iterations: int, show: Callable[[str], None]) -> None:
        """Draw the prompts of an iteration; `show` is told what is going on."""
        self._stage_stack.close()
        self.state = replace(self.state, iteration=iteration)
        self._passed_over, self._first_step = [], None
        self.draw()
        self._show, self.metrics = show, {}
        self.score_parts, self._calls = {}, []
        self._rows: dict[str, list[Tensor]] = {role.name: [] for role in self._roles.trained()}
        self._watch.reset()
        self._exchange.seconds = 0.0
        self._generator.costs.clear()
        for role in self._roles.trained():
            role.begin_iteration(iteration, num_iterations)

    def finished(self, batch: RolloutBatch) -> Iteration:
        """The iteration's numbers. Errors: NonFinite where a gradient was not."""
        self._stage_stack.close()
        batch = self._filled(batch)
        updates: Metrics = {}
        if self._trains:
            updates = step_metrics(self._roles.trained(), self._rows, batch, self._exchange)
        kl = {"kl/coef": self.kl.coef} if self.has_reference else {}
        metrics = batch_metrics(batch) | self._length_metrics(batch) | self.metrics | kl | updates
        data, dropped = self._config.data, [self._dataset.dropped, *self._passed_over]
        metrics |= dropped_metrics(data.bad_rows, data.overlong_prompts, dropped)
        if self._trains and "kl/sequence_mean" in metrics:
            coef = self.kl.updated(float(metrics["kl/sequence_mean"]), len(batch)).coef
            self.state = replace(self.state, kl_coef=coef)
        if self._trains:
            self._reset_reference()
        metrics |= self._cost_metrics(batch)
        self._ahead.forget()  # how much each rank computed ahead is a matter of timing: nobody holds it any longer
        return Iteration(self.iteration, self.prompts, batch, metrics, score_parts=self.score_parts)

    def abandon(self, state: RunState) -> None:
        """The iteration that was begun has not been; `state` is the one before it."""
        self._stage_stack.close()
        self.state = state

    def greedy_responses(self, prompts: PromptBatch) -> RolloutBatch:
        """To held-out prompts, outside any iteration."""
        with self.engine_awake():
            return self._generator.generate(
                prompts, greedy=True, samples_per_prompt=always(1), iteration=0, first_prompt=0
            )

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
        """The actor's weights are the engine's within the block, in the engine's layout; bitwise restored after it.

        In strict order: what training alone needs leaves, weights are put in place, caches are emptied, and only when
        that is so on every rank the KV cache takes its memory.
        """
        with training_memory_offloaded(self._roles, self._platform), self._generator.resharded():
            self._platform.empty_caches()
            dist.barrier(group=dist.group.WORLD)
            with self._generator.awake():
                yield

    # ---- inside

    def _generated(self, kinds: tuple[Sampled | Greedy, ...]) -> tuple[RolloutBatch, ...]:
        """Anew, unless an earlier start has kept those of this iteration, or of others are the wish."""
        if kinds == (Sampled(),) and not self._num_sampled:
            return (self._sampled_alone(),)
        self._ahead.forget()
        with self.engine_awake(), self._watch.phase("generate"):
            return tuple(self._generate(kind) for kind in kinds)

    def _sampled_alone(self) -> RolloutBatch:
        """What is scored while others generate; of one that an earlier start has kept, in the same units."""
        rollout = self.kept_rollout(self.prompts, self.iteration)
        samples = self.samples.each(self.prompts.lengths.tolist())
        ahead = self._ahead.begin(
            self.prompts,
            samples,
            limits=self._config.sampling.limits,
            generates=rollout is None,
            left_out={self.actor: self._told_later(samples)},
        )
        if rollout is None:
            with self.engine_awake(), self._watch.phase("generate"):
                rollout = self._generate(Sampled(), ahead)
            self.keep_rollout(self.iteration, vars(rollout))
        self._num_sampled = 1  # also where an earlier start has sampled them
        ahead.settle(rollout)
        return rollout

    def _generate(self, how: Sampled | Greedy, listener: OverlappedScoring | None = None) -> RolloutBatch:
        greedy = isinstance(how, Greedy)
        generation = 0 if greedy else self._num_sampled
        self._num_sampled += not greedy
        return self._generator.generate(
            self.prompts,
            greedy=greedy,
            samples_per_prompt=always(1) if greedy else self.samples,
            iteration=self.iteration,
            first_prompt=self._first_prompt,
            generation=generation,
            listener=listener,
        )

    def _mini_batch_rows(self, prompt_indices: Tensor, update: Update, epoch: int) -> Sequence[Tensor]:
        """Of a batch, in random order; nearly equal ones, of at most the size, where the rows of iterations vary."""
        generator = torch.Generator().manual_seed(request_seed(self._config.seed, self.iteration, epoch))
        order = shuffled(prompt_indices, generator, whole_prompts=update.whole_prompts)
        cut: Sequence[Tensor] = order.split(update.mini_batch_size or max(len(order), 1))
        return order.tensor_split(max(len(cut), 1)) if self.samples.varies else cut

    def _first_step_tells(self) -> bool:
        return self._trains and first_step_tells(self._config.algorithm, self.iteration)

    def _first_rows(self, prompt_indices: Tensor) -> Tensor:
        """Those of the first mini-batch of a batch whose rows answer these prompts."""
        return self._mini_batch_rows(prompt_indices, self._config.algorithm.update, epoch=0)[0]

    def _told_later(self, samples: Sequence[int]) -> list[int]:
        """Rows of the rollout with so many responses to each prompt, whose old log-probs come with the first step."""
        if not self._first_step_tells():
            return []
        return self._first_rows(torch.arange(len(samples)).repeat_interleave(torch.tensor(samples))).tolist()

    def _filled(self, batch: Batch) -> Batch:
        """With the old log-probs that the first step has told. Errors: NonFinite where one is not."""
        if self._first_step is None:
            return batch
        batch = self._first_step.filled(batch, self._exchange)
        check_finite({"log_probs": vars(batch)["log_probs"]}, batch)
        return batch

    def _note_parts(self, scores: Scores, wholes: list[Tensor]) -> None:
        """Each part of the score, before its weight, of the responses that are trained on: its mean, and for samples.

        What calls took and how many rows failed, of all responses; of an iteration that generates several times, of all
        of them.
        """
        size = len(self.rollout)
        self.score_parts = {name: whole[:size] for name, whole in scores.parts(wholes).items()}
        for name, part in self.score_parts.items():
            if "/" in name:
                self.metrics[f"reward/{name}"] = part.mean()
            elif len(self.score_parts) > 1:
                self.metrics[f"reward/part_{name}_mean"] = part.mean()
        if scores.functions:
            self._calls.append(scores.calls(wholes))
            self.metrics |= call_metrics(self._calls)

    def _reset_reference(self) -> None:
        """At the end of every so many iterations the reference becomes the actor, if the config says so."""
        interval = self._config.algorithm.kl.reset_reference_interval
        if interval is not None and self.iteration % interval == 0:
            self.reference.become(self.actor)

    def _enter(self, stage: str) -> None:
        """The stage before ends, this one begins."""
        self._stage_stack.close()
        self._watchdog.enter(stage)
        self._stage_stack.enter_context(self._watch.phase(stage))
        self._show(f"iteration {self.iteration}: {STAGES[stage]}")

    def _stop_if_told(self) -> None:
        """Raise Stopped on all ranks or none, as long as the models are as the iteration before left them."""
        if not any(role.steps for role in self._roles.trained()) and self.stops():
            raise Stopped(f"in iteration {self.iteration}, before its first step")

    def _agree_on(self, batch: RolloutBatch) -> None:
        """Raise on every rank unless all ranks are about to train on the same batch."""
        digest = digest_tensors(vars(batch))
        check_agreement({f"the batch of iteration {self.iteration}": digest}, world_group())

    def _note_rows(self, rows: Tensor) -> None:
        """The steps taken since the last time were of these rows of the batch."""
        for role in self._roles.trained():
            noted = self._rows[role.name]
            noted += [rows] * (len(role.steps) - len(noted))

    def _cost_metrics(self, batch: RolloutBatch) -> Metrics:
        trained = self._roles.actor.trained
        return cost_metrics(
            batch,
            watch=self._watch,
            reshards=self._generator.costs,
            exchange=self._exchange,
            actor_bytes=trained.memory_bytes() if trained else NO_BYTES,
            engine_bytes=self._generator.own_bytes,
            num_steps={role.name: len(role.steps) for role in self._roles.trained()},
        )

    def _length_metrics(self, batch: RolloutBatch) -> Metrics:
        """By bucket of prompt lengths, where the config has any."""
        sampling = self._config.sampling
        return length_metrics(batch, sampling.buckets) if sampling.by_prompt_length else {}

    def _absent(self, role: str) -> ConfigError:
        algorithm = self._config.algorithm.name
        return ConfigError(
            f"the flow asks for run.{role}, but algorithm {algorithm} of this config has no {role}: a custom flow "
            f"names what it needs in algorithm.roles, and each has a section of its own"
        )


def _contributions(pending: Contribution | Scores | Tensor | Deferred) -> tuple[Contribution, ...]:
    match pending:
        case Tensor():
            return ()
        case Scores():
            return pending.contributions
        case Deferred():
            return (pending.others,)
        case _:
            return (pending,)


def _put_together(pending: Contribution | Scores | Tensor | Deferred, wholes: list[Tensor]) -> Tensor:
    if isinstance(pending, Tensor):
        return pending
    return pending.total(wholes) if isinstance(pending, Scores) else wholes[0]
