"""What every role shares: its rows of a batch, its micro-batches, and what this rank contributes to the results."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.architecture.spec import ModelSpec
from hybridflow.batch import RolloutBatch, balanced_partition
from hybridflow.config import TrainedRoleConfig
from hybridflow.models import pipeline
from hybridflow.models.build import build_model
from hybridflow.models.micro_batch import (
    MicroBatch,
    filled_up,
    prediction_micro_batches,
    sequence_micro_batches,
)
from hybridflow.models.optimizer import TrainedModel
from hybridflow.models.pipeline import Loss, Readout
from hybridflow.parallel.exchange import Exchange, Part
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.platform import Platform
from hybridflow.planning.placed import PlacedModel

MakeMicroBatches = Callable[..., list[MicroBatch]]


@dataclass(frozen=True)
class World:
    """What all roles of a run share."""

    platform: Platform
    groups: ProcessGroups
    exchange: Exchange
    bucket_bytes: int  # the actor's weights live and travel in buckets of about this size


class Role:
    """A model on a grid. `chunks` is what the schedules run: this rank's model chunks, or their data-parallel wrappers.

    A rank outside the grid has no chunks; it contributes nothing and goes straight on.
    """

    def __init__(self, placed: PlacedModel, *, recompute: str, world: World) -> None:
        self.spec: ModelSpec = placed.spec
        self.head = placed.head
        self.grid = Grid.build(placed.layout, world.groups)
        self._config = config = placed.config
        self._platform = world.platform
        self.chunks: list[nn.Module] = []
        if self.grid.inside:
            self.chunks = build_model(
                self.spec,
                self.grid,
                head=placed.head,
                dtype=config.dtype,
                sequence_parallel=config.sequence_parallel,
                recompute=recompute,
                device=world.platform.device,
            )

    def _micro_batches(self, batch: RolloutBatch, make: MakeMicroBatches) -> list[MicroBatch]:
        """This replica's rows, balanced by tokens over the replicas, cut by the token budget."""
        multiple = self.grid.tp if self._config.sequence_parallel else 1
        micro_batches = make(
            batch,
            balanced_partition(batch.lengths.tolist(), self.grid.dp)[self.grid.dp_rank],
            max_tokens=self._config.micro_batch_tokens,
            multiple=multiple,
            device=self._platform.device,
        )
        if self.grid.layout.vpp > 1:  # the interleaved schedule takes them in groups of pp
            return filled_up(micro_batches, self.grid.pp, multiple=multiple, device=self._platform.device)
        return micro_batches

    def _token_results(self, batch: RolloutBatch, readout: Readout) -> Part:
        """Of (T,) float32: `readout`'s "out" for every response token."""
        return self._results(batch, prediction_micro_batches, len(batch.input_ids), readout)

    def _sequence_results(self, batch: RolloutBatch, readout: Readout) -> Part:
        """Of (N,) float32: `readout`'s "out" for every sequence."""
        return self._results(batch, sequence_micro_batches, len(batch), readout)

    def _results(self, batch: RolloutBatch, make: MakeMicroBatches, size: int, readout: Readout) -> Part:
        if not self.grid.inside:
            return Part.nothing(size)
        micro_batches = self._micro_batches(batch, make)
        results = pipeline.forward(self.chunks, self.grid, micro_batches, readout)
        if not self.grid.contributes or not micro_batches:
            return Part.nothing(size)
        where = torch.cat([micro_batch.where for micro_batch in micro_batches])
        return Part(size, where, torch.cat([result["out"] for result in results]))

    def _accumulate(self, batch: RolloutBatch, loss: Loss, names: Sequence[str]) -> Tensor:
        """Add the gradients of the loss over all rows; this rank's sums of what `loss` tells, (names,) float64.

        Their sum over all ranks of the world is the sum over all rows.
        """
        micro_batches = self._micro_batches(batch, prediction_micro_batches)
        results = pipeline.forward_backward(self.chunks, self.grid, micro_batches, loss)
        if not self.grid.contributes:
            return torch.zeros(len(names), dtype=torch.float64, device=self._platform.device)
        return torch.stack([torch.stack([result[name].double() for name in names]) for result in results]).sum(0)


class TrainedRole(Role):
    """A role with an optimizer; `trained` is None on a rank outside its grid."""

    report: tuple[str, ...]  # what an update tells; the gradient norm is the last

    def __init__(self, placed: PlacedModel, *, world: World, bucket_bytes: int | None) -> None:
        config = placed.config
        assert isinstance(config, TrainedRoleConfig), f"{placed.name} has no optimizer"
        super().__init__(placed, recompute=config.recompute, world=world)
        self._offloads = {"gradients": config.offload_gradients, "optimizer": config.offload_optimizer}
        self.trained: TrainedModel | None = None
        if self.grid.inside:
            self.trained = TrainedModel(self.chunks, self.grid, config.optimizer, bucket_bytes=bucket_bytes)
            self.chunks = self.trained.chunks

    def offloaded(self) -> contextlib.AbstractContextManager[None]:
        """Within the block what the config says is out of device memory: gradients, optimizer state."""
        if self.trained is None:
            return contextlib.nullcontext()
        return self.trained.offloaded(**self._offloads)

    def _step(self, accumulate: Callable[[], Tensor], lr: float) -> Tensor:
        """One optimizer step; this rank's part of `report`, (report,) float64: the whole is the sum over the world."""
        if self.trained is None:
            return torch.zeros(len(self.report), dtype=torch.float64, device=self._platform.device)
        self.trained.zero_gradients()
        sums = accumulate()
        norm = self.trained.step(lr).to(sums)
        once = self.grid.contributes and self.grid.dp_rank == 0  # alike on all ranks of the grid: one tells
        return torch.cat([sums, norm[None] if once else torch.zeros_like(norm)[None]])
