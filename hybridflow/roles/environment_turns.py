"""How the rows of a rollout go on where an environment answers them: what the engine asks of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.rollout.engine import Request, Response, RolloutEngine
from hybridflow.rollout.generation import response_flags
from hybridflow.rollout.open_rows import NewRow, OpenRows, RowKey
from hybridflow.rollout.partial import CUT, ENDED, ReplicaWork, Segment, UnderWay
from hybridflow.rollout.turns import Answers, LeaderBroadcast, TurnCounts, TurnTaking, episodes_of

NO_PROMPTS = PromptBatch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (), {})


class EnvironmentRows(Protocol):
    """Who makes the answers to a rollout's rows. counts: of this rank. num_rewards: parts that a row is given.

    several: a row may have several sequences.
    """

    @property
    def counts(self) -> TurnCounts: ...

    @property
    def num_rewards(self) -> int: ...

    @property
    def several(self) -> bool: ...

    def conversations(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> Answers: ...


@dataclass
class EnvironmentTurns:
    """leads: this rank is the first of an engine replica, and therefore asks for the turns.

    open_rows: of partial rollouts, once there are any.
    """

    environments: EnvironmentRows
    agreement: LeaderBroadcast
    leads: bool
    open_rows: OpenRows | None = field(default=None, init=False)

    def begin(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> TurnTaking:
        """Open the turns of the next rollout."""
        begin = self.environments.conversations
        answers = self.agreement.attempt(begin, prompts, counts, limits, seed) if self.leads else None
        return TurnTaking(self.agreement, answers, self.environments.counts, self.environments.several)

    def new_rows(
        self,
        under_way: UnderWay,
        requests: Mapping[tuple[int, int], Request],
        prompts: Mapping[int, PromptBatch],
        limits: LengthBuckets[int],
        run_seed: int,
    ) -> dict[RowKey, NewRow]:
        """Of the requests, by place and sample, those of rows that have not begun. prompts: by position in the run."""
        new = {}
        for (place, sample), request in requests.items():
            group = under_way.groups[place]
            if self.open_rows is None or (group.position, sample) not in self.open_rows:
                names = (run_seed, group.iteration, 0, group.position)
                [episode] = episodes_of(prompts[group.position], limits, names)
                name = group.position * len(group.rows) + sample
                new[group.position, sample] = NewRow(request, episode, name)
        return new

    def segments(
        self,
        engine: RolloutEngine,
        params: Sequence[Any],
        under_way: UnderWay,
        part: ReplicaWork,
        new: Mapping[RowKey, NewRow],
        *,
        version: int,
    ) -> dict[tuple[int, int], Segment]:
        """Whole rows that the replica has ended, by place and sample. Others stay here, with who answers them.

        params: vLLM's, by bucket. new: rows that begin.
        """
        if self.open_rows is None:
            turns = self.begin(NO_PROMPTS, NO_PROMPTS.lengths, always(0), ())
            self.open_rows = OpenRows(turns, engine.most_rows)
        positions = {place: under_way.groups[place].position for place in part.groups}
        urgent = {positions[place] for place in part.urgent}
        ended = self.open_rows.ended(engine, params, new, number=part.number, urgent=urgent, version=version)
        places = {position: place for place, position in positions.items()}
        return {(places[position], sample): _segment(response) for (position, sample), response in ended.items()}

    @property
    def num_open_tokens(self) -> int:
        """Of rows under way in the replica that this rank leads."""
        return self.open_rows.num_tokens if self.open_rows is not None and self.leads else 0

    def end_rows(self) -> None:
        """Rows under way do not go on."""
        if self.open_rows is not None:
            self.open_rows.abandon()


def _segment(response: Response) -> Segment:
    return Segment(
        response.token_ids,
        response.log_probs,
        CUT if response.truncated else ENDED,
        flags=list(response_flags(response)),
        versions=response.versions,
        rewards=response.rewards,
    )
