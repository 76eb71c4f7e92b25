"""Packed batches: flat token tensors and sequence lengths. No padding, no optional fields.

Shape legend, for the whole project:
    N  sequences of a batch            (N,) tensors have one entry a sequence
    T  tokens of all its sequences     (T,) tensors have one entry a token, sequence after sequence
    R  response tokens, R <= T
A (T,) tensor is aligned with input_ids: entry t belongs to token t. log_probs[t] is the log-prob of token t given what
precedes it, values[t] the value of the state before token t, rewards[t] what choosing token t earned. Outside the
response they are zero. In a sequence the response is the run of tokens after the prompt, up to the end.

Every rank holds the same global batch; which replica computes which rows is a pure function of it.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one iteration. `columns` are the data file's other columns, one entry a prompt."""

    input_ids: Tensor  # (T,) int64
    lengths: Tensor  # (N,) int64
    texts: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.lengths)

    def token_lists(self) -> list[list[int]]:
        return [ids.tolist() for ids in self.input_ids.split(self.lengths.tolist())]


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts with their responses, as the engine made them. Row i answers prompt prompt_indices[i]."""

    input_ids: Tensor  # (T,) int64
    lengths: Tensor  # (N,) int64
    prompt_lengths: Tensor  # (N,) int64
    prompt_indices: Tensor  # (N,) int64
    truncated: Tensor  # (N,) bool: cut at the length limit
    response_mask: Tensor  # (T,) bool
    rollout_log_probs: Tensor  # (T,) float32

    def __post_init__(self) -> None:
        check_packed(self)

    def __len__(self) -> int:
        return len(self.lengths)

    def response_token_lists(self, rows: list[int]) -> list[list[int]]:
        """All that follows the prompt, of some rows: what the policy wrote and what was written in between."""
        starts = (offsets(self.lengths) + self.prompt_lengths).tolist()
        ends = self.lengths.cumsum(0).tolist()
        return [self.input_ids[starts[row] : ends[row]].tolist() for row in rows]

    def select(self, rows: Tensor) -> Self:
        """The batch of these rows (int64), in this order."""
        tokens = token_index(self.lengths, rows)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**{name: x[tokens if name not in SEQUENCE_LEVEL else rows] for name, x in fields.items()})


@dataclass(frozen=True)
class TrainBatch(RolloutBatch):
    """Everything PPO needs to update the actor and the critic."""

    log_probs: Tensor  # (T,)
    ref_log_probs: Tensor  # (T,)
    values: Tensor  # (T,)
    scores: Tensor  # (N,)
    rewards: Tensor  # (T,)
    advantages: Tensor  # (T,)
    returns: Tensor  # (T,)

    def mini_batches(self, size: int, generator: torch.Generator) -> Iterator["TrainBatch"]:
        """Disjoint mini-batches of `size` sequences in a random order drawn from `generator`."""
        order = torch.randperm(len(self), generator=generator)
        for rows in order.split(size):
            yield self.select(rows)


SEQUENCE_LEVEL = frozenset({"lengths", "prompt_lengths", "prompt_indices", "truncated", "scores"})


def check_packed(batch: RolloutBatch) -> None:
    """Assert that every tensor of a batch has the length that its kind asks for."""
    num_tokens = int(batch.lengths.sum())
    for field in dataclasses.fields(batch):
        expected = len(batch.lengths) if field.name in SEQUENCE_LEVEL else num_tokens
        found = tuple(getattr(batch, field.name).shape)
        assert found == (expected,), f"{type(batch).__name__}.{field.name}: shape {found}, expected ({expected},)"


def offsets(lengths: Tensor) -> Tensor:
    """Where each sequence starts: (N,) int64."""
    return lengths.cumsum(0) - lengths


def token_index(lengths: Tensor, rows: Tensor) -> Tensor:
    """Flat positions of the tokens of `rows`, row after row: int64."""
    wanted = lengths[rows]
    within = torch.arange(int(wanted.sum()), device=lengths.device) - offsets(wanted).repeat_interleave(wanted)
    return offsets(lengths)[rows].repeat_interleave(wanted) + within


def response_mask(lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
    """(T,) bool: True from the first token after the prompt."""
    position = torch.arange(int(lengths.sum()), device=lengths.device) - offsets(lengths).repeat_interleave(lengths)
    return position >= prompt_lengths.repeat_interleave(lengths)


def balanced_partition(costs: list[int], num_parts: int) -> list[list[int]]:
    """Rows 0..len(costs)-1 split into `num_parts` lists of nearly equal cost, each ascending.

    Longest-processing-time greedy: the costliest row left goes to the cheapest part (Graham 1969; at most 4/3 of the
    best makespan). Ties go to the lower index, so that every rank gets the same answer. With at least `num_parts` rows
    no part is empty.
    """
    heap = [(0, part) for part in range(num_parts)]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, part = heapq.heappop(heap)
        parts[part].append(row)
        heapq.heappush(heap, (load + max(costs[row], 1), part))
    return [sorted(part) for part in parts]


def micro_batch_rows(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    """Cut `rows` into the fewest runs by length order whose tokens stay within `max_tokens`.

    Rows of one length end up side by side, so that attention can run them as one batch. A row longer than the budget
    is an error of the caller.
    """
    groups: list[list[int]] = []
    room = 0
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        assert lengths[row] <= max_tokens, f"row {row} has {lengths[row]} tokens, the budget is {max_tokens}"
        if lengths[row] > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(row)
        room -= lengths[row]
    return groups
