"""Partial rollouts: an iteration trains on the groups that are whole first; other rows go on in the next iteration.

    iteration k:   draw prompts | sync weights | generate until `prompts_per_iteration` groups are whole | flow on them

Rows under way keep their tokens and are read again with the new weights (`rollout.partial`). On shared ranks models
and engine take turns as in a synchronous run; what an iteration need not wait for is the longest responses.
"""

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState, Tensors
from hybridflow.config import ExperimentConfig
from hybridflow.errors import FlowError
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.generation import (
    NO_IDS,
    SAMPLED,
    DeferredRows,
    Delivered,
    GenerationCosts,
    Kinds,
    Moment,
    Numbers,
    PromptDraw,
)
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.flows.synchronous import SharedEngine, costs_of, forget_measures
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.policy import Actor
from hybridflow.rollout.generation import check_rows
from hybridflow.rollout.partial import PartialGroup, UnderWay, pieces_of_groups, rollout_of_groups
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing_records import EXPERTS, RoutingRecords
from hybridflow.rollout.row import RUNNING, RolloutRow

UNDER_WAY = "under_way"  # in `RunState.kept`
CACHE = "kv_cache_bytes"
_Kept = tuple[dict[str, Tensor], list[list[RecordedPiece]]]  # tensors of a file, and the engine's experts of each row
ONE_ROLLOUT = "Set rollout.partial=null rollout.max_staleness=0 for this flow. Partial rollouts allow"


class Partial:
    """See `Source`. Draws as many prompts as bring the groups under way to `oversample` times the iteration's.

    kept: tensors of a checkpoint; None: no group is under way.
    """

    def __init__(
        self,
        engine: SharedEngine,
        scoring: OverlappedScoring,
        actor: Actor | None,
        config: ExperimentConfig,
        *,
        draws: PromptDraws,
        kept: Tensors | None,
        watch: Stopwatch,
    ) -> None:
        assert config.rollout.partial is not None, "partial rollouts"
        self.engine, self.scoring, self._actor, self._generator = engine, scoring, actor, engine.generator
        self._data, self._config, self._watch = draws, config, watch
        self._wanted = config.data.prompts_per_iteration
        self._most = ceil(config.rollout.partial.oversample * self._wanted)
        self._under_way = UnderWay()
        if kept is not None:
            replicas = len(self._generator.layout.replicas)
            recorder = None if self._records is None else self._records.recorder
            self._under_way = UnderWay.of_tensors(kept, num_replicas=replicas, recorder=recorder)
        self._before = self._kept_now()  # of the iteration
        self._iteration = self._open_tokens = self._num_generated = 0
        self._has_generated = False  # since the last draw
        self._prompts: dict[int, PromptBatch] = {}  # of groups under way, by position in the run
        self._bytes_before = None if kept is None else int(kept[CACHE])

    @property
    def models_in_place(self) -> bool:
        """See `Source`."""
        return self.engine.models_in_place

    # ---- prompts

    def draw(self, position: int) -> PromptDraw:
        """See `Source`: those that are admitted next."""
        self._has_generated = False
        draw = self._data.draw(position, self._most - len(self._under_way.groups))
        samples = self._config.sampling.samples.for_lengths(draw.batch.lengths.tolist())
        for place, (number, ids) in enumerate(zip(draw.numbers, draw.batch.token_lists(), strict=True)):
            rows = [RolloutRow() for _ in range(samples[place])]
            self._under_way.groups.append(PartialGroup(number, draw.first + place, self._iteration, ids, rows))
            self._prompts[draw.first + place] = draw.batch.select([place])
        return draw

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Source`."""
        return self._data.at(numbers)

    # ---- an iteration

    def begin(self, iteration: int, num_iterations: int) -> Tensor:
        """See `Source`."""
        forget_measures(self._generator)
        self._iteration, self._before, self._num_generated = iteration, self._kept_now(), 0
        return NO_IDS

    def responses(self, kinds: Kinds, numbers: Numbers, prompts: PromptBatch, deferred: DeferredRows) -> Delivered:
        """The groups that are whole first, with their prompts. Errors: FlowError."""
        if list(kinds) != [SAMPLED] or self._has_generated:
            raise FlowError(f"{ONE_ROLLOUT} one sampled rollout after each draw, and nothing else")
        self._read_again()
        before = self._num_tokens()
        with self.engine.awake(), self._watch.phase("generate"):
            self._open_tokens = self._generator.generate_partly(
                self._under_way,
                self._prompts,
                wanted=self._wanted,
                iteration=self._iteration,
                max_staleness=self._config.rollout.max_staleness,
            )
        self._num_generated += self._num_tokens() - before
        groups = self._under_way.take(self._wanted)
        self._has_generated = True
        prompts = PromptBatch.joined([self._prompts.pop(group.position) for group in groups])
        rollout = rollout_of_groups(groups, prompts)
        if self._records is not None:
            rollout = self._records.add(rollout, pieces_of_groups(groups), self._iteration)
        check_rows(rollout)
        self.scoring.begin(prompts, deferred)
        self.scoring.assign_rest(rollout)
        return Delivered(tuple(group.number for group in groups), prompts, (rollout,))

    def _read_again(self) -> None:
        """The prompts of groups that a checkpoint has. Collective over the world where an environment begins rows."""
        unread = [group for group in self._under_way.groups if group.position not in self._prompts]
        if not unread:
            return
        prompts = self.at([group.number for group in unread])
        self._prompts |= {group.position: prompts.select([place]) for place, group in enumerate(unread)}

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """See `Source`."""
        return self.engine.heldout_responses(sets())

    # ---- what is kept

    def state(self, state: RunState, moment: Moment) -> RunState:
        """See `Source`: groups that are under way. An iteration that ends early makes its rollout again, of the same
        rows. Collective over the world.
        """
        if moment == "after" and UNDER_WAY in state.kept:
            return state
        return state.keeping(UNDER_WAY, self._of_file(*(self._kept_now() if moment == "after" else self._before)))

    def _kept_now(self) -> _Kept:
        tensors = self._under_way.tensors() | {CACHE: torch.tensor(self._generator.kv_cache.whole)}
        return tensors, self._under_way.pieces()

    def _of_file(self, tensors: dict[str, Tensor], pieces: list[list[RecordedPiece]]) -> dict[str, Tensor]:
        """With the engine's experts on rank 0, which writes files. Collective over the world."""
        experts = None if self._records is None else self._records.of_file(pieces)
        return tensors if experts is None or not len(experts) else tensors | {EXPERTS: experts}

    @property
    def _records(self) -> RoutingRecords | None:
        return None if self._actor is None else self._actor.records

    def begin_run(self) -> list[str]:
        """See `Source`. Some lines are of a start that goes on with rows under way."""
        now, lines = self._generator.kv_cache.whole, self._generator.notes()
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

    # ---- numbers

    def costs(self) -> GenerationCosts:
        """See `Source`."""
        return costs_of(self._generator, self._num_generated)

    def metrics(self, of_trainers: object, num_trainers: int) -> Metrics:
        """See `Source`: of the rows that go on."""
        return {
            "rollout/groups_under_way": float(len(self._under_way.groups)),
            "rollout/tokens_under_way": float(self._num_tokens()),
        }

    def _num_tokens(self) -> int:
        """Of responses under way, with those of an environment."""
        return sum(len(row.token_ids) for group in self._under_way.groups for row in group.rows) + self._open_tokens

    def close(self, *, saved: bool | None) -> None:
        """See `Source`."""
        self._generator.end_rows()
