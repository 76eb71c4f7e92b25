"""What one forward pass of a model reads: packed sequences, and the rows whose outputs are wanted.

Only those rows reach the output layer: logits of prompt tokens are never computed. Where the outputs wanted are of the
state *before* each response token (log-probs, values) the last token of a sequence is not run at all. A prompt that
several rows share is there once, but for the last token (see `prompt_groups`):

    [rows by themselves] [prompts that are shared] [what follows the first of them] [the second] ... [padding]

With context parallelism a rank has pieces of each of them, in the same order: see `context`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, offsets, to_device_async, token_index
from hybridflow.models.attention import PackedSequences
from hybridflow.models.context import Context, ContextSpans, SharedOutputs, most_tokens, pieces_of, places
from hybridflow.models.prompt_groups import PromptGroup, micro_batch_groups, prompt_groups
from hybridflow.models.routing import RoutedTokens, RowExperts
from hybridflow.models.shared_prompt import SharedPrompts

Padded = Callable[[int], int]  # of so many tokens: with the padding behind them


def padding(multiple: int, rounded: Callable[[int], int] = int) -> Padded:
    """A function: tokens -> tokens and padding, a multiple of `multiple`. rounded: rounds the tokens of one part up."""
    return lambda tokens: multiple * rounded(-(-tokens // multiple))


@dataclass(frozen=True)
class MicroBatch:
    """t tokens of n sequences, r wanted outputs. With context parallelism: those of this rank."""

    input_ids: Tensor  # (t,) int64
    positions: Tensor  # (t,) int64, from 0 in each sequence; a response's go on from the prompt's
    packed: PackedSequences
    rows: Tensor  # (r,) int64: tokens whose output is wanted
    where: Tensor  # (r,) int64, on the CPU: the entry of the batch's (T,) or (N,) tensors that each output belongs to
    targets: Tensor  # (r,) int64: the tokens that the outputs predict; without meaning where outputs are per sequence
    routed: RoutedTokens | None = None  # the engine's experts of the t tokens
    repeats: tuple[int, ...] = ()  # of each sequence of `packed`: how many rows it is run for, 0 of padding
    shared: SharedOutputs | None = None  # those of the ranks that share the tokens; None: there are no such ranks

    def rows_per_token(self) -> Tensor:
        """(t,) int64 on the CPU: for how many rows of the batch each token is run."""
        return torch.tensor(self.repeats).repeat_interleave(torch.tensor(self.packed.lengths))


def prediction_micro_batches(
    batch: RolloutBatch,
    rows: list[int],
    *,
    max_tokens: int,
    padded: Padded,
    device: torch.device,
    experts: RowExperts | None = None,
    context: Context | None = None,
) -> list[MicroBatch]:
    """Micro-batches whose outputs are one per response token: the state before it.

    experts: of the engine, for these rows; None: the model chooses experts. context: the ranks that share tokens.
    """
    lengths, made = (batch.lengths - 1).tolist(), _Making(batch, padded, device, context)
    return [
        _prediction_micro_batch(made, _layout(groups, lengths), experts)
        for groups in micro_batch_groups(prompt_groups(batch, rows), lengths, max_tokens)
    ]


def sequence_micro_batches(
    batch: RolloutBatch,
    rows: list[int],
    *,
    max_tokens: int,
    padded: Padded,
    device: torch.device,
    pad_token_id: int | None = None,
    context: Context | None = None,
) -> list[MicroBatch]:
    """Micro-batches whose outputs are one per sequence: the state after the sequence's last token.

    pad_token_id: what follows the last token that is not this one is not run, since transformers'
    *ForSequenceClassification reads the score there. A model's pad token may be the one that ends a response.
    """
    lengths, made = _read_lengths(batch, pad_token_id).tolist(), _Making(batch, padded, device, context)
    return [
        _sequence_micro_batch(made, _layout(groups, lengths))
        for groups in micro_batch_groups(prompt_groups(batch, rows), lengths, max_tokens)
    ]


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of a row."""

    row: int
    first: int  # the position of the first of them in the row
    length: int


@dataclass(frozen=True)
class RunOrder:
    """What a micro-batch runs, in order. The responses follow the prompts."""

    alone: list[Stretch]  # whole rows
    prompts: list[Stretch]
    responses: list[list[Stretch]]  # to each prompt: what follows it

    @property
    def stretches(self) -> list[Stretch]:
        return [*self.alone, *self.prompts, *self.ends[len(self.alone) :]]

    @property
    def repeats(self) -> list[int]:
        """For how many rows each of `stretches` is run."""
        return [1] * len(self.alone) + [*map(len, self.responses)] + [1] * (len(self.ends) - len(self.alone))

    @property
    def ends(self) -> list[Stretch]:
        """One stretch of each row, with the row's last token."""
        return [*self.alone, *(stretch for stretches in self.responses for stretch in stretches)]

    def followed(self) -> list[tuple[int, list[int]]]:
        """Prompts and what follows each, by their places in `stretches`."""
        first = len(self.alone)
        behind = iter(range(first + len(self.prompts), len(self.stretches)))
        return [(first + i, [next(behind) for _ in stretches]) for i, stretches in enumerate(self.responses)]

    def shared(self, device: torch.device) -> SharedPrompts | None:
        if not self.prompts:
            return None
        lengths = [
            (prompt.length, tuple(stretch.length for stretch in stretches))
            for prompt, stretches in zip(self.prompts, self.responses, strict=True)
        ]
        return SharedPrompts.from_lengths(lengths, start=sum(stretch.length for stretch in self.alone), device=device)


def _read_lengths(batch: RolloutBatch, pad_token_id: int | None) -> Tensor:
    """(N,): tokens of each row up to the last that is not the pad token; all of the row's prompt at least."""
    if pad_token_id is None:
        return batch.lengths
    places = _within(batch.lengths) + 1
    ends = places * (batch.input_ids != pad_token_id)
    of_rows = torch.arange(len(batch)).repeat_interleave(batch.lengths)
    return torch.zeros_like(batch.lengths).scatter_reduce(0, of_rows, ends, "amax").maximum(batch.prompt_lengths)


def _layout(groups: Sequence[PromptGroup], lengths: Sequence[int]) -> RunOrder:
    """lengths: the tokens of each row of the batch that are run."""
    together = [group for group in groups if group.shared]
    return RunOrder(
        [Stretch(row, 0, lengths[row]) for group in groups if not group.shared for row in group.rows],
        [Stretch(group.rows[0], 0, group.shared) for group in together],
        [[Stretch(row, group.shared, lengths[row] - group.shared) for row in group.rows] for group in together],
    )


@dataclass(frozen=True)
class _Making:
    """What all micro-batches of a batch are made with."""

    batch: RolloutBatch
    padded: Padded
    device: torch.device
    context: Context | None


def _prediction_micro_batch(made: _Making, layout: RunOrder, experts: RowExperts | None) -> MicroBatch:
    tokens = _tokens(made.batch, layout.stretches)
    predicts = made.batch.response_mask[tokens + 1]  # each token that is run has a successor in the sequence
    where = tokens[predicts] + 1
    rows = predicts.nonzero().squeeze(1)
    return _micro_batch(made, tokens, layout, rows=rows, where=where, experts=experts)


def _sequence_micro_batch(made: _Making, layout: RunOrder) -> MicroBatch:
    tokens = _tokens(made.batch, layout.stretches)
    where = torch.tensor([stretch.row for stretch in layout.ends])
    last = torch.tensor([stretch.length for stretch in layout.stretches]).cumsum(0) - 1
    num_alone, num_prompts = len(layout.alone), len(layout.prompts)
    rows = torch.cat([last[:num_alone], last[num_alone + num_prompts :]])
    return _micro_batch(made, tokens, layout, rows=rows, where=where)


def _tokens(batch: RolloutBatch, stretches: list[Stretch]) -> Tensor:
    """Flat positions of the tokens of all stretches."""
    rows, first, lengths = _columns(stretches)
    return (offsets(batch.lengths)[rows] + first).repeat_interleave(lengths) + _within(lengths)


def _columns(stretches: list[Stretch]) -> tuple[Tensor, Tensor, Tensor]:
    """(their rows, first positions, lengths), int64."""
    rows, first, lengths = torch.tensor([(x.row, x.first, x.length) for x in stretches]).unbind(1)
    return rows, first, lengths


def _within(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... for each length."""
    return token_index(lengths, torch.arange(len(lengths))) - offsets(lengths).repeat_interleave(lengths)


def _micro_batch(
    made: _Making,
    tokens: Tensor,
    layout: RunOrder,
    *,
    rows: Tensor,
    where: Tensor,
    experts: RowExperts | None = None,
) -> MicroBatch:
    """What `padded` adds becomes a sequence that nobody reads. rows, where: as in `MicroBatch`, of all ranks."""
    batch, device = made.batch, made.device
    _, first, lengths = _columns(layout.stretches)
    positions = first.repeat_interleave(lengths) + _within(lengths)
    own_lengths, repeats, outputs, num_tokens = lengths.tolist(), layout.repeats, None, len(tokens)
    if made.context is not None:
        pieces = pieces_of(own_lengths, made.context)
        own = places(pieces, own_lengths)
        outputs = SharedOutputs.of(rows, where, own_lengths, made.context)
        of_rank = outputs.of_ranks[made.context.rank]
        rows, where = _found(own, rows[of_rank]), where[of_rank]
        tokens, positions = tokens[own], positions[own]
        repeats, own_lengths = [repeats[piece.stretch] for piece in pieces], [piece.length for piece in pieces]
        num_tokens = most_tokens(lengths.tolist(), made.context)
    routed = None if experts is None else experts.for_tokens(tokens)
    input_ids, missing = batch.input_ids[tokens], made.padded(num_tokens) - len(tokens)
    if missing:
        input_ids = torch.cat([input_ids, input_ids.new_zeros(missing)])
        routed = None if routed is None else routed.padded(missing)
        positions = torch.cat([positions, torch.arange(missing)])
    all_lengths = (*own_lengths, *([missing] if missing else []))
    if made.context is None:
        packed = PackedSequences.from_lengths(all_lengths, device, layout.shared(device))
    else:
        spans = ContextSpans.of(lengths.tolist(), layout.followed(), made.context, len(input_ids), device)
        packed = replace(PackedSequences.from_lengths(all_lengths, device), context=spans)
    return MicroBatch(
        input_ids=to_device_async(input_ids, device),
        positions=to_device_async(positions, device),
        packed=packed,
        rows=to_device_async(rows, device),
        where=where,
        targets=to_device_async(batch.input_ids[where], device),
        routed=routed,
        repeats=(*repeats, *([0] if missing else [])),
        shared=outputs,
    )


def _found(own: Tensor, tokens: Tensor) -> Tensor:
    """Where `tokens` are among the own ones, which ascend within a stretch and from one to the next."""
    return torch.searchsorted(own, tokens)


def filled_up(micro_batches: list[MicroBatch], group: int, *, padded: Padded, device: torch.device) -> list[MicroBatch]:
    """As many micro-batches as the next multiple of `group`: those missing are fillers."""
    return micro_batches + [filler(padded, device)] * (-len(micro_batches) % group)


def filler(padded: Padded, device: torch.device) -> MicroBatch:
    """A micro-batch of as few tokens as may be, whose outputs nobody wants."""
    nothing, tokens = torch.zeros(0, dtype=torch.int64, device=device), padded(1)
    return MicroBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=torch.arange(tokens, device=device),
        packed=PackedSequences.from_lengths((tokens,), device),
        rows=nothing,
        where=nothing.cpu(),
        targets=nothing,
        repeats=(0,),
    )
