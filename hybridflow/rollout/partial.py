"""Partial rollouts: rows that have not ended when enough groups are whole go on later, with new weights.

    under_way = UnderWay(groups)                               # the same on all ranks
    work = under_way.work(num_replicas, iteration, ...)        # pure: who generates what, and until when
    under_way.add(segments, version)                           # of all replicas, see `rollout.segments`
    groups = under_way.take(number)                            # whole ones, the first in the order of the draw

A group is all responses to a prompt. A replica stops at the first engine step at which its share of groups is whole,
among them those that a later iteration could not train on any more (`max_staleness`). The stop is a matter of counts:
no clock says what is trained on. Nothing is discarded, since what is discarded is mostly long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch, balanced_partition
from hybridflow.config.sampling import SamplingConfig
from hybridflow.models.routing import as_record
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request
from hybridflow.rollout.generation import PROMPT_TOKENS_A_STEP, SAMPLED, flat, joined_rollout
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing_records import EXPERTS

RUNNING, ENDED, CUT = 0, 1, 2  # of a row


@dataclass
class PartialRow:
    """A response as far as it is there. segments: calls of the engine that it has taken part in."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the actor, one a token
    segments: int = 0
    state: int = RUNNING
    flags: list[int] = field(default_factory=list)  # one a token, as `generation.response_flags` has them
    rewards: list[float] = field(default_factory=list)  # of an environment
    pieces: list[RecordedPiece] = field(default_factory=list, compare=False)  # experts of all tokens but the last


@dataclass
class PartialGroup:
    """The responses to a prompt. number: of the prompt in the data set; position: in the run, for seeds.

    iteration: in which the group was admitted. replica: that has the rows' environments; None: any may go on.
    """

    number: int
    position: int
    iteration: int
    prompt: list[int]
    rows: list[PartialRow]
    replica: int | None = None

    @property
    def is_whole(self) -> bool:
        return all(row.state != RUNNING for row in self.rows)


@dataclass(frozen=True)
class Segment:
    """What one call of the engine adds to a row. flags: none where all tokens are sampled.

    experts: (tokens, layers, k) of the tokens that the row has no experts of yet, on ranks that have recorded them.
    piece: the same with what all ranks know of it; None: nothing is recorded.
    versions: none where all are of the present actor. Of a row with an environment it is the whole response.
    """

    token_ids: list[int]
    log_probs: list[float]
    state: int
    flags: Sequence[int] = ()
    versions: Sequence[int] = ()
    rewards: Sequence[float] = ()
    experts: Tensor | None = None
    piece: RecordedPiece | None = None


@dataclass(frozen=True)
class ReplicaWork:
    """groups: those that the replica goes on with, by their places. number: that must be whole before it stops.

    urgent: those that must be among them.
    """

    groups: tuple[int, ...]
    number: int
    urgent: frozenset[int]


class UnderWay:
    """Groups in the order of the draw, alike on all ranks."""

    def __init__(self, groups: Sequence[PartialGroup] = ()) -> None:
        self.groups = list(groups)

    def work(
        self,
        num_replicas: int,
        *,
        wanted: int,
        iteration: int,
        max_staleness: int,
        sampling: SamplingConfig,
        stays: bool = False,
    ) -> list[ReplicaWork]:
        """What each replica does so that `wanted` groups are whole: nearly equal costs, by the tokens that may come.

        stays: a group stays with the replica that it has begun on.
        """
        open_groups = [place for place, group in enumerate(self.groups) if not group.is_whole]
        urgent = set(range(self._num_urgent(wanted, iteration, max_staleness)))
        costs = [self._cost(self.groups[place], sampling) for place in open_groups]
        if stays:
            self._assign(dict(zip(open_groups, costs, strict=True)), num_replicas)
            dealt = [[i for i in open_groups if self.groups[i].replica == replica] for replica in range(num_replicas)]
        else:
            dealt = [[open_groups[i] for i in part] for part in balanced_partition(costs, num_replicas)]
        missing = wanted - (len(self.groups) - len(open_groups))
        shares = _shares(missing, [len(part) for part in dealt])
        return [
            ReplicaWork(tuple(part), max(share, len(urgent & set(part))), frozenset(urgent & set(part)))
            for part, share in zip(dealt, shares, strict=True)
        ]

    def _num_urgent(self, wanted: int, iteration: int, max_staleness: int) -> int:
        """How many of the first groups must be whole now, so that each later iteration has room for what is due then.

        A group that iteration a admitted has tokens of version a - 1, and iteration a - 1 + max_staleness + 1 is the
        last that may train on them.
        """
        last = [group.iteration + max_staleness for group in self.groups]
        horizons = range(max_staleness + 1)
        return max(0, *(sum(x <= iteration + ahead for x in last) - ahead * wanted for ahead in horizons))

    def _assign(self, costs: Mapping[int, int], num_replicas: int) -> None:
        """New groups to the replicas that have least, in the order of the draw. costs: by place."""
        loads = [0] * num_replicas
        for place in sorted(costs, key=lambda place: self.groups[place].replica is None):
            group = self.groups[place]
            group.replica = loads.index(min(loads)) if group.replica is None else group.replica
            loads[group.replica] += costs[place]

    def _cost(self, group: PartialGroup, sampling: SamplingConfig) -> int:
        limit = sampling.limits.for_length(len(group.prompt))
        steps = sum(limit - len(row.token_ids) for row in group.rows if row.state == RUNNING)
        return len(group.prompt) + PROMPT_TOKENS_A_STEP * steps

    def requests(
        self, groups: Sequence[int], run_seed: int, sampling: SamplingConfig
    ) -> dict[tuple[int, int], Request]:
        """Of the rows that have not ended, by group and sample."""
        found = {}
        for place in groups:
            group = self.groups[place]
            for sample, row in enumerate(group.rows):
                if row.state == RUNNING:
                    again = (0, row.segments) if row.segments else ()
                    seed = request_seed(run_seed, group.iteration, group.position, sample, *again)
                    bucket = sampling.buckets.for_length(len(group.prompt))
                    found[place, sample] = Request(group.prompt + row.token_ids, seed, bucket, len(row.token_ids))
        return found

    def add(self, segments: Mapping[tuple[int, int], Segment], version: int) -> None:
        """To rows by group and sample. version: of the actor that chose the tokens."""
        for (place, sample), segment in segments.items():
            row = self.groups[place].rows[sample]
            row.token_ids += segment.token_ids
            row.log_probs += segment.log_probs
            row.versions += segment.versions or [version] * len(segment.token_ids)
            row.flags += segment.flags or [SAMPLED] * len(segment.token_ids)
            row.rewards += segment.rewards
            row.pieces += [] if segment.piece is None else [segment.piece]
            row.segments, row.state = row.segments + 1, segment.state

    def take(self, number: int) -> list[PartialGroup]:
        """The first whole groups, which are under way no longer."""
        taken = [group for group in self.groups if group.is_whole][:number]
        gone = set(map(id, taken))
        self.groups = [group for group in self.groups if id(group) not in gone]
        return taken

    # ---- as tensors

    def tensors(self) -> dict[str, Tensor]:
        """For a file: int64 of groups, rows and tokens; float32 of log-probs and rewards. Prompts are tokens, too.

        Without the engine's experts, see `pieces`.
        """
        rows = [row for group in self.groups for row in group.rows]
        nothing = [math.nan] * max((len(row.rewards) for row in rows), default=0)
        of_groups = [[g.number, g.position, g.iteration, len(g.prompt), len(g.rows)] for g in self.groups]
        return {
            "groups": torch.tensor(of_groups, dtype=torch.int64).view(-1, 5),
            "prompt_ids": torch.tensor([i for group in self.groups for i in group.prompt], dtype=torch.int64),
            "rows": torch.tensor(
                [[len(row.token_ids), row.segments, row.state] for row in rows], dtype=torch.int64
            ).view(-1, 3),
            "token_ids": torch.tensor([i for row in rows for i in row.token_ids], dtype=torch.int64),
            "log_probs": torch.tensor([x for row in rows for x in row.log_probs], dtype=torch.float32),
            "versions": torch.tensor([v for row in rows for v in row.versions], dtype=torch.int64),
            "flags": torch.tensor([flag for row in rows for flag in row.flags], dtype=torch.uint8),
            "rewards": torch.tensor([row.rewards or nothing for row in rows], dtype=torch.float32),
        }

    def pieces(self) -> list[list[RecordedPiece]]:
        """Of the engine's experts, by row."""
        return [list(row.pieces) for group in self.groups for row in group.rows]

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, Tensor], *, num_replicas: int = 1, recorder: int | None = 0
    ) -> "UnderWay":
        """What `tensors` gave, and the experts of a file. Rows take turns as to which engine replica has their experts.

        recorder: of which replica this rank records experts; None: of none.
        """
        groups, sizes = tensors["groups"].tolist(), tensors["rows"].tolist()
        counts = [count for count, _, _ in sizes]
        names = ("token_ids", "log_probs", "versions", "flags")
        parts = zip(*(tensors[name].split(counts) for name in names), strict=True)
        rows = iter(
            PartialRow(
                **{name: values.tolist() for name, values in zip(names, part, strict=True)},
                segments=segments,
                state=state,
                rewards=rewards if segments else [],
            )
            for (_, segments, state), part, rewards in zip(sizes, parts, tensors["rewards"].tolist(), strict=True)
        )
        prompts = tensors["prompt_ids"].split([group[3] for group in groups])
        found = cls(
            [
                PartialGroup(number, position, iteration, ids.tolist(), [next(rows) for _ in range(num_rows)])
                for (number, position, iteration, _, num_rows), ids in zip(groups, prompts, strict=True)
            ]
        )
        if EXPERTS in tensors:
            spoken = [(group, row) for group in found.groups for row in group.rows if row.token_ids]
            lengths = [len(group.prompt) + len(row.token_ids) - 1 for group, row in spoken]
            for number, ((_, row), experts) in enumerate(zip(spoken, tensors[EXPERTS].split(lengths), strict=True)):
                made_by = number % num_replicas
                own = as_record(experts).clone() if made_by == recorder else None  # the file's tensor does not stay
                row.pieces = [RecordedPiece(made_by, len(experts), own)]
        return found


def _shares(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` in proportion to the sizes, in whole numbers: by largest remainder, ties to the first."""
    whole = max(sum(sizes), 1)
    shares = [total * size // whole for size in sizes]
    rest = sorted(range(len(sizes)), key=lambda i: -(total * sizes[i] % whole))
    for i in rest[: total - sum(shares)]:
        shares[i] += 1
    return shares


def pieces_of_groups(groups: Sequence[PartialGroup]) -> list[list[RecordedPiece]]:
    """Of the rollout of these groups, by row. A row's last token is in its last piece, which has no experts of it."""
    rows = [row.pieces for group in groups for row in group.rows]
    return [[*pieces[:-1], replace(pieces[-1], num_tokens=pieces[-1].num_tokens + 1)] for pieces in rows]


def rollout_of_groups(groups: Sequence[PartialGroup], prompts: PromptBatch) -> RolloutBatch:
    """Whole groups as a rollout. prompts: of the groups, in their order."""
    rows = [row for group in groups for row in group.rows]
    rollout = joined_rollout(
        prompts,
        torch.tensor([len(group.rows) for group in groups], dtype=torch.int64),
        torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64),
        torch.tensor([row.state == CUT for row in rows], dtype=torch.bool),
        token_ids=flat("i", (row.token_ids for row in rows)),
        log_probs=flat("f", (row.log_probs for row in rows)),
        flags=flat("i", (row.flags for row in rows)),
        versions=flat("i", (row.versions for row in rows)),
    )
    rewards = torch.tensor([row.rewards for row in rows], dtype=torch.float32)
    return replace(rollout, environment_rewards=rewards) if rewards.numel() else rollout
