"""Run micro-batches through a model: megatron's schedules, and nobody else's business.

Losses arrive normalised by the caller over the whole mini-batch; the schedules only add up.
"""

from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from hybridflow.models.micro_batch import MicroBatch
from hybridflow.parallel.grid import Grid

Results = dict[str, Tensor]
Head = Callable[[Tensor, MicroBatch], Results]
Loss = Callable[[Tensor, MicroBatch], tuple[Tensor, Results]]


def forward(model: nn.Module, grid: Grid, micro_batches: list[MicroBatch], head: Head) -> list[Results]:
    """`head` of the model's output for every micro-batch, on the last stage; without gradients."""

    def loss(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Results]:
        return output.new_zeros(()), head(output, micro_batch)

    with torch.no_grad():  # forward_only alone keeps the graph
        return _run(model, grid, micro_batches, loss, forward_only=True) if micro_batches else []


def forward_backward(model: nn.Module, grid: Grid, micro_batches: list[MicroBatch], loss: Loss) -> list[Results]:
    """Accumulate the gradients of the summed losses over micro-batches and replicas; `loss`'s results, detached.

    `model` is wrapped in megatron's DistributedDataParallel; its gradient buffers must be zeroed before.
    """
    assert micro_batches, "every replica takes part in an update: a mini-batch has at least one row for each"
    return _run(model, grid, micro_batches, loss, forward_only=False)


def _run(
    model: nn.Module, grid: Grid, micro_batches: list[MicroBatch], loss: Loss, *, forward_only: bool
) -> list[Results]:
    model.config.finalize_model_grads_func = _sum_gradients

    def step(batches: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Callable]:
        micro_batch = next(batches)

        def reduce(output: Tensor) -> tuple[Tensor, Tensor, Results]:
            value, results = loss(output, micro_batch)
            return value, torch.zeros((), dtype=torch.int), results

        return model(micro_batch), reduce

    return get_forward_backward_func(pp_size=grid.pp, vp_size=None)(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=1,  # packed: the schedules learn shapes from the tensors
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=grid.groups,
    )


def _sum_gradients(model: list[nn.Module], num_tokens: Tensor | None = None, **kwargs: object) -> None:
    """Sum over replicas. The token counts that the schedule passes are ignored: the loss is normalised already."""
    finalize_model_grads(model, None, **kwargs)
