"""What a flow on fixed data is given: the models, the rows of the iteration, and the state of the run.

    def my_flow(run: FixedRun) -> RolloutBatch:
        batch = given_batch(run.examples)
        known = run.whole(batch, log_probs=run.actor.log_probs(batch))    # one exchange
        run.about_to_step(batch)
        run.actor.step(batch, ...)
        return batch

Every rank runs the flow over the same global batch; the roles shard the work.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.example_batches import prompt_and_completion
from hybridflow.data.examples import Example, ExampleDataset
from hybridflow.data.left_out import dropped_metrics
from hybridflow.data.usable import Dropped
from hybridflow.errors import Stopped
from hybridflow.flows.finite import check_finite
from hybridflow.flows.run import Known
from hybridflow.flows.step_metrics import step_metrics
from hybridflow.models.optimizer import NO_BYTES
from hybridflow.parallel.agreement import check_agreement, digest_tensors
from hybridflow.parallel.exchange import Contribution, Exchange
from hybridflow.parallel.platform import world_group
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.recording.iteration import Iteration, Metrics, training_costs
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.base import TrainedRole
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import TrainedRewardModel


@dataclass(frozen=True)
class FixedModels:
    """The models of a run; None where its algorithm has none."""

    actor: Actor | None
    reference: Reference | None
    reward_model: TrainedRewardModel | None

    @property
    def trained(self) -> TrainedRole:
        found = self.actor or self.reward_model
        assert found is not None, "every algorithm trains one of the two"
        return found


class FixedRun:
    """See the module. `iteration` counts from 1; a flow may add to `metrics`."""

    def __init__(
        self,
        config: FixedDataConfig,
        models: FixedModels,
        dataset: ExampleDataset,
        *,
        exchange: Exchange,
        watch: Stopwatch,
        watchdog: Watchdog,
    ) -> None:
        self._config, self._models, self._dataset = config, models, dataset
        self._exchange, self._watch, self._watchdog = exchange, watch, watchdog
        self.state = RunState()
        self.stops: Callable[[], bool] = lambda: False  # whether all ranks are to end here; collective
        self.decode: Callable[[list[int]], str] = lambda ids: ""
        self._show: Callable[[str], None] = lambda text: None
        self._stage_stack = contextlib.ExitStack()
        self.examples: Sequence[Example] = ()
        self._passed_over = Dropped()  # of the iteration
        self.metrics: Metrics = {}

    # ---- what a flow works with

    @property
    def iteration(self) -> int:
        return self.state.iteration

    @property
    def max_length(self) -> int:
        return self._config.data.max_length

    @property
    def actor(self) -> Actor:
        assert self._models.actor is not None, "the algorithm has no actor"
        return self._models.actor

    @property
    def reference(self) -> Reference:
        assert self._models.reference is not None, "the algorithm has no reference"
        return self._models.reference

    @property
    def reward_model(self) -> TrainedRewardModel:
        assert self._models.reward_model is not None, "the algorithm has no reward model"
        return self._models.reward_model

    def whole(self, batch: RolloutBatch, **asked: Contribution) -> Known:
        """Whole tensors of the batch by name, in one exchange. Errors: NonFinite where a number is not finite."""
        known = dict(zip(asked, self._exchange.wholes(list(asked.values())), strict=True))
        check_finite(known, batch)
        return Known(**known)

    def about_to_step(self, batch: RolloutBatch, metrics: Metrics | None = None) -> None:
        """All ranks are about to step on this batch: they agree on it, and may be told to end before.

        metrics: of the loss, which the step itself does not know.
        """
        self._enter("update", "updating")
        digest = digest_tensors(vars(batch))
        check_agreement({f"the batch of iteration {self.iteration}": digest}, world_group())
        if self.stops():
            raise Stopped(f"in iteration {self.iteration}, before its step")
        name = self._models.trained.name
        self.metrics |= {f"{name}/{key}": value for key, value in (metrics or {}).items()}

    # ---- what the trainer does with it

    def begin(self, iteration: int, num_iterations: int, show: Callable[[str], None]) -> None:
        """Draw the rows of an iteration; `show` is told what is going on."""
        self._show, self.metrics = show, {}
        self._watch.reset()
        self._exchange.seconds = 0.0
        self._models.trained.begin_iteration(iteration, num_iterations)
        data = self._config.data
        order = self._dataset.order(self._config.seed, data.shuffle, position=self.state.num_prompts_drawn)
        drawn = self._dataset.draw(order, data.batch_size)
        self.examples, self._passed_over = drawn.items, drawn.dropped
        self.state = replace(self.state, iteration=iteration, num_prompts_drawn=order.position)
        self._enter("estimate", "reading and judging")

    def finished(self, batch: RolloutBatch) -> Iteration:
        """The iteration's numbers. Errors: NonFinite where a gradient was not."""
        self._stage_stack.close()
        trained = self._models.trained
        rows = {trained.name: [torch.arange(len(batch))]}
        metrics = step_metrics([trained], rows, batch, self._exchange) | self.metrics
        lengths = batch.lengths.float()
        metrics |= {
            "data/length_mean": lengths.mean(),
            "data/length_max": lengths.max(),
            "data/trained_tokens": batch.num_response_tokens,
            "data/epoch": self.state.num_prompts_drawn / len(self._dataset),
        }
        data, dropped = self._config.data, [self._dataset.dropped, self._passed_over]
        metrics |= dropped_metrics(data.bad_rows, data.overlong, dropped)
        costs = training_costs(
            batch,
            watch=self._watch,
            exchange=self._exchange,
            trained_bytes=trained.trained.memory_bytes() if trained.trained else NO_BYTES,
            num_steps={trained.name: len(trained.steps)},
        )
        return Iteration(self.iteration, self._shown(), batch, metrics | costs)

    def abandon(self, state: RunState) -> None:
        """The iteration that was begun has not been; `state` is the one before it."""
        self._stage_stack.close()
        self.state = state

    # ---- inside

    def _shown(self) -> PromptBatch:
        """The prompts of those rows that go to samples.jsonl."""
        some = self.examples[: self._config.metrics.num_samples]
        prompts = [prompt_and_completion(example, 0)[0] for example in some]
        return PromptBatch(
            input_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *prompts]),
            lengths=torch.tensor([len(ids) for ids in prompts], dtype=torch.int64),
            texts=tuple(self.decode(ids.tolist()) for ids in prompts),
            columns={},
        )

    def _enter(self, stage: str, shown: str) -> None:
        """The stage before ends, this one begins."""
        self._stage_stack.close()
        self._watchdog.enter(stage)
        self._stage_stack.enter_context(self._watch.phase(stage))
        self._show(f"iteration {self.iteration}: {shown}")
