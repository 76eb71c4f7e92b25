"""Partial rollouts: an iteration trains on the groups that are whole first; other rows go on in the next iteration.

    iteration k:   draw prompts | sync weights | generate until `prompts_per_iteration` groups are whole | flow on them

Rows under way keep their tokens and are read again with the new weights (`rollout.partial`). On shared ranks models
and engine take turns as in a synchronous run; what an iteration need not wait for is the longest responses.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.errors import FlowError
from hybridflow.flows.draws import PromptDraw, PromptDraws
from hybridflow.flows.generation import SAMPLED, DeferredRows, Generation, Greedy, Sampled
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.generator import Generator
from hybridflow.rollout.generation import check_rows
from hybridflow.rollout.partial import RUNNING, PartialGroup, PartialRow, UnderWay, pieces_of_groups, rollout_of_groups
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing_records import EXPERTS, RoutingRecords

CACHE = "kv_cache_bytes"
_Kept = tuple[dict[str, Tensor], list[list[RecordedPiece]]]  # tensors of a file, and the engine's experts of each row
ONE_ROLLOUT = "rollout.partial: prompts are answered when their groups are whole, so that the flow may ask for"


class PartialGeneration(Generation):
    """Draws the prompts, too: as many as bring the groups under way to `oversample` times the iteration's.

    under_way: tensors of a checkpoint; None: no group is under way.
    """

    generator: Generator

    def __init__(
        self,
        generator: Generator,
        *given: Any,
        config: ExperimentConfig,
        draws: PromptDraws,
        under_way: dict[str, Tensor] | None,
        **named: Any,
    ) -> None:
        super().__init__(generator, *given, **named)
        assert config.rollout.partial is not None, "partial rollouts"
        self.draws, self._data, self._config = self, draws, config
        self._wanted = config.data.prompts_per_iteration
        self._most = ceil(config.rollout.partial.oversample * self._wanted)
        self._under_way = UnderWay()
        if under_way is not None:
            replicas = len(generator.layout.replicas)
            self._under_way = UnderWay.of_tensors(under_way, num_replicas=replicas, recorder=generator.recorder)
        self._before = self._kept_now()  # of the iteration
        self._iteration = self._open_tokens = 0
        self._prompts: dict[int, PromptBatch] = {}  # of groups under way, by position in the run
        self._bytes_before = None if under_way is None else int(under_way[CACHE])

    # ---- prompts

    def draw(self, position: int) -> PromptDraw:
        """See `Draws`: those that are admitted next."""
        draw = self._data.draw(position, self._most - len(self._under_way.groups))
        samples = self._sampling.samples.for_lengths(draw.batch.lengths.tolist())
        for place, (number, ids) in enumerate(zip(draw.numbers, draw.batch.token_lists(), strict=True)):
            rows = [PartialRow() for _ in range(samples[place])]
            self._under_way.groups.append(PartialGroup(number, draw.first + place, self._iteration, ids, rows))
            self._prompts[draw.first + place] = draw.batch.select([place])
        return draw

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Draws`."""
        return self._data.at(numbers)

    # ---- an iteration

    def begin(self, iteration: int, num_iterations: int) -> None:
        """See `Generation`."""
        super().begin(iteration, num_iterations)
        self._iteration, self._before = iteration, self._kept_now()

    def responses(
        self, kinds: Sequence[Sampled | Greedy], prompts: PromptBatch, iteration: int, deferred: DeferredRows
    ) -> tuple[RolloutBatch, ...]:
        """The groups that are whole first: `taken` has their prompts. Errors: FlowError."""
        if list(kinds) != [SAMPLED] or self._num_sampled:
            raise FlowError(f"{ONE_ROLLOUT} one sampled rollout after each draw, and nothing else")
        self._read_again()
        before = self._num_tokens()
        with self.engine_awake(), self._watch.phase("generate"):
            self._open_tokens = self.generator.generate_partly(
                self._under_way,
                self._prompts,
                wanted=self._wanted,
                iteration=iteration,
                max_staleness=self._config.rollout.max_staleness,
            )
        self.num_generated += self._num_tokens() - before
        groups = self._under_way.take(self._wanted)
        self._num_sampled = 1
        prompts = PromptBatch.joined([self._prompts.pop(group.position) for group in groups])
        self.taken = tuple(group.number for group in groups), prompts
        rollout = rollout_of_groups(groups, prompts)
        if self._records is not None:
            recorded = self.generator.recorded(pieces_of_groups(groups))
            rollout = self._records.keep(rollout, recorded, iteration)
        check_rows(rollout)
        self._begin_scoring(prompts, deferred, generates=False)
        self.scoring.assign_rest(rollout)
        return (rollout,)

    def _read_again(self) -> None:
        """The prompts of groups that a checkpoint has. Collective over the world where an environment begins rows."""
        unread = [group for group in self._under_way.groups if group.position not in self._prompts]
        if not unread:
            return
        prompts = self.at([group.number for group in unread])
        self._prompts |= {group.position: prompts.select([place]) for place, group in enumerate(unread)}

    # ---- what is kept

    def completed(self, state: RunState) -> RunState:
        """The state of a checkpoint: with the groups that are under way. Collective over the world."""
        return state if state.under_way is not None else replace(state, under_way=self._of_file(*self._kept_now()))

    def _kept_now(self) -> _Kept:
        tensors = self._under_way.tensors() | {CACHE: torch.tensor(self.generator.kv_cache.whole)}
        return tensors, self._under_way.pieces()

    def _of_file(self, tensors: dict[str, Tensor], pieces: list[list[RecordedPiece]]) -> dict[str, Tensor]:
        """With the engine's experts on rank 0, which writes files. Collective over the world."""
        experts = None if self._records is None else self._records.of_file(self.generator.recorded(pieces))
        return tensors if experts is None or not len(experts) else tensors | {EXPERTS: experts}

    @property
    def _records(self) -> RoutingRecords | None:
        return None if self._roles.actor is None else self._roles.actor.records

    def notes(self) -> list[str]:
        """What the user should know of a start that goes on with rows under way."""
        now, lines = self.generator.kv_cache.whole, []
        begun_again = sum(row.state == RUNNING for group in self._under_way.groups for row in group.rows)
        if begun_again and self._config.data.environment is not None:
            lines.append(
                f"rollout.partial: {begun_again} rows had not ended when the run was interrupted. Their environments "
                "ended with the run: these rows start again from their prompts"
            )
        if self._bytes_before in (None, now):
            return lines
        return lines + [
            f"rollout.partial: the KV cache has {now:,} bytes a rank, and had {self._bytes_before:,} before. Where "
            "rows wait for blocks, other groups may be whole first than in a run that was not interrupted. "
            "rollout.kv_cache_gib fixes the size"
        ]

    def kept(self, before: RunState, *, failed: bool = False) -> RunState:
        """The state before an iteration that ends early: its rollout is made again, of the same rows.

        Collective over the world.
        """
        return replace(before, under_way=self._of_file(*self._before))

    def metrics(self, batch: RolloutBatch, of_trainers: object, num_trainers: int) -> Metrics:
        """See `Generation`."""
        return {
            "rollout/groups_under_way": float(len(self._under_way.groups)),
            "rollout/tokens_under_way": float(self._num_tokens()),
        }

    def _num_tokens(self) -> int:
        """Of responses under way, with those of an environment."""
        return sum(len(row.token_ids) for group in self._under_way.groups for row in group.rows) + self._open_tokens

    def end(self, *, saved: bool | None) -> None:
        """See `Generation`."""
        if self.generator.turns is not None:
            self.generator.turns.end_rows()
