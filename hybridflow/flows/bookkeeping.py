"""What the trainer does with an iteration that a flow runs: it draws, times, counts, and puts the numbers together.

book.begin(run, iteration, num_iterations)
done = book.finished(run, flow(run))            # or book.abandon(run, before)
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.example_batches import prompt_and_completion
from hybridflow.data.examples import Example, ExampleDataset
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.row_notes import dropped_metrics
from hybridflow.data.usable import Dropped
from hybridflow.errors import Stopped
from hybridflow.flows.deferred_log_probs import DeferredLogProbs
from hybridflow.flows.generation import GenerationCosts, Source
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles
from hybridflow.flows.step_metrics import check_finite, routing_metrics, step_metrics
from hybridflow.models.optimizer import NO_BYTES
from hybridflow.parallel.agreement import check_agreement, digest_tensors
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.recording.costs import cost_metrics, training_costs
from hybridflow.recording.engine_report import staleness_metrics
from hybridflow.recording.iteration import (
    Iteration,
    Metrics,
    batch_metrics,
    count_metrics,
    length_metrics,
    turn_metrics,
)
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.scorer import FunctionCalls, Scores, call_metrics
from hybridflow.roles.objectives import KLTerm
from hybridflow.rollout.routing_records import IDS
from hybridflow.rollout.rows import TurnCounts


class IterationData:
    """Prompts and responses, or rows of files; the state of the run; the metrics of the iteration so far.

    prompt_rows: the prompts' numbers in the data set. score_parts: parts of the score by name, (N,), of `rollout`.
    """

    prompts: PromptBatch
    prompt_rows: tuple[int, ...]
    rollout: RolloutBatch

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.forget()

    def forget(self) -> None:
        """Clear the examples, metrics, score parts and deferred log-probs of the iteration before."""
        self.examples: Sequence[Example] = ()
        self.metrics: Metrics = {}
        self.score_parts: Mapping[str, Tensor] = {}
        self.deferred: DeferredLogProbs | None = None

    @property
    def iteration(self) -> int:
        """Counted from 1."""
        return self.state.iteration


Batch = TypeVar("Batch", bound=RolloutBatch)


class Bookkeeping:
    """Draws data, sets learning rates, times stages and builds the metrics of an iteration, for runs of both kinds.

    trains: False where no model takes a step. rows: by model, the batch's rows in each optimizer step.
    """

    shown: Mapping[str, str]  # stages of an iteration, and what a person reads of each

    def __init__(
        self,
        roles: Roles,
        *,
        exchange: Exchange,
        watch: Stopwatch,
        watchdog: Watchdog,
        hooks: RunHooks,
        trains: bool = True,
    ) -> None:
        self.roles, self.hooks, self.trains = roles, hooks, trains
        self.exchange, self.watch, self._watchdog = exchange, watch, watchdog
        self._stage = contextlib.ExitStack()
        self._dropped: list[Dropped] = []  # of the iteration, by draw
        self._reported: set[str] = set()  # reasons for which rows are left out
        self._calls: list[FunctionCalls] = []
        self.rows: dict[str, list[Tensor]] = {}
        for role in roles.trained():
            role.takes_steps = trains

    # ---- from the beginning of an iteration to the end

    def begin(self, run: IterationData, iteration: int, num_iterations: int) -> None:
        self._stage.close()
        run.forget()
        run.state = replace(run.state, iteration=iteration)
        self._dropped, self._calls = [], []
        self.rows = {role.name: [] for role in self.roles.trained()}
        self.watch.reset()
        self.exchange.seconds = 0.0
        for role in self.roles.trained():
            role.begin_iteration(iteration, num_iterations)
        self.draw(run)

    def draw(self, run: IterationData) -> None:
        """The next prompts, or rows, in order take the place of the run's."""
        raise NotImplementedError

    def finished(self, run: IterationData, batch: RolloutBatch) -> Iteration:
        """The iteration's numbers. Errors: NonFinite where a gradient was not."""
        raise NotImplementedError

    def abandon(self, run: IterationData, state: RunState) -> None:
        """Go back to `state`, the one before this iteration; only before the first optimizer step."""
        self._stage.close()
        run.state = state

    # ---- while a flow runs

    def with_deferred(self, run: IterationData, batch: Batch) -> Batch:
        """With the old log-probs that the first step has computed. Errors: NonFinite where one is not finite."""
        if run.deferred is None:
            return batch
        batch = run.deferred.filled(batch, self.exchange)
        check_finite({"log_probs": vars(batch)["log_probs"]}, batch)
        return batch

    def enter(self, stage: str, iteration: int) -> None:
        """End the current stage and begin `stage`: clock, deadline, and the text that the user sees."""
        self._stage.close()
        self._watchdog.enter(stage)
        self._stage.enter_context(self.hooks.trace(iteration, stage))
        self._stage.enter_context(self.watch.stage(stage))
        self.hooks.show(f"iteration {iteration}: {self.shown[stage]}")

    @property
    def steps_begun(self) -> bool:
        """Whether an optimizer step of the iteration has begun: the models may not be those of the one before."""
        return any(role.step_begun for role in self.roles.trained())

    def stop_if_requested(self, iteration: int) -> None:
        """Raise Stopped on all ranks or none, as long as the models are as the iteration before left them."""
        if not any(role.steps for role in self.roles.trained()) and self.hooks.should_stop():
            raise Stopped(f"in iteration {iteration}, before its first step")

    def agree_on(self, batch: RolloutBatch, iteration: int) -> None:
        """Raise on every rank unless all ranks are about to train on the same batch."""
        check_agreement({f"the batch of iteration {iteration}": digest_tensors(batch.tensors())}, self.exchange.group)

    def send_routes(
        self, batch: RolloutBatch, iteration: int, epochs: Sequence[Sequence[Tensor]] | None = None
    ) -> None:
        """Engine's experts go where the mini-batches of this batch need them. See `RoutingRecords.send`."""
        if self.roles.actor is not None and self.roles.actor.records is not None:
            self.roles.actor.records.send(batch, iteration, epochs)

    def note_rows(self, rows: Tensor) -> None:
        """Record that the optimizer steps since the last call used these rows of the batch."""
        for role in self.roles.trained():
            noted = self.rows[role.name]
            noted += [rows] * (len(role.steps) - len(noted))

    def note_parts(self, run: IterationData, scores: Scores, wholes: Sequence[Tensor]) -> None:
        """Note the unweighted parts of the score of the trained responses: means as metrics, values for samples.

        Seconds of calls and failed rows are of all responses, also where an iteration generates several times.
        """
        size, kept = len(run.rollout), ~run.rollout.failed
        run.score_parts = {name: whole[:size] for name, whole in scores.by_name(wholes).items()}
        for name, part in run.score_parts.items():
            if "/" in name:
                run.metrics[f"reward/{name}"] = part[kept].mean()
            elif len(run.score_parts) > 1:
                run.metrics[f"reward/part_{name}_mean"] = part[kept].mean()
        if scores.functions:
            self._calls.append(scores.calls(wholes))
            run.metrics |= call_metrics(self._calls)

    def _note_dropped(self, dropped: Dropped) -> None:
        """Count rows that were left out when their turn came, and report the first row for each reason."""
        self._dropped.append(dropped)
        for reason in [reason for reason in dropped.first if reason not in self._reported]:
            self._reported.add(reason)
            what = "has not started" if reason == "not started" else f"is {reason}"
            self.hooks.say(
                f"data.train: a row that {what} is left out, and so is every later one: {dropped.first[reason]}"
            )

    def _step_metrics(self, batch: RolloutBatch) -> Metrics:
        return step_metrics(self.roles.trained(), self.rows, batch, self.exchange) if self.trains else {}

    def _num_steps(self) -> dict[str, int]:
        return {role.name: len(role.steps) for role in self.roles.trained()}

    def _host_bytes(self) -> int:
        """What this rank keeps in host memory of the states of all optimizers."""
        return sum(role.training_model.host_bytes() for role in self.roles.trained() if role.training_model)


class OnlineBookkeeping(Bookkeeping):
    """Of a run that learns from what the engine generates."""

    shown: Mapping[str, str] = {"rollout": "generating", "estimate": "scoring", "update": "updating"}

    def __init__(
        self,
        config: ExperimentConfig,
        roles: Roles,
        prompts: PromptDataset,
        source: Source,
        **shared: Any,
    ) -> None:
        """prompts: those of data.train. source: of the iteration's prompts and responses."""
        super().__init__(roles, **shared)
        self._config, self._prompts, self._source = config, prompts, source

    def skip_to(self, run: IterationData, iteration: int) -> None:
        """Make this iteration the next one; prompts of the iterations that are skipped count as drawn."""
        if run.state.iteration != iteration - 1:
            drawn = (iteration - 1) * self._config.data.prompts_per_iteration
            run.state = replace(run.state, iteration=iteration - 1, num_prompts_drawn=drawn)

    def draw(self, run: IterationData) -> None:
        drawn = self._source.draw(run.state.num_prompts_drawn)
        self._note_dropped(drawn.dropped)
        run.prompt_rows, run.prompts = drawn.numbers, drawn.batch
        run.state = replace(run.state, num_prompts_drawn=drawn.position)

    def begin(self, run: IterationData, iteration: int, num_iterations: int) -> None:
        needed = self._source.begin(iteration, num_iterations)
        if self.roles.actor is not None and self.roles.actor.records is not None:
            needed = torch.cat([needed, *(tensors[IDS] for tensors in run.state.kept.values() if IDS in tensors)])
            self.roles.actor.records.keep_only(needed)
        super().begin(run, iteration, num_iterations)

    def finished(self, run: IterationData, batch: RolloutBatch) -> Iteration:
        self._stage.close()
        batch = self.with_deferred(run, batch)
        updates, sampling, data = self._step_metrics(batch), self._config.sampling, self._config.data
        lengths = length_metrics(batch, sampling.buckets) if sampling.by_prompt_length else {}
        kl_term = KLTerm(self._config.algorithm.kl, run.state.kl_coef)
        kl = {"kl/coef": kl_term.coef} if self._config.algorithm.kl.use != "none" else {}
        generation = self._source.costs()
        turns = self._turns(batch, generation.turns)
        metrics = batch_metrics(batch) | lengths | run.metrics | kl | updates | turns
        actor, experts_load = self.roles.actor, dict[int, float]()
        if actor is not None:
            routing, experts_load = routing_metrics(actor, self.exchange)
            metrics |= routing
        dropped, begins = [self._prompts.dropped, *self._dropped], data.passes_over
        metrics |= dropped_metrics(data.bad_rows, data.overlong_prompts, dropped, begins=begins)
        if self.trains and "kl/sequence_mean" in metrics:
            coef = kl_term.updated(float(metrics["kl/sequence_mean"]), int((~batch.failed).sum())).coef
            run.state = replace(run.state, kl_coef=coef)
        interval = self._config.algorithm.kl.reset_reference_interval
        reference = self.roles.reference
        if self.trains and interval is not None and run.iteration % interval == 0 and actor and reference:
            reference.copy_weights(actor)
        metrics |= staleness_metrics(batch, run.iteration) | self._costs(batch, generation)
        metrics |= self._source.metrics(metrics, self.exchange.group.size())
        for role, _ in self.roles.scoring().values():
            role.ahead = None  # which rank has scored what depends on timing: nobody needs it now
        portable = self.roles.portable(batch.tensors()) if self._config.metrics.dump_batches else None
        return Iteration(
            run.iteration,
            run.prompts,
            batch,
            metrics,
            score_parts=run.score_parts,
            portable=portable,
            experts_load=experts_load,
        )

    def _turns(self, batch: RolloutBatch, counts: TurnCounts | None) -> Metrics:
        found = turn_metrics(batch) if batch.environment_rewards is not None else {}
        if counts is not None:
            values = torch.tensor(counts.values(), dtype=torch.float64, device=self.exchange.device)
            found |= count_metrics(dict(zip(counts.names(), self.exchange.sum(values).tolist(), strict=True)))
        return found

    def _costs(self, batch: RolloutBatch, generation: GenerationCosts) -> Metrics:
        trained = self.roles.actor.training_model if self.roles.actor is not None else None
        return cost_metrics(
            batch,
            watch=self.watch,
            reshards=generation.reshards,
            exchange=self.exchange,
            actor_bytes=trained.memory_bytes() if trained else NO_BYTES,
            host_bytes=self._host_bytes(),
            engine_bytes=generation.engine_bytes,
            num_steps=self._num_steps(),
            cache_use=generation.cache_use,
            num_generated=generation.num_generated,
        )


class FixedDataBookkeeping(Bookkeeping):
    """Of a run on the rows of files."""

    shown: Mapping[str, str] = {"estimate": "reading and judging", "update": "updating"}

    def __init__(self, config: FixedDataConfig, roles: Roles, rows: ExampleDataset, **shared: Any) -> None:
        super().__init__(roles, **shared)
        self._config, self._examples = config, rows

    def draw(self, run: IterationData) -> None:
        data = self._config.data
        order = self._examples.order(self._config.seed, data.shuffle, position=run.state.num_prompts_drawn)
        drawn = self._examples.draw(order, data.batch_size)
        run.examples = drawn.items
        self._dropped.append(drawn.dropped)
        run.state = replace(run.state, num_prompts_drawn=order.position)
        self.enter("estimate", run.iteration)

    def finished(self, run: IterationData, batch: RolloutBatch) -> Iteration:
        self._stage.close()
        (trained,) = self.roles.trained()
        self.rows = {trained.name: [torch.arange(len(batch))]}
        lengths, data = batch.lengths.float(), self._config.data
        metrics = self._step_metrics(batch) | run.metrics
        metrics |= {
            "data/length_mean": lengths.mean(),
            "data/length_max": lengths.max(),
            "data/trained_tokens": batch.num_response_tokens,
            "data/epoch": run.state.num_prompts_drawn / len(self._examples),
        }
        metrics |= dropped_metrics(data.bad_rows, data.overlong, [self._examples.dropped, *self._dropped])
        costs = training_costs(
            batch,
            watch=self.watch,
            exchange=self.exchange,
            trained_bytes=trained.training_model.memory_bytes() if trained.training_model else NO_BYTES,
            host_bytes=self._host_bytes(),
            num_steps=self._num_steps(),
        )
        return Iteration(run.iteration, self._shown_prompts(run), batch, metrics | costs)

    def _shown_prompts(self, run: IterationData) -> PromptBatch:
        """The prompts of those rows that go to samples.jsonl."""
        some = run.examples[: self._config.metrics.num_samples]
        prompts = [prompt_and_completion(example, 0)[0] for example in some]
        return PromptBatch(
            input_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *prompts]),
            lengths=torch.tensor([len(ids) for ids in prompts], dtype=torch.int64),
            texts=tuple(self.hooks.decode(ids.tolist()) for ids in prompts),
            columns={},
        )
