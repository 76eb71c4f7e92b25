"""What every role shares: its rows of a batch, its micro-batches, and results made whole."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridflow.batch import RolloutBatch, balanced_partition
from hybridflow.config import RoleConfig
from hybridflow.models import pipeline
from hybridflow.models.build import build_model
from hybridflow.models.micro_batch import MicroBatch, prediction_micro_batches, sequence_micro_batches
from hybridflow.models.pipeline import Head, Loss
from hybridflow.models.spec import ModelSpec, read_spec
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.platform import Platform

MakeMicroBatches = Callable[..., list[MicroBatch]]


class Role:
    """A model on a grid. `model` is what the schedules run: the bare model, or its data-parallel wrapper."""

    def __init__(
        self, name: str, config: RoleConfig, *, value_head: bool, recompute: str, platform: Platform, exchange: Exchange
    ) -> None:
        self.spec: ModelSpec = read_spec(Path(config.model))
        self.spec.check_parallel(name, config.tensor_parallel_size)
        dp = config.data_parallel(platform.world_size)
        self.grid = Grid.build(config.tensor_parallel_size, config.pipeline_parallel_size, dp)
        self.value_head = value_head
        self._config = config
        self._platform = platform
        self._exchange = exchange
        self.model: nn.Module = build_model(
            self.spec,
            self.grid,
            value_head=value_head,
            dtype=config.dtype,
            sequence_parallel=config.sequence_parallel,
            recompute=recompute,
            device=platform.device,
        )

    def _micro_batches(self, batch: RolloutBatch, make: MakeMicroBatches) -> list[MicroBatch]:
        """This replica's rows, balanced by tokens over the replicas, cut by the token budget."""
        return make(
            batch,
            balanced_partition(batch.lengths.tolist(), self.grid.dp)[self.grid.dp_rank],
            max_tokens=self._config.micro_batch_tokens,
            multiple=self.grid.tp if self._config.sequence_parallel else 1,
            device=self._platform.device,
        )

    def _token_results(self, batch: RolloutBatch, head: Head) -> Tensor:
        """(T,) float32: `head`'s "out" for every response token, zero elsewhere."""
        return self._results(batch, prediction_micro_batches, len(batch.input_ids), head)

    def _sequence_results(self, batch: RolloutBatch, head: Head) -> Tensor:
        """(N,) float32: `head`'s "out" for every sequence."""
        return self._results(batch, sequence_micro_batches, len(batch), head)

    def _results(self, batch: RolloutBatch, make: MakeMicroBatches, size: int, head: Head) -> Tensor:
        micro_batches = self._micro_batches(batch, make)
        results = pipeline.forward(self.model, self.grid, micro_batches, head)
        where = [micro_batch.where for micro_batch in micro_batches]
        values = [result["out"] for result in results]
        return self._exchange.whole(
            size,
            torch.cat(where) if values else torch.zeros(0, dtype=torch.int64),
            torch.cat(values) if values else torch.zeros(0),
            speaks=self.grid.speaks,
        )

    def _accumulate(self, batch: RolloutBatch, loss: Loss) -> dict[str, Tensor]:
        """Add the gradients of the loss over all rows; the sums over them of what `loss` reports, 0-d on the CPU."""
        micro_batches = self._micro_batches(batch, prediction_micro_batches)
        results = pipeline.forward_backward(self.model, self.grid, micro_batches, loss)
        names = sorted(results[0])
        own = torch.stack([torch.stack([result[name].double() for name in names]) for result in results]).sum(0)
        whole = self._exchange.summed(own if self.grid.speaks else torch.zeros_like(own)).cpu()
        return dict(zip(names, whole, strict=True))
