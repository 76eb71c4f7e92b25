"""What one forward pass of a model reads: packed sequences, and the rows whose outputs are wanted.

Only those rows reach the output layer: logits of prompt tokens are never computed. Where the outputs wanted are of the
state *before* each response token (log-probs, values) the last token of a sequence is not run at all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, micro_batch_rows, offsets, token_index
from hybridflow.models.attention import PackedSequences


@dataclass(frozen=True)
class MicroBatch:
    """t tokens of n sequences, r wanted outputs."""

    input_ids: Tensor  # (t,) int64
    positions: Tensor  # (t,) int64, from 0 in each sequence
    packed: PackedSequences
    rows: Tensor  # (r,) int64: tokens whose output is wanted
    where: Tensor  # (r,) int64, on the CPU: the entry of the batch's (T,) or (N,) tensors that each output belongs to
    targets: Tensor  # (r,) int64: the tokens that the outputs predict; without meaning where outputs are per sequence


def prediction_micro_batches(
    batch: RolloutBatch, rows: list[int], *, max_tokens: int, multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches whose outputs are one per response token: the state before it."""
    lengths = (batch.lengths - 1).tolist()
    return [
        _prediction_micro_batch(batch, torch.tensor(group), multiple, device)
        for group in micro_batch_rows(lengths, rows, max_tokens)
    ]


def sequence_micro_batches(
    batch: RolloutBatch, rows: list[int], *, max_tokens: int, multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches whose outputs are one per sequence: the state after its last token."""
    return [
        _sequence_micro_batch(batch, torch.tensor(group), multiple, device)
        for group in micro_batch_rows(batch.lengths.tolist(), rows, max_tokens)
    ]


def _prediction_micro_batch(batch: RolloutBatch, group: Tensor, multiple: int, device: torch.device) -> MicroBatch:
    lengths = batch.lengths[group] - 1
    tokens = _tokens(batch, group, lengths)
    predicts = batch.response_mask[tokens + 1]  # each token that is run has a successor in its sequence
    where = tokens[predicts] + 1
    rows = predicts.nonzero().squeeze(1)
    return _micro_batch(batch, tokens, lengths, rows=rows, where=where, multiple=multiple, device=device)


def _sequence_micro_batch(batch: RolloutBatch, group: Tensor, multiple: int, device: torch.device) -> MicroBatch:
    lengths = batch.lengths[group]
    tokens = _tokens(batch, group, lengths)
    rows = lengths.cumsum(0) - 1
    return _micro_batch(batch, tokens, lengths, rows=rows, where=group, multiple=multiple, device=device)


def _tokens(batch: RolloutBatch, group: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the first lengths[i] tokens of each sequence of the group."""
    starts = offsets(batch.lengths)[group]
    within = token_index(lengths, torch.arange(len(lengths))) - offsets(lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within


def _micro_batch(
    batch: RolloutBatch,
    tokens: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor,
    where: Tensor,
    multiple: int,
    device: torch.device,
) -> MicroBatch:
    """`multiple`: sequence parallelism splits tokens evenly; what is missing becomes a sequence that nobody reads."""
    positions = torch.arange(len(tokens)) - offsets(lengths).repeat_interleave(lengths)
    input_ids, missing = batch.input_ids[tokens], -len(tokens) % multiple
    if missing:
        input_ids = torch.cat([input_ids, input_ids.new_zeros(missing)])
        positions = torch.cat([positions, torch.arange(missing)])
    packed = PackedSequences.of((*lengths.tolist(), *([missing] if missing else [])), device)
    return MicroBatch(
        input_ids=input_ids.to(device),
        positions=positions.to(device),
        packed=packed,
        rows=rows.to(device),
        where=where,
        targets=batch.input_ids[where].to(device),
    )


def filled_up(micro_batches: list[MicroBatch], group: int, *, multiple: int, device: torch.device) -> list[MicroBatch]:
    """As many micro-batches as the next multiple of `group`: those missing are fillers."""
    return micro_batches + [filler(multiple, device)] * (-len(micro_batches) % group)


def filler(multiple: int, device: torch.device) -> MicroBatch:
    """A micro-batch of `multiple` tokens whose outputs nobody wants."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        input_ids=torch.zeros(multiple, dtype=torch.int64, device=device),
        positions=torch.arange(multiple, device=device),
        packed=PackedSequences.of((multiple,), device),
        rows=nothing.to(device),
        where=nothing,
        targets=nothing.to(device),
    )
