"""Reference and actor: models that give log-probabilities. The actor is trained, and the engine generates with it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.algorithms.loss_mean import token_sum
from hybridflow.architecture.weight import Weight
from hybridflow.batch import RolloutBatch, Tokens, sequence_ends, to_device_async
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.models.build import PackedModel
from hybridflow.models.lora import AdapterChoice
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.named_weights import named_weights
from hybridflow.models.output_layer import Outputs
from hybridflow.models.pipeline import Readout
from hybridflow.models.routing import RoutingCounts, RoutingSizes, RowExperts
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.parallel.vocab import Temperature, vocab_kernels
from hybridflow.placement.placed import PlacedModel
from hybridflow.roles.base import PerOutputLoss, Role, RunContext, StepReport, TrainedRole
from hybridflow.roles.objectives import PolicyObjective
from hybridflow.rollout.routing_records import MiniBatches, RoutingRecords

SamplingTemperature = float | LengthBuckets[float]  # of all prompts, or by their length


class Reference(Role):
    """The policy that the actor is held close to. Never trained."""

    def __init__(
        self,
        placed: PlacedModel,
        *,
        temperature: SamplingTemperature,
        world: RunContext,
        models: list[PackedModel] | None = None,
    ) -> None:
        """models: as of `Role`."""
        super().__init__(placed, recompute="none", world=world, models=models)
        self.name, self.temperature, self.vocab_kernels = placed.name, temperature, vocab_kernels()
        for chunk in self.chunks if models is None else ():
            chunk.requires_grad_(False)

    def log_probs(self, batch: RolloutBatch) -> PartialTensor:
        """Of (T,): log-probs of the response tokens, at the sampling temperature."""
        with self._watch.phase("reference"):
            return self._token_results(batch, _log_probs(self, batch))

    def copy_weights(self, actor: "Actor") -> None:
        """Take the actor's weights as they are now. Both lie alike: each rank copies the weights on that rank."""
        weights, self.ahead = actor.weights(), None
        for weight, parameter in named_weights(self.chunks, self.spec, head="lm"):
            parameter.data.copy_(weights[weight.megatron][1])


class ActorAsReference(Reference):
    """The actor without its adapters, or with those it began with: a reference that has no weights of its own.

    keeps: whether the reference has adapters, those that the actor has now; else none.
    """

    def __init__(self, actor: "Actor", *, world: RunContext, keeps: bool) -> None:
        super().__init__(actor.placed, temperature=actor.temperature, world=world, models=actor.models)
        self.name, self.chunks = "reference", actor.chunks
        if keeps:
            self.copy_weights(actor)

    def log_probs(self, batch: RolloutBatch) -> PartialTensor:
        """As of any reference. After a step the actor's weights may still be on the way: a forward pass waits."""
        with contextlib.ExitStack() as stack:
            for choice in self._choices:
                stack.enter_context(choice.as_reference())
            return super().log_probs(batch)

    def copy_weights(self, actor: "Actor") -> None:
        """Take the adapters that the actor has now."""
        self.ahead = None
        actor.wait_for_weights()
        adapters: dict[Tensor, Tensor] = {
            p: p.detach().clone() for w, p in named_weights(self.chunks, self.spec, head="lm") if w.adapter
        }
        for choice in self._choices:
            choice.reference = adapters

    @property
    def saved_weights(self) -> list[tuple[Weight, Tensor]]:
        """The adapters of the reference, under the names of the actor's."""
        kept = self._choices[0].reference if self._choices else {}
        found = named_weights(self.chunks, self.spec, head=self.head)
        return [(weight, kept[parameter]) for weight, parameter in found if parameter in kept]

    @property
    def _choices(self) -> list[AdapterChoice]:
        return [not_none(model.adapters) for model in self._models]


class Actor(TrainedRole):
    """The policy that is trained, and that the engine generates with.

    routing_counts: (2,) int64 of this rank and iteration: the (token, layer) pairs whose engine experts differ from the
    trainer's choice before the first step, and all pairs. Tokens that predict a response token count. See
    `models.routing`.
    expert_load: (layers, experts) int64 of this rank and iteration: tokens of each expert of a mixture, in the pass for
    old log-probs and, where that pass left rows out, in the first step too. Without such a pass they are those of all
    steps, so that each row counts as often as any other.
    records: of the engine's experts, where the actor replays them.
    """

    def __init__(
        self,
        placed: PlacedModel,
        *,
        temperature: SamplingTemperature,
        world: RunContext,
        routing: RoutingSizes | None = None,
        engines: tuple[RolloutLayout, Stages] | None = None,
        mini_batches: MiniBatches | None = None,
        of_rollouts: bool = True,
        trains: bool = True,
    ) -> None:
        """routing: the actor takes the engine's experts where a batch has records of them. engines, mini_batches,
        of_rollouts: of these records, see `RoutingRecords`."""
        super().__init__(placed, world=world, bucket_bytes=world.bucket_bytes, trains=trains)
        self.placed, self.models = placed, self._models
        self.temperature, self.vocab_kernels = temperature, vocab_kernels()
        self.routing_counts = torch.zeros(2, dtype=torch.int64, device=world.platform.device)
        shape = self.spec.num_layers, self.spec.num_experts
        self.expert_load = torch.zeros(*shape, dtype=torch.int64, device=world.platform.device)
        self._first_step_counts, self._all_steps_count = True, True
        self.records: RoutingRecords | None = None
        if routing is not None:
            alike = Exchange(self.grid.groups.dp, world.platform.device) if self.grid.inside else None
            self.records = RoutingRecords(
                routing,
                self.grid.layout,
                rank=world.platform.rank,
                world=world.with_engines or world.exchange,
                trainers=None if world.with_engines is None else (world.exchange, world.trainer_ranks),
                replicas=alike,
                engines=engines,
                mini_batches=mini_batches,
                of_rollouts=of_rollouts,
            )

    def begin_iteration(self, iteration: int, num_iterations: int) -> None:
        super().begin_iteration(iteration, num_iterations)
        self.routing_counts.zero_()
        self.expert_load.zero_()
        self._first_step_counts, self._all_steps_count = True, True

    def log_probs(self, batch: RolloutBatch, some: Tensor | None = None) -> PartialTensor:
        """Of (T,): log-probs of the response tokens, at the sampling temperature.

        some: (n,) int64, of these rows alone; the others' are zero.
        """
        self._all_steps_count = False
        if not self._alone:  # a part of the rows, ahead of the others
            self._first_step_counts &= some is not None  # else all rows are counted here
        with self._watch.phase("log_probs"), self._routing_counted():
            return self._token_results(batch, _log_probs(self, batch), some)

    def update(self, batch: RolloutBatch, objective: PolicyObjective) -> StepReport:
        """One optimizer step on a mini-batch."""
        with self._watch.phase("actor_update"):
            return self._step(batch, self._per_token(batch, objective), objective.mean, ("entropy", *objective.reports))

    def accumulate(self, batch: RolloutBatch, objective: PolicyObjective) -> Tensor:
        """Add the gradient of `update` to the buffers and take no step."""
        names = ("entropy", *objective.reports)
        return self._accumulate(batch, self._per_token(batch, objective), objective.mean, names)

    def step(self, batch: RolloutBatch, gradients: Tensor) -> StepReport:
        """One optimizer step along given derivatives of any loss with respect to the log-probs, (T,).

        The vector-Jacobian product: sequences that a loss couples need not share a micro-batch, a replica or a rank.
        """
        return self.update(batch, _linear(gradients))

    def _rows_of_replicas(self, batch: RolloutBatch, some: Tensor | None = None) -> list[list[int]]:
        """As of any role; rows with the engine's experts are computed where these lie."""
        found = None
        if self.records is not None and not self._alone:
            found = self.records.rows_of_replicas(batch, None if some is None else some.tolist())
        return super()._rows_of_replicas(batch, some) if found is None else found

    def _engines_experts(self, batch: RolloutBatch, rows: Sequence[Sequence[int]]) -> RowExperts | None:
        return None if self.records is None else self.records.of_rows(batch, rows[self.grid.dp_rank])

    def _before_step(self) -> None:
        """The first step counts the rows that no pass for old log-probs had."""
        first = self._first_step_counts and not self.steps
        self._count(differ=first, load=first or self._all_steps_count)

    @contextlib.contextmanager
    def _routing_counted(self) -> Iterator[None]:
        self._count(differ=True, load=True)
        try:
            yield
        finally:
            self._count(differ=False, load=False)

    def _count(self, *, differ: bool, load: bool) -> None:
        counts = RoutingCounts(self.routing_counts if differ else None, self.expert_load if load else None)
        for model in self._models:
            model.routing_counts = counts if self.spec.num_experts else None

    def _per_token(self, batch: RolloutBatch, objective: PolicyObjective) -> PerOutputLoss:
        temperature, ends = _temperatures(self.temperature, batch), sequence_ends(batch)

        def per_token(outputs: Outputs, mb: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
            log_probs, entropy = _log_probs_and_entropy(self, outputs, mb, temperature(mb))
            if mb.shared is None:
                each, known = objective.loss(log_probs, entropy, Tokens(batch, mb.where, log_probs.device, ends=ends))
                return each, {"entropy": entropy, **known}
            shared = mb.shared
            tokens = Tokens(batch, shared.where, log_probs.device, ends=ends, own=shared.own)
            whole = shared.gathered(torch.stack([log_probs, entropy], dim=1))  # some losses couple tokens of a row
            each, known = objective.loss(whole[:, 0], whole[:, 1], tokens)
            return shared.own(each), {"entropy": entropy, **{name: shared.own(x) for name, x in known.items()}}

        return per_token


def _linear(gradients: Tensor) -> PolicyObjective:
    """sum_t g_t log p_t."""

    def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        return log_probs * tokens.at_places(gradients), {}

    return PolicyObjective(loss, mean=lambda batch: token_sum(batch.response_mask, batch.lengths))


def _log_probs(role: Reference | Actor, batch: RolloutBatch) -> Readout:
    temperature = _temperatures(role.temperature, batch)
    return lambda outputs, mb: {"out": _log_probs_and_entropy(role, outputs, mb, temperature(mb))[0]}


def _temperatures(temperature: SamplingTemperature, batch: RolloutBatch) -> Callable[[MicroBatch], Temperature]:
    """What the logits of a micro-batch of `batch` were divided by when the rows were sampled."""
    if not isinstance(temperature, LengthBuckets):
        return lambda micro_batch: temperature
    if not temperature.varies:
        return lambda micro_batch: temperature.values[0]
    of_rows = torch.tensor(temperature.for_lengths(batch.prompt_lengths.tolist()), dtype=torch.float32)
    of_tokens = of_rows.repeat_interleave(batch.lengths)  # (T,)
    return lambda micro_batch: to_device_async(of_tokens[micro_batch.where], micro_batch.targets.device)


def _log_probs_and_entropy(
    role: Reference | Actor, outputs: Outputs, micro_batch: MicroBatch, temperature: Temperature
) -> tuple[Tensor, Tensor]:
    return outputs.log_probs_and_entropy(
        micro_batch.targets,
        vocab_size=role.spec.vocab_size,
        temperature=temperature,
        kernels=role.vocab_kernels,
    )
