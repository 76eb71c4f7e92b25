"""What every role shares: the role's rows of a batch, the micro-batches, and this rank's part of the results."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.flops import FROZEN_UPDATE, UPDATE, forward_flops
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import is_trained
from hybridflow.batch import RolloutBatch, to_device_async, token_index
from hybridflow.config import TrainedRoleConfig
from hybridflow.config.recompute import Recompute
from hybridflow.models import pipeline
from hybridflow.models.build import PackedModel, build_model
from hybridflow.models.context import Context
from hybridflow.models.layer_specs import DTYPES
from hybridflow.models.micro_batch import (
    MicroBatch,
    filled_up,
    filler,
    padding,
    prediction_micro_batches,
    sequence_micro_batches,
)
from hybridflow.models.named_weights import named_weights
from hybridflow.models.optimizer import TrainedModel, learning_rate
from hybridflow.models.pipeline import Output, Readout
from hybridflow.models.prompt_groups import replica_rows, rows_of_rank
from hybridflow.models.routing import RowExperts
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.platform import Platform, locks_host_memory, overlaps_exchanges, rounded_rows
from hybridflow.placement.placed import PlacedModel
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.objectives import MeanOver
from hybridflow.roles.precomputed_scores import PrecomputedScores

MakeMicroBatches = Callable[..., list[MicroBatch]]
Places = Callable[[RolloutBatch, Tensor], Tensor]  # of some rows of a batch, in the batch's (T,) or (N,) tensors
PerOutputLoss = Callable[[Output, MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]  # (r,) and, by name, (r,)


@dataclass(frozen=True)
class RunContext:
    """What all roles of a run share: device, process groups, exchange, clocks.

    exchange: of the ranks that train. with_engines: of these and of engines on other ranks; None: the same.
    """

    platform: Platform
    groups: ProcessGroups
    exchange: Exchange
    bucket_bytes: int  # the actor's weights live and travel in buckets of about this size
    watch: Stopwatch = field(default_factory=Stopwatch)
    overlap: bool = field(default_factory=overlaps_exchanges)  # what replicas exchange travels while they compute
    with_engines: Exchange | None = None
    trainer_ranks: Sequence[int] = ()  # where engines have others


class Role:
    """A model on a grid. `chunks` is what the schedules run: this rank's model chunks, or their data-parallel wrappers.

    A rank outside the grid has no chunks; it contributes nothing and goes straight on. head_seed: of a score head that
    the model's directory lacks; without it such a head is zero. ahead: scores of
    the last rollout that were computed, with these weights, before it was whole; None where nothing is scored early.
    """

    def __init__(
        self,
        placed: PlacedModel,
        *,
        recompute: Recompute,
        world: RunContext,
        head_seed: int | None = None,
        models: list[PackedModel] | None = None,
    ) -> None:
        """models: of another role, which computes with them too; None: they are built and read."""
        self.spec: ModelSpec = placed.spec
        self.head, self.dtype = placed.head, placed.config.dtype
        self.grid = Grid.build(placed.layout, world.groups)
        self._config = config = placed.config
        self._platform, self._watch = world.platform, world.watch
        multiple = self.grid.tp if config.sequence_parallel else 1
        self._padded = padding(multiple, rounded_rows(DTYPES[self.dtype]))
        self._context: Context | None = None
        if self.grid.context_group is not None:
            self._context = Context(self.grid.layout.cp, self.grid.cp_rank, self.grid.context_group)
        self._models: list[PackedModel] = models or []
        if self.grid.inside and models is None:
            self._models = build_model(
                self.spec,
                self.grid,
                head=placed.head,
                dtype=config.dtype,
                sequence_parallel=config.sequence_parallel,
                recompute=recompute,
                device=world.platform.device,
                head_seed=head_seed,
                arguments=config.megatron_arguments.given(),
                dispatcher=config.token_dispatcher,
            )
        self.chunks: pipeline.Chunks = self._models
        self.ahead: PrecomputedScores | None = None
        self._alone = False

    @contextlib.contextmanager
    def computing_all_rows(self) -> Iterator[None]:
        """Within the block this replica alone computes all rows of a batch; the run's stopwatch records nothing."""
        watch, self._watch, self._alone = self._watch, Stopwatch(), True
        try:
            yield
        finally:
            self._watch, self._alone = watch, False

    @property
    def saved_weights(self) -> list[tuple[Weight, Tensor]]:
        """What a checkpoint has of this rank's weights: those that change."""
        found = named_weights(self.chunks, self.spec, head=self.head)
        return [(weight, parameter) for weight, parameter in found if is_trained(weight, self.spec)]

    def _rows_of_replicas(self, batch: RolloutBatch, some: Tensor | None = None) -> list[list[int]]:
        """Each replica's, balanced by tokens. some: of these rows of the batch alone."""
        if self._alone:
            return [list(range(len(batch))) if some is None else some.tolist()] * self.grid.dp
        return replica_rows(batch, self.grid.dp, None if some is None else some.tolist())

    def _engines_experts(self, batch: RolloutBatch, rows: Sequence[Sequence[int]]) -> RowExperts | None:
        """Of this replica's rows, where the role replays them: others choose their own. rows: of each replica."""
        return None

    def _micro_batches(
        self,
        batch: RolloutBatch,
        shares: list[list[int]],
        make: MakeMicroBatches,
        *,
        one: bool = False,
        experts: RowExperts | None = None,
    ) -> list[MicroBatch]:
        """Each share of the rows by itself, cut by the token budget; `one` at least. experts: of the engine."""
        padded, budget = self._padded, self._config.micro_batch_tokens
        given: dict[str, Any] = {"padded": padded, "device": self._platform.device}
        if experts is not None:
            given["experts"] = experts
        micro_batches = list[MicroBatch]()
        for rows in shares:
            if self._context is None:
                micro_batches += make(batch, rows, max_tokens=budget, **given)
                continue
            size, rank = self._context.size, self._context.rank
            whole, shared = rows_of_rank(batch, rows, size=size, rank=rank, budget=budget)
            micro_batches += make(batch, shared, max_tokens=budget, context=self._context, **given)
            micro_batches += make(batch, whole, max_tokens=budget // size, **given)
        if one and not micro_batches:
            micro_batches = [filler(padded, self._platform.device)]
        lacking = self._most_passes(len(micro_batches), trains=one) - len(micro_batches)
        micro_batches += [filler(padded, self._platform.device) for _ in range(lacking)]
        if self.grid.layout.vpp > 1:  # the interleaved schedule takes them in groups of pp
            return filled_up(micro_batches, self.grid.pp, padded=padded, device=self._platform.device)
        return micro_batches

    def _count_work(self, batch: RolloutBatch, shares: list[list[int]], *, passes: int = 1) -> None:
        """Count so many forward passes of these rows, whole rows, which the ranks of this replica share."""
        rows = torch.tensor([row for share in shares for row in share], dtype=torch.int64)
        lengths = batch.lengths[rows]
        outputs = int((lengths - batch.prompt_lengths[rows]).sum()) if self.head == "lm" else len(rows)
        flops = forward_flops(self.spec, lengths, outputs, head=self.head)
        self._watch.count(passes * flops * self.grid.dp / len(self.grid.layout.ranks), self.dtype)

    def _most_passes(self, own: int, *, trains: bool) -> int:
        """The most micro-batches of the ranks that compute together, pass by pass."""
        for group in self.grid.in_step(trains=trains):
            most = torch.tensor(own, device=self._platform.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            own = int(most)
        return own

    def _token_results(self, batch: RolloutBatch, readout: Readout, some: Tensor | None = None) -> PartialTensor:
        """Of (T,) float32: `readout`'s "out" for every response token. some: of these rows alone, others are zero."""
        size = len(batch.input_ids)
        return self._results(batch, prediction_micro_batches, _token_places, size, readout=readout, some=some)

    def _sequence_results(self, batch: RolloutBatch, readout: Readout) -> PartialTensor:
        """Of (N,) float32: `readout`'s "out" for every sequence."""
        return self._results(batch, self._of_sequences, _sequence_places, len(batch), readout=readout)

    def _of_sequences(self, *args: Any, **named: Any) -> list[MicroBatch]:
        """Micro-batches with one output a sequence, read where transformers reads this model's."""
        return sequence_micro_batches(*args, **named, pad_token_id=self.spec.pad_token_id)

    def _results(
        self,
        batch: RolloutBatch,
        make: MakeMicroBatches,
        places: Places,
        size: int,
        *,
        readout: Readout,
        some: Tensor | None = None,
    ) -> PartialTensor:
        """What this replica has computed ahead, whose units are of the same rows, and what it computes now."""
        if not self.grid.inside:
            return PartialTensor.empty(size)
        ahead = self.ahead if self.ahead is not None and self.ahead.covers(batch, some) else None
        read = _read_by(make, batch)
        if ahead is None:
            rows = self._rows_of_replicas(read, None if some is None else batch.branches_of(some))
            experts = self._engines_experts(read, rows)
            own = [rows[self.grid.dp_rank]]
            micro_batches = self._micro_batches(read, own, make, experts=experts)
        else:
            left = [torch.tensor(rows, dtype=torch.int64) for rows in ahead.rows_left(self.grid.dp_rank)]
            own = [batch.branches_of(rows).tolist() for rows in left]
            micro_batches = self._micro_batches(read, own, make)
        self._count_work(read, own)
        results = pipeline.forward(self.chunks, self.grid, micro_batches, readout)
        where, values = [], []
        if self.grid.contributes and micro_batches:
            where, values = [mb.where for mb in micro_batches], [result["out"] for result in results]
        if ahead is not None:
            where += [places(batch, rows)[known.where] for rows, known in ahead.own_results()]
            values += [known.values for _, known in ahead.own_results()]
        if not where:
            return PartialTensor.empty(size)
        return PartialTensor(size, torch.cat(where), torch.cat(values))


def _read_by(make: MakeMicroBatches, batch: RolloutBatch) -> RolloutBatch:
    """The rows that a model runs: branches, unless there is one output a row."""
    return batch.by_branch() if make is prediction_micro_batches else batch


def _token_places(batch: RolloutBatch, rows: Tensor) -> Tensor:
    return token_index(batch.lengths, rows)


def _sequence_places(batch: RolloutBatch, rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True)
class StepReport:
    """This rank's part of an optimizer step's results, which are the sums of `values` over all ranks."""

    names: tuple[str, ...]
    values: Tensor  # (names,) float64
    row: int | None  # where the gradient is not finite: the first row of the mini-batch whose loss is not, if one is


class TrainedRole(Role):
    """A role with an optimizer. `training_model` is None outside the role's grid, and on every rank without training.

    steps: reports since `begin_iteration`. After a gradient that is not finite, later steps change no weight.
    step_begun: whether a step of the iteration has begun. takes_steps: False: a step changes no weight.
    """

    def __init__(
        self,
        placed: PlacedModel,
        *,
        world: RunContext,
        bucket_bytes: int | None,
        head_seed: int | None = None,
        trains: bool = True,
    ) -> None:
        """trains: without it there is neither an optimizer nor a gradient."""
        config = placed.config
        assert isinstance(config, TrainedRoleConfig), f"{placed.name} has no optimizer"
        super().__init__(placed, recompute=config.recompute, world=world, head_seed=head_seed)
        self._offloads = {"gradients": config.offload_gradients, "optimizer": config.offload_optimizer is True}
        self.name, self.optimizer_config = placed.name, config.optimizer
        self.lr = config.optimizer.lr
        self.steps: list[StepReport] = []
        self.step_begun, self.takes_steps = False, trains
        self.training_model: TrainedModel | None = None
        if not trains:
            for chunk in self.chunks:
                chunk.requires_grad_(False)
        elif self.grid.inside:
            self.training_model = TrainedModel(
                self._models,
                self.grid,
                config.optimizer,
                bucket_bytes=bucket_bytes,
                overlap=world.overlap if config.overlap is None else config.overlap,
                staged=config.offload_optimizer == "always",
            )
            self.chunks = self.training_model.chunks
            if self._offloads["optimizer"] and locks_host_memory():  # not in the first rollout
                self.training_model.reserve_host_memory()

    def _before_step(self) -> None:
        """Each step calls this method before the first forward pass."""

    def begin_iteration(self, iteration: int, num_iterations: int) -> None:
        """From here on the learning rate is that of this iteration, 1 .. num_iterations."""
        self.lr = learning_rate(self.optimizer_config, iteration, num_iterations)
        self.steps, self.step_begun = [], False

    def weights(self) -> dict[str, tuple[Weight, Tensor]]:
        """This rank's live weights by megatron name, after the last step."""
        self.wait_for_weights()
        found = named_weights(self.chunks, self.spec, head=self.head)
        return {weight.megatron: (weight, parameter.data) for weight, parameter in found}

    def wait_for_weights(self) -> None:
        """Wait for all weights of the last step. Call before a read other than this role's forward pass."""
        if self.training_model is not None:
            self.training_model.wait_for_parameters()

    def offloaded(self) -> contextlib.AbstractContextManager[None]:
        """Within the block what the config says is out of device memory: gradients, optimizer state."""
        if self.training_model is None:
            return contextlib.nullcontext()
        return self.training_model.offloaded(**self._offloads)

    def _accumulate(
        self,
        batch: RolloutBatch,
        per_output: PerOutputLoss,
        mean: MeanOver,
        names: Sequence[str],
        *,
        make: MakeMicroBatches = prediction_micro_batches,
    ) -> Tensor:
        """Add the gradient of the mean of `per_output` over the mini-batch, wherever the outputs are computed.

        make: says whether there is an output a response token or, `_of_sequences`, one a sequence; the weights
        of `mean` are then (T,) or (N,).

        This rank's part of the mean loss, and of the means of what else `per_output` tells: (1 + names,) float64.
        """
        weights, divisor = mean(batch)
        self._losses: list[tuple[Tensor, Tensor]] = []

        def loss(output: Output, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            each, known = per_output(output, mb)
            total = (each * to_device_async(weights[mb.where], each.device)).sum()
            self._losses.append((mb.where, each.detach()))
            finite = 1 + 0 * total.detach()  # 1, or NaN: a loss that is not finite leaves no gradient that is
            sums = {name: known[name].detach().sum() for name in names}
            return total / divisor * finite, {"loss": total.detach(), **sums}

        # a replica without a row of the mini-batch takes part in the sum of the gradients all the same
        read = _read_by(make, batch)
        rows = self._rows_of_replicas(read)
        experts = self._engines_experts(read, rows)
        own = [rows[self.grid.dp_rank]]
        micro_batches = self._micro_batches(read, own, make, one=True, experts=experts)
        self._count_work(read, own, passes=UPDATE if self.spec.lora is None else FROZEN_UPDATE)
        results = pipeline.forward_backward(self.chunks, self.grid, micro_batches, loss)
        if not self.grid.contributes:
            return torch.zeros(1 + len(names), dtype=torch.float64, device=self._platform.device)
        sums = [torch.stack([result[name].double() for name in ("loss", *names)]) for result in results]
        divisors = [divisor] + [max(batch.num_response_tokens, 1)] * len(names)
        return torch.stack(sums).sum(0) / to_device_async(
            torch.tensor(divisors, dtype=torch.float64), self._platform.device
        )

    def _step(
        self,
        batch: RolloutBatch,
        per_output: PerOutputLoss,
        mean: MeanOver,
        names: tuple[str, ...],
        *,
        make: MakeMicroBatches = prediction_micro_batches,
    ) -> StepReport:
        """One optimizer step on a mini-batch; also noted in `steps`."""
        if not self.takes_steps:
            return StepReport((), torch.zeros(0, dtype=torch.float64, device=self._platform.device), None)
        self.ahead = None  # that was of other weights
        self.step_begun = True
        self._before_step()
        values, row = torch.zeros(2 + len(names), dtype=torch.float64, device=self._platform.device), None
        halted = any(step.row is not None for step in self.steps)
        if self.training_model is not None and not halted:
            self.training_model.zero_gradients()
            values[:-1] = self._accumulate(batch, per_output, mean, names, make=make)
            norm = self.training_model.step(self.lr)
            if self.grid.is_first:  # alike on all ranks of the grid: one tells
                values[-1] = torch.tensor(norm, dtype=torch.float32)
            row = None if math.isfinite(norm) else self._first_bad_row(batch, make)
        self.steps.append(StepReport(("loss", *names, "grad_norm"), values, row))
        return self.steps[-1]

    def _first_bad_row(self, batch: RolloutBatch, make: MakeMicroBatches) -> int:
        """The first row with a loss that is not finite among those computed here; -1 where every loss is."""
        bad = [where[~each.isfinite().cpu()] for where, each in self._losses]
        places = torch.cat([*bad, torch.zeros(0, dtype=torch.int64)])
        if not len(places) or make is not prediction_micro_batches:
            return int(places.min()) if len(places) else -1
        return int(torch.searchsorted(batch.lengths.cumsum(0), places.min(), right=True))
