"""Packed batches: flat token tensors and sequence lengths. No padding; what a batch does not have is None.

Shape legend, for the whole project:
    N  sequences of a batch            (N,) tensors have one entry a sequence
    T  tokens of all its sequences     (T,) tensors have one entry a token, sequence after sequence
    R  response tokens, R <= T
A (T,) tensor is aligned with input_ids: entry t belongs to token t. log_probs[t] is the log-prob of token t given what
precedes it, values[t] the value of the state before token t, rewards[t] what choosing token t earned. Outside the
response they are zero. `response_mask` says which tokens the policy chose: usually all after the prompt, but it may
have gaps (what a tool or an environment wrote) and need not reach the end of a sequence. A row of an environment may
be several sequences that models read apart: whoever steps from token to token takes `branch_lengths` for `lengths`.

Every algorithm has its own batch, a dataclass whose fields are marked:

    @dataclass(frozen=True)
    class PPOBatch(RolloutBatch):
        values: PerToken
        scores: PerSequence

Every rank holds the same global batch; which replica computes which rows is a pure function of it.
"""

import dataclasses
import enum
import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args, get_type_hints

import torch
from torch import Tensor

from hybridflow.algorithms.packed import count_masked, spread


class Per(enum.Enum):
    """What an entry of a batch's tensor belongs to."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    REWARDED_SEQUENCE = "rewarded sequence"
    VERSIONED_TOKEN = "versioned token"


DIMENSIONS = {Per.REWARDED_SEQUENCE: 2, Per.VERSIONED_TOKEN: 2}  # of others one
OF_TOKENS = (Per.TOKEN, Per.VERSIONED_TOKEN)
PerToken = Annotated[Tensor, Per.TOKEN]  # (T,)
PerSequence = Annotated[Tensor, Per.SEQUENCE]  # (N,)
PerRewardedSequence = Annotated[Tensor, Per.REWARDED_SEQUENCE]  # (N, parts)
PerVersionedToken = Annotated[Tensor, Per.VERSIONED_TOKEN]  # (T, 1)
NOTHING = {"record_ids": -1, "branch_starts": False}  # of rows without any; a batch of such rows alone has None


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one iteration. `columns` are the data file's other columns, one entry a prompt.

    A prompt without tokens is not known before generation: each row brings its own.
    conversations: the messages of each prompt, None of one that is a text; empty where nobody needs them.
    """

    input_ids: Tensor  # (T,) int64
    lengths: Tensor  # (N,) int64
    texts: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]
    conversations: tuple[list[dict[str, Any]] | None, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def token_lists(self, numbers: Sequence[int] | None = None) -> list[list[int]]:
        """Of these prompts; None: of all."""
        found = self.input_ids.split(self.lengths.tolist())
        return [ids.tolist() for ids in (found if numbers is None else map(found.__getitem__, numbers))]

    def select(self, numbers: Sequence[int]) -> "PromptBatch":
        """These prompts, in this order."""
        index = torch.tensor(numbers, dtype=torch.int64)
        return PromptBatch(
            self.input_ids[token_index(self.lengths, index)],
            self.lengths[index],
            tuple(self.texts[i] for i in numbers),
            {name: tuple(values[i] for i in numbers) for name, values in self.columns.items()},
            tuple(self.conversations[i] for i in numbers) if self.conversations else (),
        )

    @classmethod
    def joined(cls, batches: "Sequence[PromptBatch]") -> "PromptBatch":
        """One behind the other, all with the same columns."""
        return cls(
            torch.cat([batch.input_ids for batch in batches]),
            torch.cat([batch.lengths for batch in batches]),
            tuple(text for batch in batches for text in batch.texts),
            {name: tuple(x for batch in batches for x in batch.columns[name]) for name in batches[0].columns},
            tuple(messages for batch in batches for messages in batch.conversations),
        )


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts with their responses, as the engine made them. Row i answers prompt prompt_indices[i].

    record_ids: with `algorithm.policy.replay_routing` the number of each row's record of the engine's experts, which
    lies with the ranks that train on the row (see `rollout.routing_records`); -1 of a row without one.
    environment_rewards: with `data.environment` what it gave each row, float32, a column a part of the reward; NaN of a
    row that has failed, of which no token is in the mask.
    branch_starts: the first token of each further branch of a row. A row of an environment may have several sequences
    that the model reads apart, one behind the other: the row's first one, and branches. They share the row's score, and
    the row counts once in every mean over rows.
    versions: of the actor that chose each response token: how many iterations had updated the actor. None in a
    synchronous run, where this iteration's actor chose them all.

    Errors: ValueError where a tensor of a batch has not the length that its mark asks for.
    """

    input_ids: PerToken  # int64
    lengths: PerSequence  # int64
    prompt_lengths: PerSequence  # int64
    prompt_indices: PerSequence  # int64
    truncated: PerSequence  # bool: cut at the length limit
    response_mask: PerToken  # bool
    rollout_log_probs: PerToken  # float32
    record_ids: PerSequence | None = dataclasses.field(kw_only=True, default=None)  # int64
    environment_rewards: PerRewardedSequence | None = dataclasses.field(kw_only=True, default=None)
    branch_starts: PerToken | None = dataclasses.field(kw_only=True, default=None)  # bool
    versions: PerVersionedToken | None = dataclasses.field(kw_only=True, default=None)  # int32

    def __post_init__(self) -> None:
        num_tokens = int(self.lengths.sum())
        for name, nothing in NOTHING.items():
            values = getattr(self, name)
            if values is not None and (values == nothing).all():
                object.__setattr__(self, name, None)
        for name, per in marks(type(self)).items():
            if (values := getattr(self, name)) is None:
                continue
            shape, size = tuple(values.shape), num_tokens if per in OF_TOKENS else len(self.lengths)
            expected = (size, *shape[1 : DIMENSIONS.get(per, 1)])
            if shape != expected:
                raise ValueError(
                    f"{type(self).__name__}.{name}: shape {shape}, expected {expected}, one entry a {per.value}"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_mask.count_nonzero())

    @property
    def failed(self) -> Tensor:
        """(N,) bool: rows whose environment has failed. No number about rows counts them."""
        rewards = self.environment_rewards
        return torch.zeros(len(self), dtype=torch.bool) if rewards is None else rewards.isnan().any(1)

    @property
    def rows_of_branches(self) -> Tensor:
        """(B,) int64: the row of each sequence that a model reads by itself; 0 .. N - 1 where no row has several."""
        rows = torch.arange(len(self))
        starts = self.branch_starts
        return rows if starts is None else spread(rows, 1 + count_masked(starts, self.lengths))

    @property
    def branch_lengths(self) -> Tensor:
        """(B,) int64: tokens of each sequence that a model reads by itself."""
        if self.branch_starts is None:
            return self.lengths
        begins = self.branch_starts.clone()
        begins[offsets(self.lengths)] = True
        starts = begins.nonzero().flatten()
        return torch.cat([starts, self.lengths.sum()[None]]).diff()

    def by_branch(self) -> "RolloutBatch":
        """The same tokens with a row for each branch, as models read them; the batch itself where there are none.

        The prompt of a branch is what stands before its first token in the mask. Branches have their row's record.
        """
        if self.branch_starts is None:
            return self
        rows, lengths, mask = self.rows_of_branches, self.branch_lengths, self.response_mask
        first = torch.cat([torch.ones(1, dtype=torch.bool), rows.diff() > 0])
        own = torch.where(first, self.prompt_lengths[rows], tokens_before(mask, lengths))
        return RolloutBatch(
            self.input_ids,
            lengths,
            own,
            self.prompt_indices[rows],
            self.truncated[rows],
            response_mask=mask,
            rollout_log_probs=self.rollout_log_probs,
            record_ids=None if self.record_ids is None else self.record_ids[rows],
        )

    def branches_of(self, rows: Tensor) -> Tensor:
        """The branches of these rows (int64), in their order: numbers of rows of `by_branch`."""
        starts = self.branch_starts
        return rows if starts is None else token_index(1 + count_masked(starts, self.lengths), rows)

    def tensors(self) -> dict[str, Tensor]:
        """By name, without what the batch does not have.

        For a file `RoutingRecords.portable` puts the records in the place of their numbers.
        """
        return {name: x for name, x in vars(self).items() if x is not None}

    def response_token_lists(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """All that follows the prompt, row by row: what the policy wrote and what was written in between."""
        index = torch.tensor(rows, dtype=torch.int64)
        starts = (offsets(self.lengths) + self.prompt_lengths)[index].tolist()
        for start, end in zip(starts, self.lengths.cumsum(0)[index].tolist(), strict=True):
            yield self.input_ids[start:end].tolist()

    def select(self, rows: Tensor) -> Self:
        """The batch of these rows (int64), in this order."""
        tokens = token_index(self.lengths, rows)
        found = marks(type(self))
        return type(self)(
            **{
                name: values.index_select(0, tokens if found[name] in OF_TOKENS else rows)
                for name, values in self.tensors().items()
            }
        )


def marks(batch_type: type[RolloutBatch]) -> Mapping[str, Per]:
    """Whether each field has an entry a token or a sequence. Errors: TypeError for a field without a mark."""
    return _marks(batch_type)  # type: ignore[arg-type]  # mypy asks the class for the __hash__ of its objects


@functools.cache
def _marks(batch_type: type[RolloutBatch]) -> Mapping[str, Per]:
    hints, found = get_type_hints(batch_type, include_extras=True), {}
    for field in dataclasses.fields(batch_type):
        hint = hints[field.name]
        of = [x for each in (hint, *get_args(hint)) for x in getattr(each, "__metadata__", ())]
        mark = [x for x in of if isinstance(x, Per)]
        if not mark:
            raise TypeError(f"{batch_type.__name__}.{field.name} must be annotated PerToken or PerSequence")
        found[field.name] = mark[0]
    return found


class Tokens:
    """The per-token fields of a batch at some of its places: `tokens.advantages` is (r,), on `device`.

    where: (r,) int64, the places. given: what stands for some of the fields there, (r,) by name.
    ends: of the batch's sequences, see `sequence_ends`; None: found here, from all tokens.
    own: of (r,) values those that this rank computes, where ranks share tokens; None: all of them.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        where: Tensor,
        device: torch.device,
        given: Mapping[str, Tensor] | None = None,
        *,
        ends: Callable[[], Tensor] | None = None,
        own: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.own = own or _all_of
        self._batch, self.where, self._device, self._given = batch, where, device, given or {}
        self._ends = ends or sequence_ends(batch)

    def __getattr__(self, name: str) -> Tensor:
        per = marks(type(self._batch)).get(name)
        if per is not Per.TOKEN:
            raise AttributeError(f"{type(self._batch).__name__} has no per-token field {name}")
        values = self._given[name] if name in self._given else getattr(self._batch, name)
        if values is None:
            raise AttributeError(f"{type(self._batch).__name__}.{name} is None: the batch has none")
        return values if name in self._given else self.at_places(values)

    def with_given(self, **given: Tensor) -> "Tokens":
        """The same, with other values of these fields."""
        return Tokens(self._batch, self.where, self._device, {**self._given, **given}, ends=self._ends, own=self.own)

    @property
    def sequences(self) -> Tensor:
        """The sequence that each of these tokens is of, (r,) int64. A micro-batch has whole sequences.

        A row, or where rows have several sequences a branch.
        """
        return to_device_async(torch.searchsorted(self._ends(), self.where, right=True), self._device)

    def at_places(self, values: Tensor) -> Tensor:
        """The entries of a (T,) tensor of the same batch at these places, (r,)."""
        return to_device_async(values[self.where], self._device)


def _all_of(values: Tensor) -> Tensor:
    return values


def sequence_ends(batch: RolloutBatch) -> Callable[[], Tensor]:
    """Where the sequences that a model reads end, (B,) int64: found once, from all tokens, when somebody asks first."""
    return functools.cache(lambda: batch.branch_lengths.cumsum(0))


def to_device_async(values: Tensor, device: torch.device) -> Tensor:
    """On `device`; from the host by a copy that nobody waits for, which on a GPU takes page-locked memory.

    Any other would stop the host until the device has done all that it was given, in every micro-batch.
    """
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def joined(first: RolloutBatch, second: RolloutBatch) -> RolloutBatch:
    """The rows of one rollout and then those of another, to the same prompts."""
    found = {}
    for name, per in marks(RolloutBatch).items():
        parts = [getattr(batch, name) for batch in (first, second)]
        sizes = [len(batch.input_ids if per in OF_TOKENS else batch) for batch in (first, second)]
        for some in [part for part in parts if part is not None][:1]:
            both = zip(parts, sizes, strict=True)
            found[name] = torch.cat([some.new_full((n,), NOTHING[name]) if part is None else part for part, n in both])
    return RolloutBatch(**found)


def offsets(lengths: Tensor) -> Tensor:
    """Where each sequence starts: (N,) int64."""
    return lengths.cumsum(0) - lengths


def token_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Flat positions of the tokens of `rows`, row after row: int64."""
    wanted = lengths[rows]
    index = spread(offsets(lengths)[rows] - offsets(wanted), wanted)
    return index.add_(torch.arange(len(index)))


def response_mask(lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
    """(T,) bool: True from the first token after the prompt."""
    prompts = prompt_lengths.minimum(lengths)
    parts = torch.stack([prompts, lengths - prompts], dim=1).flatten()
    return spread(torch.tensor([False, True]).repeat(len(lengths)), parts)


def tokens_before(mask: Tensor, lengths: Tensor) -> Tensor:
    """(N,) int64: of each row those before the first that is in the mask (T,); all of them where none is."""
    places, starts = mask.nonzero().flatten(), offsets(lengths)
    first = torch.cat([places, lengths.sum()[None]])[torch.searchsorted(places, starts)]
    return torch.minimum(first - starts, lengths)


def balanced_partition(costs: list[int], num_parts: int) -> list[list[int]]:
    """Rows 0..len(costs)-1 split into `num_parts` lists of nearly equal cost, each ascending.

    Longest-processing-time greedy: the costliest row left goes to the cheapest part (Graham 1969; at most 4/3 of the
    best makespan). Ties go to the lower index, so that every rank gets the same answer. With at least `num_parts` rows
    no part is empty.
    """
    heap = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # of equal ones the lower index first
        load, part = heap[0]
        parts[part].append(row)
        heapq.heapreplace(heap, (load + max(costs[row], 1), part))
    return [sorted(part) for part in parts]
