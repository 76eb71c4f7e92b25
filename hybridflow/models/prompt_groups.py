"""Which rows of a batch share a prompt, and how such groups are split over replicas and cut into micro-batches.

All but the last token of the prompt are run once for the rows of a group; the last one is run with every response,
whose first token it predicts, so that no output is wanted twice. Every function here is a pure function of the batch.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from hybridflow.batch import RolloutBatch, balanced_partition, offsets

# the least share of a group's tokens. On a CPU a second call of the attention kernel takes as long as fewer tokens do
# (tests.bench.shared_prompt: 5 M parameters, even at 0.1 with lengths of 4 to 64). On a GPU nobody has measured it:
# there it says that less than an eighth of the tokens is not worth two kernels for one
SAVED_TO_PAY = 0.125


@dataclass(frozen=True)
class PromptGroup:
    """Rows that begin with the same `shared` tokens, which are run once. One row by itself shares none."""

    rows: tuple[int, ...]
    shared: int = 0

    def tokens(self, lengths: Sequence[int]) -> int:
        """That are run, where row i alone would take lengths[i]."""
        if len(self.rows) == 1:
            return lengths[self.rows[0]]
        return self.shared + sum(lengths[row] - self.shared for row in self.rows)


def prompt_groups(batch: RolloutBatch, rows: Sequence[int]) -> list[PromptGroup]:
    """Those of `rows` that answer one prompt with equal tokens, where sharing pays; all others by themselves.

    In the order of their first rows.
    """
    keys, found = _keys(batch, rows), dict[Hashable, list[int]]()
    if keys is None:
        return [PromptGroup((row,)) for row in sorted(rows)]
    for row, key in zip(rows, keys, strict=True):
        found.setdefault(key, []).append(row)
    lengths, prompt_lengths = batch.lengths.tolist(), batch.prompt_lengths.tolist()
    groups: list[PromptGroup] = []
    for members in found.values():
        groups += _where_it_pays(PromptGroup(tuple(members), prompt_lengths[members[0]] - 1), lengths)
    return sorted(groups, key=lambda group: group.rows)


def _keys(batch: RolloutBatch, rows: Sequence[int]) -> list[Hashable] | None:
    """Equal for rows that can share; None where no two rows have one prompt.

    A row without a response has no key but the row's own number.
    """
    some = torch.tensor(rows, dtype=torch.int64)
    indices: list[int] = batch.prompt_indices[some].tolist()
    if len(set(indices)) == len(rows):
        return None
    ids, starts = batch.input_ids.numpy(), offsets(batch.lengths)[some].tolist()
    sizes: list[int] = batch.prompt_lengths[some].tolist()
    answered = (batch.lengths > batch.prompt_lengths)[some].tolist()
    return [
        (index, ids[start : start + size].tobytes()) if answers else row
        for row, index, start, size, answers in zip(rows, indices, starts, sizes, answered, strict=True)
    ]


def _where_it_pays(group: PromptGroup, lengths: Sequence[int]) -> list[PromptGroup]:
    saved = (len(group.rows) - 1) * group.shared
    if saved and saved >= SAVED_TO_PAY * sum(lengths[row] for row in group.rows):
        return [group]
    return [PromptGroup((row,)) for row in group.rows]


def replica_rows(batch: RolloutBatch, num_replicas: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """The rows of each replica, each ascending, balanced by the tokens that are run. rows: these alone, ascending.

    Whole groups dealt out by `balanced_partition`, or, if that leaves the busiest replica less to run, groups in a row
    cut wherever a replica has a full share: with fewer prompts than replicas a whole group each would leave some idle.
    """
    lengths, groups = batch.lengths.tolist(), prompt_groups(batch, range(len(batch)) if rows is None else rows)
    costs = [group.tokens(lengths) for group in groups]
    whole = [[groups[i] for i in part] for part in balanced_partition(costs, num_replicas)]
    if num_replicas > 1 and any(group.shared for group in groups):
        whole = min(whole, _evenly_cut(groups, lengths, num_replicas), key=lambda parts: _busiest(parts, lengths))
    return [sorted(row for group in part for row in group.rows) for part in whole]


def rows_of_rank(
    batch: RolloutBatch, rows: Sequence[int], *, size: int, rank: int, budget: int
) -> tuple[list[int], list[int]]:
    """Of the rows of ranks that share tokens: those that this rank computes whole, and those that all of them share.

    A row that is no longer than a rank's part of the token budget is not cut: nothing has to travel for it.
    """
    lengths = batch.lengths.tolist()
    short = [row for row in sorted(rows) if fits_alone(lengths[row], budget // size)]
    whole = replica_rows(batch, size, short)[rank] if short else []
    return whole, sorted(set(rows) - set(short))


def fits_alone(length: int, limit: int) -> bool:
    """Whether one of the ranks that share tokens computes a row, with so many tokens at a time."""
    return length <= limit


def rows_that_stay(batch: RolloutBatch, num_replicas: int, epochs: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """The rows of each replica, each ascending, where a row has one replica in all mini-batches of all epochs.

    epochs: of each the rows of each mini-batch, int64. One mini-batch is dealt as `replica_rows` deals the batch, and
    those of one epoch as it deals each. With several epochs there are more ways: the rows of a prompt together, in
    halves, quarters, ... and alone, the costliest first, go to the replica that has least in their mini-batches. That
    way counts whose busiest replicas have least to run.
    """
    if num_replicas == 1 or not epochs or len(epochs[0]) == 1:
        return replica_rows(batch, num_replicas)
    first = [replica_rows(batch, num_replicas, rows.sort().values.tolist()) for rows in epochs[0]]
    ways = [[sorted(row for part in parts for row in part) for parts in zip(*first, strict=True)]]
    if len(epochs) > 1:
        lengths, of_rows = batch.lengths.tolist(), _mini_batches_of_rows(len(batch), epochs)
        groups = prompt_groups(batch, range(len(batch)))
        most = max(len(group.rows) for group in groups)
        for size in [-(-most >> halvings) for halvings in range(most.bit_length())]:
            units = [PromptGroup(rows, group.shared) for group in groups for rows in _pieces(group.rows, size)]
            ways.append(_dealt(units, lengths, of_rows, num_replicas))
        ways.sort(key=lambda parts: _most_tokens(groups, parts, lengths, of_rows))
    return ways[0]


def _pieces(rows: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _mini_batches_of_rows(num_rows: int, epochs: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Of each row its mini-batches, one an epoch; they are numbered through all epochs."""
    found, count = torch.zeros(len(epochs), num_rows, dtype=torch.int64), 0
    for epoch, mini_batches in enumerate(epochs):
        for number, rows in enumerate(mini_batches, start=count):
            found[epoch, rows] = number
        count += len(mini_batches)
    of_rows: list[list[int]] = found.T.tolist()
    return of_rows


def _dealt(
    units: Sequence[PromptGroup], lengths: Sequence[int], of_rows: Sequence[Sequence[int]], num_replicas: int
) -> list[list[int]]:
    """Each unit where it adds least to the sum of the squares of what replicas have in the mini-batches."""
    loads: dict[int, list[int]] = {}  # of a mini-batch, by replica
    parts: list[list[int]] = [[] for _ in range(num_replicas)]
    for unit in sorted(units, key=lambda unit: (-unit.tokens(lengths), unit.rows)):
        rows: dict[int, list[int]] = {}  # of the unit, by mini-batch
        for row in unit.rows:
            for number in of_rows[row]:
                rows.setdefault(number, []).append(row)
        costs = {number: PromptGroup(tuple(own), unit.shared).tokens(lengths) for number, own in rows.items()}
        own = [(cost, loads.setdefault(number, [0] * num_replicas)) for number, cost in costs.items()]
        replica = min(range(num_replicas), key=lambda i: sum(cost * load[i] for cost, load in own))
        for cost, load in own:
            load[replica] += cost
        parts[replica] += unit.rows
    return [sorted(part) for part in parts]


def _most_tokens(
    groups: Sequence[PromptGroup],
    parts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    of_rows: Sequence[Sequence[int]],
) -> int:
    """What the busiest replica of each mini-batch runs, of all mini-batches together."""
    owners = {row: replica for replica, part in enumerate(parts) for row in part}
    loads: dict[int, list[int]] = {}
    prompts = set[tuple[int, int, int]]()  # that a replica runs in a mini-batch
    for number, group in enumerate(groups):
        for row, mini_batch in [(i, mini_batch) for i in group.rows for mini_batch in of_rows[i]]:
            key = number, mini_batch, owners[row]
            load = loads.setdefault(mini_batch, [0] * len(parts))
            load[owners[row]] += lengths[row] - (group.shared if key in prompts else 0)
            prompts.add(key)
    return sum(map(max, loads.values()))


def _busiest(parts: list[list[PromptGroup]], lengths: Sequence[int]) -> int:
    return max(sum(group.tokens(lengths) for group in part) for part in parts)


def _evenly_cut(groups: list[PromptGroup], lengths: Sequence[int], num_parts: int) -> list[list[PromptGroup]]:
    """The groups in their order in `num_parts` parts, cut between any rows so that the largest is as small as can be.

    Found by halving: the least room into which they go one after another.
    """
    own = [lengths[row] for group in groups for row in group.rows]
    too_little, enough = max(own) - 1, sum(own)
    while enough - too_little > 1:
        room = (too_little + enough) // 2
        if len(_filled(groups, lengths, room)) <= num_parts:
            enough = room
        else:
            too_little = room
    parts = _filled(groups, lengths, enough)
    return parts + [[]] * (num_parts - len(parts))


def _filled(groups: list[PromptGroup], lengths: Sequence[int], room: int) -> list[list[PromptGroup]]:
    """Parts of at most `room` tokens, each filled up before the next begins, which a group may go on in."""
    parts: list[list[PromptGroup]] = [[]]
    left = room
    for group in groups:
        rows: list[int] = []
        for row in group.rows:
            tokens = lengths[row] - (group.shared if rows else 0)
            if tokens > left:
                parts[-1] += [PromptGroup(tuple(rows), group.shared)] if rows else []
                parts.append([])
                rows, left, tokens = [], room, lengths[row]
            rows.append(row)
            left -= tokens
        parts[-1].append(PromptGroup(tuple(rows), group.shared))
    return parts


def micro_batch_groups(groups: list[PromptGroup], lengths: Sequence[int], max_tokens: int) -> list[list[PromptGroup]]:
    """Cut groups into runs whose tokens stay within `max_tokens`: rows by themselves, longest first, then groups.

    Rows of one length end up side by side, and so do prompts of one length: attention runs them as one batch. A group
    that no micro-batch can hold is cut, and each part has a copy of the prompt. A row longer than the budget is
    an error of the caller.
    """
    units = [unit for group in _in_order(groups, lengths) for unit in _fitting(group, lengths, max_tokens)]
    micro_batches: list[list[PromptGroup]] = []
    room = 0
    for unit in units:
        tokens = unit.tokens(lengths)
        if tokens > room:
            micro_batches.append([])
            room = max_tokens
        micro_batches[-1].append(unit)
        room -= tokens
    return micro_batches


def _in_order(groups: list[PromptGroup], lengths: Sequence[int]) -> list[PromptGroup]:
    return sorted(groups, key=lambda group: (group.shared > 0, -group.shared, -group.tokens(lengths), group.rows))


def _fitting(group: PromptGroup, lengths: Sequence[int], max_tokens: int) -> list[PromptGroup]:
    """The group with the longest rows first, or parts of the group."""
    parts: list[list[int]] = []
    room = 0
    for row in sorted(group.rows, key=lambda row: (-lengths[row], row)):
        assert lengths[row] <= max_tokens, f"row {row} has {lengths[row]} tokens, the budget is {max_tokens}"
        if lengths[row] - group.shared > room:
            parts.append([])
            room = max_tokens - group.shared
        parts[-1].append(row)
        room -= lengths[row] - group.shared
    return [PromptGroup(tuple(rows), group.shared if len(rows) > 1 else 0) for rows in parts]
