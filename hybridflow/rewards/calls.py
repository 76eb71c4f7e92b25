"""Who calls reward functions for which rows, and what becomes of those that fail: between a rollout and the pool.

    calls = RolloutCalls(caller, numbers, prompts)
    calls.submit(group)             # as soon as all responses to a prompt are there
    begun = calls.close()           # the rest is for all ranks
    calls.call_remaining(rollout, owners)
    calls.scores()                  # waits for them

What a function sees in one list is fixed, by `per`: a row, a prompt's responses, or the rollout. Whichever rank and
process calls it, and when, it sees the same.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.errors import RewardError
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.pool import Outcome, Pool, Rows
from hybridflow.roles.precomputed_scores import NOBODY

FAILURES = {"scored": 0.0, "error": 1.0, "ended": 1.0, "timeout": 2.0}  # as ranks exchange them
LOST = ("timeout", "ended")  # kinds of failures that a response may be the cause of, whatever function it is
GO_ON = "reward.on_error: score with reward.error_score: NUMBER scores such a row and goes on"
MOST_SHOWN = 3  # failures of a function and a rollout that a rank tells in full


@dataclass(frozen=True)
class Group:
    """The responses to one prompt of an iteration: rows of the rollout, and their tokens."""

    prompt: int
    rows: tuple[int, ...]
    responses: tuple[list[int], ...]


@dataclass(frozen=True)
class FunctionScores:
    """Of a function, (N,) each: parts of scores, seconds that a row took, and which rows have failed (FAILURES)."""

    parts: tuple[PartialTensor, ...]
    seconds: PartialTensor
    failures: PartialTensor


@dataclass(frozen=True)
class CallUnit:
    """The rows of a call that is asked for."""

    ticket: int
    rows: tuple[int, ...]


@dataclass
class CallContext:
    """What functions may ask beside rows: the iteration, from 1, and whether held-out rows are evaluated."""

    iteration: int = 0
    is_evaluation: bool = False


@dataclass(frozen=True)
class FunctionCaller:
    """Calls functions of the pool: each row is scored once, on one rank.

    error_score: what each part of a failed row is; None: it ends the run, unless the function has a `lost_score`.
    """

    decode: Callable[[list[int]], str]
    rank: int
    world_size: int
    pool: Pool | None = None
    error_score: float | None = None
    context: CallContext = field(default_factory=CallContext)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Functions that are called within the block may ask whether this is an evaluation: yes."""
        self.context.is_evaluation = True
        try:
            yield
        finally:
            self.context.is_evaluation = False

    def spec(self, function: int) -> FunctionSpec:
        return self._pool.specs[function]

    def texts(self, group: Group, prompts: PromptBatch) -> Rows:
        return self._texts([group.prompt] * len(group.rows), group.responses, group.rows, prompts)

    def begin(self, function: int, rows: Rows) -> list[CallUnit]:
        """Have it called with the rows of a group, or with all that this rank calls it for."""
        places = range(len(rows["rows"]))
        cuts = [[i] for i in places] if self.spec(function).per == "row" else [list(places)] * bool(places)
        parts = [self._asked(function, _some(rows, cut)) for cut in cuts]
        return [CallUnit(self._pool.submit(function, part), tuple(part["rows"])) for part in parts]

    def all_begun(self, function: int, rollout: RolloutBatch, prompts: PromptBatch) -> list[CallUnit]:
        """Have it called for this rank's share of a whole rollout: prompts in turn; all on one rank where it is so."""
        if self.spec(function).per == "batch":
            own = list(range(len(rollout))) if function % self.world_size == self.rank else []
            asked = rollout.prompt_indices[own].tolist()
            return self.begin(function, self._texts(asked, rollout.response_token_lists(own), own, prompts))
        found, dealt = rows_of_prompts(rollout), range(len(prompts))[self.rank :: self.world_size]
        groups = groups_of(rollout, {prompt: found[prompt] for prompt in dealt if prompt in found})
        return [unit for group in groups for unit in self.begin(function, self.texts(group, prompts))]

    def finish(self, function: int, units: Sequence[CallUnit], size: int) -> FunctionScores:
        """Of (size,), once all of them have an outcome. Errors: RewardError, of the first that failed."""
        outcomes = self._outcomes(function, units)
        rows: list[int] = []
        scores: list[tuple[float, ...]] = []
        seconds: list[float] = []
        failures: list[float] = []
        for unit, outcome in zip(units, outcomes, strict=True):
            rows += unit.rows
            scores += self._scores(function, unit, outcome)
            seconds += [outcome.seconds / len(unit.rows)] * len(unit.rows)
            failures += [FAILURES[outcome.kind]] * len(unit.rows)
        return FunctionScores(
            tuple(self._contribution(size, rows, [row[i] for row in scores]) for i in range(self._num_parts(function))),
            self._contribution(size, rows, seconds),
            self._contribution(size, rows, failures),
        )

    def scores(self, function: int, rollout: RolloutBatch, prompts: PromptBatch) -> FunctionScores:
        return self.finish(function, self.all_begun(function, rollout, prompts), len(rollout))

    def failure_score(self, function: int, kind: str) -> float | None:
        """What each part of a row counts as that failed so; None: that ends the run."""
        own = self.spec(function).lost_score if kind in LOST else None
        return own if self.error_score is None else self.error_score

    # ---- inside

    def _asked(self, function: int, rows: Rows) -> Rows:
        """With what the function asks for, and no tokens where it does not ask for them."""
        token_ids, known = rows["token_ids"], vars(self.context)
        asked = {name: token_ids if name == "token_ids" else known[name] for name in self.spec(function).asks}
        return {**{name: value for name, value in rows.items() if name != "token_ids"}, "asked": asked}

    def _outcomes(self, function: int, units: Sequence[CallUnit]) -> list[Outcome]:
        """In their order, up to one that ends the run: what is still under way behind it need not be waited for."""
        outcomes: list[Outcome] = []
        for unit in units:
            outcomes.append(self._pool.outcome(unit.ticket))
            kind = outcomes[-1].kind
            if kind != "scored" and self.failure_score(function, kind) is None:
                self._show(function, outcomes)
                raise RewardError(f"{outcomes[-1].problem}; {GO_ON}")
        self._show(function, outcomes)
        return outcomes

    def _scores(self, function: int, unit: CallUnit, outcome: Outcome) -> Sequence[tuple[float, ...]]:
        """The parts of each row."""
        if outcome.kind == "scored":
            return outcome.scores
        score = self.failure_score(function, outcome.kind)
        assert score is not None, "a failed row without a score ends the run"
        return [(score,) * self._num_parts(function)] * len(unit.rows)

    def _num_parts(self, function: int) -> int:
        return max(len(self.spec(function).parts), 1)

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None, "there are functions to call, and no pool"
        return self.pool

    def _texts(
        self,
        prompt_numbers: Sequence[int],
        responses: Iterable[list[int]],
        rows: Sequence[int],
        prompts: PromptBatch,
    ) -> Rows:
        kept = any("token_ids" in spec.asks for spec in self._pool.specs)  # else no list of a rollout's tokens is made
        both = [(self.decode(ids), ids if kept else ()) for ids in responses]
        return {
            "prompts": [prompts.texts[i] for i in prompt_numbers],
            "responses": [text for text, _ in both],
            "token_ids": [ids for _, ids in both],
            "columns": {name: [values[i] for i in prompt_numbers] for name, values in prompts.columns.items()},
            "rows": list(rows),
        }

    def _contribution(self, size: int, rows: list[int], values: Sequence[float]) -> PartialTensor:
        where, found = torch.tensor(rows, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)
        return PartialTensor(size, where, found)

    def _show(self, function: int, outcomes: Sequence[Outcome]) -> None:
        """On this rank: what was printed; and why rows have failed, where that does not end the run."""
        name = f"[rank {self.rank}, {self.spec(function).path}]"
        lines = [line for outcome in outcomes for line in outcome.printed.splitlines()]
        failures = [(self.failure_score(function, one.kind), one) for one in outcomes if one.kind != "scored"]
        scored = [f"scored as {score:g}: {one.problem}" for score, one in failures if score is not None]
        lines += scored[:MOST_SHOWN]
        lines += [f"and {len(scored) - MOST_SHOWN} more calls failed"] * (len(scored) > MOST_SHOWN)
        if lines:
            print("".join(f"{name} {line}\n" for line in lines), end="", file=sys.stderr, flush=True)


class RolloutCalls:
    """Of the functions that need not wait for the whole of one rollout.

    Which prompts a rank has them called for while others are generated is the caller's to say; those that no rank has
    begun are dealt out when the rollout is whole.
    """

    def __init__(self, caller: FunctionCaller, functions: Sequence[int], prompts: PromptBatch) -> None:
        self._caller, self.functions, self._prompts = caller, tuple(functions), prompts
        self._units: dict[int, dict[int, list[CallUnit]]] = {}  # by prompt, by function
        self._rollout: RolloutBatch | None = None
        self._own: list[int] = []

    def submit(self, group: Group) -> None:
        texts = self._caller.texts(group, self._prompts)
        self._units[group.prompt] = {function: self._caller.begin(function, texts) for function in self.functions}

    def close(self) -> tuple[int, ...]:
        """The prompts whose calls have begun on this rank; the others may be another's."""
        pool = self._caller.pool
        assert pool is not None, "there are functions to call, and no pool"
        gone = pool.withdraw(unit.ticket for prompt in self._units for unit in self._of_prompt(prompt))
        whole = {p for p in self._units if all(unit.ticket in gone for unit in self._of_prompt(p))}
        self._units = {p: _without(units, gone) for p, units in self._units.items() if p not in whole}
        return tuple(self._units)

    def call_remaining(self, rollout: RolloutBatch, owners: Sequence[int]) -> None:
        """The rollout is whole. owners: by prompt the rank that has begun to call, or NOBODY."""
        caller, left = self._caller, [prompt for prompt, owner in enumerate(owners) if owner == NOBODY]
        begun = [prompt for prompt, owner in enumerate(owners) if owner == caller.rank]
        self._own, self._rollout = [*begun, *left[caller.rank :: caller.world_size]], rollout
        rows = rows_of_prompts(rollout)
        for prompt in self._own:
            self._units.setdefault(prompt, {function: [] for function in self.functions})
        missing = {prompt: self._missing(prompt, rows[prompt]) for prompt in self._own if prompt in rows}
        for group in groups_of(rollout, {prompt: rows[prompt] for prompt, places in missing.items() if places}):
            texts = caller.texts(group, self._prompts)
            for function, places in missing[group.prompt].items():
                self._units[group.prompt][function] += caller.begin(function, _some(texts, places))

    def covers(self, rollout: RolloutBatch) -> bool:
        """Whether this very batch is the rollout, and whole."""
        return self._rollout is rollout

    def scores(self) -> dict[int, FunctionScores]:
        """By function. Errors: RewardError, of a call that was begun before the rollout was whole too."""
        assert self._rollout is not None, "the rollout is not whole yet"
        return {
            function: self._caller.finish(
                function, [unit for prompt in self._own for unit in self._units[prompt][function]], len(self._rollout)
            )
            for function in self.functions
        }

    def forget(self) -> None:
        """Nobody asks for the scores."""
        if self._caller.pool is not None:
            self._caller.pool.forget(unit.ticket for prompt in self._units for unit in self._of_prompt(prompt))
        self._units = {}

    def _missing(self, prompt: int, rows: Sequence[int]) -> dict[int, list[int]]:
        """By function the rows of a prompt that no call has, by their places among them; only where there are some."""
        missing = {function: _missing(rows, units) for function, units in self._units[prompt].items()}
        return {function: places for function, places in missing.items() if places}

    def _of_prompt(self, prompt: int) -> list[CallUnit]:
        return [unit for units in self._units[prompt].values() for unit in units]


def rows_of_prompts(rollout: RolloutBatch) -> dict[int, list[int]]:
    """By prompt the rows that answer it, ascending."""
    found: dict[int, list[int]] = {}
    for row, prompt in enumerate(rollout.prompt_indices.tolist()):
        found.setdefault(prompt, []).append(row)
    return found


def groups_of(rollout: RolloutBatch, rows: Mapping[int, Sequence[int]]) -> Iterator[Group]:
    """The responses to each of these prompts, which are made as they are asked for. rows: by prompt."""
    responses = rollout.response_token_lists([row for some in rows.values() for row in some])
    for prompt, some in rows.items():
        yield Group(prompt, tuple(some), tuple(islice(responses, len(some))))


def _missing(rows: Sequence[int], units: Sequence[CallUnit]) -> list[int]:
    """Which of a prompt's rows none of these units has, by their places among them."""
    there = {row for unit in units for row in unit.rows}
    return [place for place, row in enumerate(rows) if row not in there]


def _without(units: dict[int, list[CallUnit]], gone: set[int]) -> dict[int, list[CallUnit]]:
    return {function: [unit for unit in some if unit.ticket not in gone] for function, some in units.items()}


def _some(rows: Rows, places: Sequence[int]) -> Rows:
    columns = {name: [values[i] for i in places] for name, values in rows["columns"].items()}
    lists = ("prompts", "responses", "token_ids", "rows")
    return {key: [rows[key][i] for i in places] for key in lists} | {"columns": columns}
