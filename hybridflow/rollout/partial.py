"""Partial rollouts: rows that have not ended when enough groups are whole go on later, with new weights.

    under_way = UnderWay(groups)                               # the same on all ranks
    work = under_way.work(num_replicas, iteration, ...)        # pure: who generates what, and until when
    own = replica_rows(engine, params, requests, work[replica])    # until enough groups are whole
    under_way.add(under_way.gathered(own, exchange), version)  # what all replicas add
    groups = under_way.take(number)                            # whole ones, the first in the order of the draw

A group is all responses to a prompt. A replica stops at the first engine step at which its share of groups is whole,
among them those that a later iteration could not train on any more (`max_staleness`). The stop is a matter of counts:
no clock says what is trained on. Nothing is discarded, since what is discarded is mostly long.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch, balanced_partition
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.config.sampling import SamplingConfig
from hybridflow.models.routing import as_record
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import preserved_random_state
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.generation import PROMPT_TOKENS_A_STEP, joined_rollout
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing_records import EXPERTS
from hybridflow.rollout.row import OF_TOKENS, RUNNING, RolloutRow, gathered, rows_of, tensors_of
from hybridflow.rollout.turns import NewRow, RowKey, episodes_of

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import SamplingParams

Place = tuple[int, int]  # of a row: its group's place, and the sample
Rows = Mapping[Place, RolloutRow]


@dataclass
class PartialGroup:
    """The responses to a prompt. number: of the prompt in the data set; position: in the run, for seeds.

    iteration: in which the group was admitted. replica: that has the rows' environments; None: any may go on.
    """

    number: int
    position: int
    iteration: int
    prompt: list[int]
    rows: list[RolloutRow]
    replica: int | None = None

    @property
    def is_whole(self) -> bool:
        return all(row.state != RUNNING for row in self.rows)


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

    def requests(self, groups: Sequence[int], run_seed: int, sampling: SamplingConfig) -> dict[Place, Request]:
        """Of the rows that have not ended, by group and sample."""
        found = {}
        for place in groups:
            group = self.groups[place]
            for sample, row in enumerate(group.rows):
                if row.state == RUNNING:
                    again = (0, row.calls) if row.calls else ()
                    seed = request_seed(run_seed, group.iteration, group.position, sample, *again)
                    bucket = sampling.buckets.for_length(len(group.prompt))
                    found[place, sample] = Request(group.prompt + row.token_ids, seed, bucket, len(row.token_ids))
        return found

    def new_rows(
        self,
        requests: Mapping[Place, Request],
        begun: Set[RowKey],
        prompts: Mapping[int, PromptBatch],
        *,
        limits: LengthBuckets[int],
        run_seed: int,
    ) -> dict[RowKey, NewRow]:
        """Of the requests those of rows that an environment has not begun. prompts: by position in the run."""
        new = {}
        for (place, sample), request in requests.items():
            group = self.groups[place]
            if (group.position, sample) not in begun:
                names = (run_seed, group.iteration, 0, group.position)
                [episode] = episodes_of(prompts[group.position], limits, names)
                new[group.position, sample] = NewRow(request, episode, group.position * len(group.rows) + sample)
        return new

    def gathered(self, own: Rows, exchange: Exchange, num_rewards: int = 0) -> dict[Place, RolloutRow]:
        """What all replicas add: collective. own: what this rank contributes; of a replica one rank does so.

        num_rewards: parts of the reward that an environment gives; 0: there is none.
        """
        places = [(place, sample) for place, group in enumerate(self.groups) for sample in range(len(group.rows))]
        numbers = {place: number for number, place in enumerate(places)}
        known = {numbers[place]: row for place, row in own.items()}
        names = OF_TOKENS if num_rewards else OF_TOKENS[:2]
        whole = rows_of(gathered(known, len(places), exchange, num_rewards=num_rewards, names=names))
        return {place: row for place, row in zip(places, whole, strict=True) if row.calls}

    def record(self, added: Rows, own: Rows, work: Sequence[ReplicaWork]) -> None:
        """Each of these rows gets the piece of the engine's experts that every rank knows of. Local.

        own: what this rank's replica adds, with the experts that this rank has recorded. work: of each replica.
        """
        made_by = {place: replica for replica, part in enumerate(work) for place in part.groups}
        for (place, sample), more in added.items():
            group, row = self.groups[place], self.groups[place].rows[sample]
            if more.token_ids:
                before = len(group.prompt) + len(row.token_ids)
                number = before + len(more.token_ids) - 1 - (before - 1 if row.token_ids else 0)
                experts = own[place, sample].experts if (place, sample) in own else None
                more.pieces = [RecordedPiece(made_by[place], number, experts)]

    def add(self, added: Rows, version: int) -> None:
        """To rows by group and sample. version: of the actor that chose tokens without a version."""
        for (place, sample), more in added.items():
            more.versions = more.versions or [version] * len(more.token_ids)
            self.groups[place].rows[sample].take(more)

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
        of_groups = [[g.number, g.position, g.iteration, len(g.prompt), len(g.rows)] for g in self.groups]
        of_rows = tensors_of(rows, max((len(row.rewards) for row in rows), default=0))
        return {
            "groups": torch.tensor(of_groups, dtype=torch.int64).view(-1, 5),
            "prompt_ids": torch.tensor([i for group in self.groups for i in group.prompt], dtype=torch.int64),
            **{name: each.long() if each.dtype == torch.int32 else each for name, each in of_rows.items()},
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
        groups, rows = tensors["groups"].tolist(), iter(rows_of(tensors))
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
    counts = torch.tensor([len(group.rows) for group in groups], dtype=torch.int64)
    return joined_rollout(prompts, counts, tensors_of(rows, len(rows[0].rewards)))


def replica_rows(
    engine: RolloutEngine,
    params: "Sequence[SamplingParams]",
    requests: Mapping[Place, Request],
    work: ReplicaWork,
) -> dict[Place, RolloutRow]:
    """What the replica adds to rows until enough groups are whole. params: by bucket."""
    names = {
        row: engine.add("{}.{}".format(*row), request, params[request.bucket], max_tokens=None)
        for row, request in requests.items()
    }
    left, whole = Counter(place for place, _ in requests), set[int]()
    found: dict[Place, RolloutRow] = {}
    with preserved_random_state():
        while engine.is_busy and not (len(whole) >= work.number and work.urgent <= whole):
            for output in engine.step():
                place, sample = map(int, output.request_id.split("."))
                row = place, sample
                more = engine.response(output.outputs[0], len(requests[row].prompt), names[row])
                found[row] = replace(more, experts=_new_experts(more, requests[row]))
                left[place] -= 1
                if not left[place]:
                    whole.add(place)
        for name, part in engine.abort_all():
            place, sample = map(int, name.split("."))
            found[place, sample] = replace(part, experts=_new_experts(part, requests[place, sample]))
    engine.wait_until_idle()
    return found


def _new_experts(more: RolloutRow, request: Request) -> Tensor | None:
    """Of the tokens that the engine has read again nothing counts but the last one's experts, which had none before."""
    if more.experts is None or not more.token_ids:
        return None
    before = len(request.prompt) - 1 if request.num_before else 0
    return more.experts[before:].clone() if before else more.experts  # what was read again does not stay
