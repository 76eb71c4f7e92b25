"""Run micro-batches through a model: megatron's schedules, and nobody else's business.

Losses arrive normalised by the caller over the whole mini-batch; the schedules only add up.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from hybridflow.models.micro_batch import MicroBatch
from hybridflow.parallel.device import named_range
from hybridflow.parallel.grid import Grid

Results = dict[str, Tensor]
Output = Any  # what a model gives: `models.output_layer.Outputs`, or (r,) values
Readout = Callable[[Output, MicroBatch], Results]
Loss = Callable[[Output, MicroBatch], tuple[Tensor, Results]]
Reduce = Callable[[Tensor], tuple[Tensor, Tensor, Results]]  # of a loss: also the tokens that it counts, ignored
Chunks = Sequence[MegatronModule]  # models, or their data-parallel wrappers


class StageCommunicator(P2PCommunicator):
    """Passes activations and gradients between stages; each stage knows their shapes, for it has the micro-batches.

    megatron-core 0.16.1 would ask the neighbour for every shape, and with the interleaved schedule that waits for ever:
    a stage would not send before it knew what it will receive, and the one that it waits for neither.
    """

    def __init__(self, grid: Grid, config: TransformerConfig, micro_batches: list[MicroBatch]) -> None:
        super().__init__(grid.groups.pp, config)
        num_chunks, split = grid.layout.vpp, grid.tp if config.sequence_parallel else 1
        steps = get_schedule_table(len(micro_batches), num_chunks, grid.pp)

        def shapes(skipped: Callable[[int], bool]) -> Iterator[list[int]]:
            for index, chunk in steps:
                if not skipped(chunk):
                    yield [len(micro_batches[index].input_ids) // split, 1, config.hidden_size]

        # chunks run forward from the first and backward from the last: there nothing comes from another stage
        self._activations = shapes(lambda chunk: grid.is_first_stage and chunk == 0)
        self._gradients = shapes(lambda chunk: grid.is_last_stage and chunk == 0)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """(what comes from the previous stage, from the next one): the next of either in the order of the schedule."""
        before = next(self._activations) if recv_prev else [0, 0, 0]
        return before, next(self._gradients) if recv_next else [0, 0, 0]


def forward(chunks: Chunks, grid: Grid, micro_batches: list[MicroBatch], readout: Readout) -> list[Results]:
    """`readout` of the model's output for every micro-batch, on the last stage, else empty; without gradients."""

    def loss(output: Output, micro_batch: MicroBatch) -> tuple[Tensor, Results]:
        return torch.zeros((), device=micro_batch.input_ids.device), readout(output, micro_batch)

    with torch.no_grad():  # forward_only alone keeps the graph
        return _run(chunks, grid, micro_batches, loss, forward_only=True) if micro_batches else []


def forward_backward(chunks: Chunks, grid: Grid, micro_batches: list[MicroBatch], loss: Loss) -> list[Results]:
    """Accumulate the gradients of the summed losses over micro-batches and replicas; `loss`'s results, detached.

    The results are on the last stage; other stages get none. The chunks are wrapped in megatron's
    DistributedDataParallel; their gradient buffers must be zeroed before.
    """
    assert micro_batches, "every replica takes part in an update: a mini-batch has at least one row for each"
    waits: Any = [chunk.no_sync for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
    chunks[0].config.no_sync_func = waits if len(waits) > 1 else waits[0]  # sums are taken in the last micro-batch
    return _run(chunks, grid, micro_batches, loss, forward_only=False)


def _run(
    chunks: Chunks, grid: Grid, micro_batches: list[MicroBatch], loss: Loss, *, forward_only: bool
) -> list[Results]:
    config, interleaved = chunks[0].config, len(chunks) > 1
    config.finalize_model_grads_func = _sum_gradients

    def step(batches: Iterator[tuple[int, MicroBatch]], model: MegatronModule) -> tuple[Tensor, Reduce]:
        number, micro_batch = next(batches)

        def reduce(output: Output) -> tuple[Tensor, Tensor, Results]:
            with named_range(f"micro-batch {number} loss"):
                value, results = loss(output, micro_batch)
            return value, torch.zeros((), dtype=torch.int), results

        with named_range(f"micro-batch {number} forward"):
            return model(micro_batch), reduce

    run = get_forward_backward_func(pp_size=grid.pp, vp_size=len(chunks) if interleaved else None)
    results: list[Results] = run(
        forward_step_func=step,
        data_iterator=[enumerate(micro_batches) for _ in chunks] if interleaved else enumerate(micro_batches),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # packed: the schedules learn shapes from the tensors
        micro_batch_size=1,
        forward_only=forward_only,
        pg_collection=grid.groups,
        p2p_communicator=StageCommunicator(grid, config, micro_batches) if grid.pp > 1 else None,
    )
    return results


def _sum_gradients(
    model: list[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Sum over replicas. The token counts that the schedule passes are ignored: the loss is normalised already."""
    finalize_model_grads(model, None, pg_collection, force_all_reduce)


def meet_neighbours(group: dist.ProcessGroup, device: torch.device, *, wraps: bool) -> None:
    """Send a number to each neighbouring stage, by megatron's P2P calls: NCCL then makes the stages' communicators.

    wraps: the last stage sends to the first, as stages do that have several chunks of the model.
    """
    ranks, own, last = dist.get_process_group_ranks(group), group.rank(), group.size() - 1
    before, after = own > 0 or wraps, own < last or wraps
    sent, received = (torch.zeros(1, device=device) for _ in range(2))
    requests = _p2p_ops(
        tensor_send_prev=sent if before else None,
        tensor_recv_prev=received if before else None,
        tensor_send_next=sent if after else None,
        tensor_recv_next=received.clone() if after else None,
        group=group,
        prev_pipeline_rank=ranks[own - 1],
        next_pipeline_rank=ranks[(own + 1) % len(ranks)],
    )
    for request in requests.values():
        request.wait()
