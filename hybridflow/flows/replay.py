"""Batches of an earlier run in the engine's place: an iteration again, on another machine or by other code.

    replay = Replay(dumped_batches("runs/quickstart"), vocab_size=..., max_length=...)
    replay.rollout(prompts, always(4), iteration=3)     # what the run's engine gave then
    replay.comparison_lines(3, batch.tensors())         # and what was computed of it, then and now

A file is what `metrics.dump_batches` writes: the fields of the flow's batch. Those of a `RolloutBatch` are taken for
what was generated, and everything after is computed anew. That is the same iteration where the weights are those it
began with: of the first, the models'; of a later one, those of the checkpoint before it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch, offsets, response_mask
from hybridflow.checkpoint.state import RunState
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.config.sampling import SamplingConfig
from hybridflow.errors import CheckpointError, DataError, FlowError
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.generation import (
    NO_IDS,
    DeferredRows,
    Delivered,
    GenerationCosts,
    Greedy,
    Kinds,
    Moment,
    Numbers,
    PromptDraw,
)
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.formats.file_bytes import opened, read_box
from hybridflow.formats.safetensors_files import read_header
from hybridflow.models.routing import RoutingSizes, as_record, bits
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.run_dir import dumped_iteration
from hybridflow.rollout.routing_records import EXPERTS, IDS, RoutingRecords

FIELDS = tuple(field.name for field in dataclasses.fields(RolloutBatch))
REWARDS, STARTS, VERSIONS = "environment_rewards", "branch_starts", "versions"
REQUIRED = tuple(name for name in FIELDS if name not in (IDS, REWARDS, STARTS, VERSIONS))
PER_TOKEN = ("input_ids", "response_mask", "rollout_log_probs", STARTS)
DTYPES = {name: torch.bool for name in ("truncated", "response_mask", STARTS)} | {"rollout_log_probs": torch.float32}
# of others int64


def dumped_batches(path: Path) -> dict[int, Path]:
    """Dumped batches by ascending iteration. path: a run directory, a batches/ directory, or a single batch.

    Errors: DataError where there is none.
    """
    if not path.exists():
        raise DataError(f"{path}: does not exist")
    if path.is_file():
        number = dumped_iteration(path)
        if number is None:
            raise DataError(f"{path}: is no dumped batch: those are iteration_NNNNNN.safetensors")
        return {number: path}
    directory = path / "batches" if (path / "batches").is_dir() else path
    numbers = {dumped_iteration(file): file for file in directory.glob("iteration_*.safetensors")}
    found = {number: file for number, file in numbers.items() if number is not None}
    if not found:
        raise DataError(f"{directory}: holds no iteration_NNNNNN.safetensors; a run with metrics.dump_batches has them")
    return dict(sorted(found.items()))


class Replay:
    """Reads rollouts from files of batches.

    records: take the experts that are to be replayed, which the files then must have. num_rewards: parts of an
    environment's reward, likewise. several: rows may have several sequences.
    """

    def __init__(
        self,
        files: Mapping[int, Path],
        *,
        vocab_size: int,
        max_length: int,
        records: RoutingRecords | None = None,
        num_rewards: int = 0,
        several: bool = False,
    ) -> None:
        self._several = several
        self.files, self._records, self._num_rewards = files, records, num_rewards
        self._vocab_size, self._max_length = vocab_size, max_length

    def iterations(self, num_iterations: int, *, after: int = 0) -> list[int]:
        """after + 1 .. num_iterations, those that there is a file of. Errors: DataError where there is none."""
        found = [iteration for iteration in self.files if after < iteration <= num_iterations]
        if not found:
            directory, given = next(iter(self.files.values())).parent, f"{min(self.files)} to {max(self.files)}"
            raise DataError(
                f"{directory}: the dumped batches belong to iterations {given}, but the run needs {after + 1} to "
                f"num_iterations = {num_iterations}"
            )
        return found

    def rollout(self, prompts: PromptBatch, samples_per_prompt: LengthBuckets[int], iteration: int) -> RolloutBatch:
        """What the engine gave in that iteration. Errors: as `read`."""
        rollout, experts = self.read(prompts, samples_per_prompt=samples_per_prompt, iteration=iteration)
        return with_experts(rollout, experts, self._records, iteration)

    def read(
        self,
        prompts: PromptBatch,
        *,
        samples_per_prompt: LengthBuckets[int],
        iteration: int,
    ) -> tuple[RolloutBatch, Tensor | None]:
        """The rollout, and (T, layers, k) experts if they are to be replayed.

        Errors: DataError naming file, field or row, and rule, where the file is not of these prompts or no batch.
        """
        file = self.files[iteration]
        tensors = read_batch(file)
        self._check_tensors(file, tensors)
        rollout = RolloutBatch(**{name: tensors[name] for name in _checked(tensors)})
        experts = None if self._records is None else self._checked_experts(file, tensors, self._records.sizes)
        if self._num_rewards:
            rewards = self._checked_rewards(file, tensors)
            rollout = dataclasses.replace(rollout, environment_rewards=rewards)
        if VERSIONS in tensors:
            rollout = dataclasses.replace(rollout, versions=_checked_versions(file, tensors))
        self._check_rows(file, rollout)
        _check_prompts(file, rollout, prompts, samples_per_prompt)
        return rollout, experts

    def comparison_lines(self, number: int, computed: Mapping[str, Tensor]) -> list[str]:
        """How far what an iteration computed is from what the file holds beside the rollout: a line."""
        file = self.files[number]
        found = ", ".join(differences(read_batch(file), computed)) or "it holds the rollout alone"
        return [f"iteration {number}: largest differences to {file}: {found}"]

    def _check_tensors(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        for name in REQUIRED:
            if name not in tensors:
                raise DataError(f"{file}: has no {name}: a dumped batch has {', '.join(REQUIRED)}")
        for name in _checked(tensors):
            found, dtype = tensors[name], DTYPES.get(name, torch.int64)
            if found.dtype != dtype or found.dim() != 1:
                raise DataError(f"{file}: {name} is {found.dtype} of shape {tuple(found.shape)}; expected {dtype} (n,)")
        num_rows, lengths = len(tensors["lengths"]), tensors["lengths"]
        longest = len(tensors["input_ids"]) if STARTS in tensors else self._max_length
        _check_bounds(file, "lengths", lengths, 1, longest)
        for name in _checked(tensors):
            expected = int(lengths.sum()) if name in PER_TOKEN else num_rows
            if len(tensors[name]) != expected:
                per = f"token of its {num_rows} sequences" if name in PER_TOKEN else "sequence"
                raise DataError(f"{file}: {name} has {len(tensors[name])} entries; expected {expected}, one a {per}")

    def _checked_rewards(self, file: Path, tensors: Mapping[str, Tensor]) -> Tensor:
        """Of every row, as this config's environment gives them."""
        found, expected = tensors.get(REWARDS), (len(tensors["lengths"]), self._num_rewards)
        if found is None or found.shape != expected or found.dtype != torch.float32:
            kind = "none" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            raise DataError(
                f"{file}: {REWARDS} is {kind}; data.environment asks for torch.float32 {expected}, a reward, or each "
                f"of its parts, of each row"
            )
        return found

    def _checked_experts(self, file: Path, tensors: Mapping[str, Tensor], sizes: RoutingSizes) -> Tensor:
        """Of every token, as this config's model has them."""
        found = tensors.get(EXPERTS)
        if found is None:
            raise DataError(
                f"{file}: has no {EXPERTS}: algorithm.policy.replay_routing = true replays those of the engine, which "
                f"only a run with that key has dumped"
            )
        expected = sizes.nothing(len(tensors["input_ids"]))
        given, found = found, as_record(found)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise DataError(
                f"{file}: {EXPERTS} is {given.dtype} of shape {tuple(given.shape)}; expected {expected.dtype} "
                f"{tuple(expected.shape)}: tokens, layers and experts of a token of actor.model"
            )
        _check_bounds(file, EXPERTS, bits(found).flatten(), 0, sizes.num_experts - 1)
        return found

    def _check_rows(self, file: Path, rollout: RolloutBatch) -> None:
        self._check_branches(file, rollout)
        _check_bounds(file, "input_ids", rollout.input_ids, 0, self._vocab_size - 1)
        bad = ((rollout.prompt_lengths < 1) | (rollout.prompt_lengths > rollout.lengths)).nonzero()
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"{file}: prompt_lengths of row {row} is {int(rollout.prompt_lengths[row])}; expected 1 to its length "
                f"{int(rollout.lengths[row])}"
            )
        if (rollout.response_mask & ~response_mask(rollout.lengths, rollout.prompt_lengths)).any():
            raise DataError(f"{file}: response_mask marks tokens of a prompt; it may mark those after it alone")

    def _check_branches(self, file: Path, rollout: RolloutBatch) -> None:
        starts, first = rollout.branch_starts, offsets(rollout.lengths)
        if starts is not None and not self._several:
            raise DataError(f"{file}: has rows of several sequences, which need data.environment.earlier_turns: branch")
        if starts is not None and ((starts & rollout.response_mask).any() or starts[first].any()):
            raise DataError(
                f"{file}: {STARTS} marks a row's first token, or one that the policy chose; no further sequence of a "
                f"row begins with one"
            )
        _check_bounds(file, "lengths of sequences", rollout.branch_lengths, 1, self._max_length)


class ReplaySource:
    """See `Source`: no weights move, and nothing is evaluated."""

    models_in_place = True

    def __init__(
        self,
        replay: Replay,
        scoring: OverlappedScoring,
        sampling: SamplingConfig,
        *,
        draws: PromptDraws,
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._replay, self.scoring, self._sampling, self._data = replay, scoring, sampling, draws
        self._iteration = self._num_generated = 0
        self._has_delivered = False  # since the last draw

    def begin_run(self) -> list[str]:
        """See `Source`."""
        return [
            f"a replay of the dumped batches of {len(self._replay.files)} iterations: nothing is generated, held-out "
            "prompts are not evaluated, and no model is written"
        ]

    def draw(self, position: int) -> PromptDraw:
        """See `Source`."""
        self._has_delivered = False
        return self._data.draw(position)

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Source`."""
        return self._data.at(numbers)

    def begin(self, iteration: int, num_iterations: int) -> Tensor:
        """See `Source`."""
        self._iteration, self._num_generated = iteration, 0
        return NO_IDS

    def responses(self, kinds: Kinds, numbers: Numbers, prompts: PromptBatch, deferred: DeferredRows) -> Delivered:
        """The rollout of the file. Errors: as `Replay.read`, and DataError for other kinds, which no file has."""
        file = self._replay.files[self._iteration]
        if any(isinstance(kind, Greedy) for kind in kinds):
            raise DataError(f"{file}: holds what was sampled; the flow asks for greedy responses, which no file has")
        if self._has_delivered or len(kinds) > 1:
            raise DataError(f"{file}: holds one generation of an iteration; the flow samples its prompts again")
        with self._watch.phase("generate"):
            rollout = self._replay.rollout(prompts, self._sampling.samples, self._iteration)
        self._has_delivered = True
        self._num_generated = rollout.num_response_tokens
        self.scoring.begin(prompts, deferred)
        self.scoring.assign_rest(rollout)
        return Delivered(numbers, prompts, (rollout,))

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """See `Source`. Errors: FlowError."""
        raise FlowError("a replay has no engine: held-out prompts are not evaluated")

    def costs(self) -> GenerationCosts:
        """See `Source`."""
        return GenerationCosts(num_generated=self._num_generated)

    def metrics(self, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """See `Source`."""
        return {}

    def state(self, state: RunState, moment: Moment) -> RunState:
        """See `Source`: batches stay where they are."""
        return state

    def close(self, *, saved: bool | None) -> None:
        """See `Source`."""


def _checked_versions(file: Path, tensors: Mapping[str, Tensor]) -> Tensor:
    """Of every token, of a run with stale rollouts."""
    found, expected = tensors[VERSIONS], (len(tensors["input_ids"]), 1)
    if found.shape != expected or found.dtype != torch.int32:
        raise DataError(f"{file}: {VERSIONS} is {found.dtype} of shape {tuple(found.shape)}; expected int32 {expected}")
    return found


def _checked(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Tensors of a rollout that every file has, and those of branches where it has some."""
    return (*REQUIRED, STARTS) if STARTS in tensors else REQUIRED


def with_experts(
    rollout: RolloutBatch, experts: Tensor | None, records: RoutingRecords | None, iteration: int
) -> RolloutBatch:
    """What `Replay.read` gave, with the experts in the records. Local, and alike on all ranks.

    iteration: that trains on the rollout.
    """
    return rollout if experts is None or records is None else records.take(rollout, experts, iteration)


def _check_bounds(file: Path, name: str, values: Tensor, least: int, most: int) -> None:
    bad = ((values < least) | (values > most)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise DataError(f"{file}: {name}[{at}] is {int(values[at])}; this config has those from {least} to {most}")


def _check_prompts(
    file: Path, rollout: RolloutBatch, prompts: PromptBatch, samples_per_prompt: LengthBuckets[int]
) -> None:
    """The rows answer these prompts: as many each, side by side, and token by token where a prompt has tokens."""
    counts = samples_per_prompt.for_lengths(prompts.lengths.tolist())
    expected = torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    if not torch.equal(rollout.prompt_indices, expected):
        raise DataError(
            f"{file}: prompt_indices of the {len(rollout)} rows are not those of {len(prompts)} prompts "
            f"(data.prompts_per_iteration) x {_between(counts)} responses (sampling.samples_per_prompt), side by side. "
            "The run that wrote the file had another config, or its flow kept only some rows"
        )
    asked = prompts.token_lists()
    starts, lengths = offsets(rollout.lengths).tolist(), rollout.prompt_lengths.tolist()
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        prompt = int(expected[row])
        if asked[prompt] and rollout.input_ids[start : start + length].tolist() != asked[prompt]:
            raise DataError(
                f"{file}: row {row} begins with {length} tokens that are not prompt {prompt} of the iteration, "
                f"{prompts.texts[prompt][:60]!r}. data, data.shuffle, seed and data.prompts_per_iteration must be "
                "those of the run that wrote the file"
            )


def _between(counts: list[int]) -> str:
    """`4`, or `4 to 8`."""
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def read_batch(file: Path) -> dict[str, Tensor]:
    """All tensors of a file. Errors: DataError where it is missing or damaged."""
    try:
        entries = read_header(file)
        tensors = {name: torch.empty(entry.info.shape, dtype=entry.info.dtype) for name, entry in entries.items()}
        with opened(file) as fd:
            for name, (_, start, info) in entries.items():
                read_box(fd, file, start, info.shape, (0,) * len(info.shape), out=tensors[name])
    except CheckpointError as error:
        raise DataError(str(error)) from error
    return tensors


def differences(then: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    """`log_probs 1.2e-07`: the largest difference of each field but those of the rollout."""
    names = [name for name in dict.fromkeys([*then, *now]) if name not in (*FIELDS, EXPERTS)]
    return [f"{name} {_difference(then.get(name), now.get(name))}" for name in names]


def _difference(then: Tensor | None, now: Tensor | None) -> str:
    if then is None or now is None:
        return "not in the file" if then is None else "not computed now"
    if then.shape != now.shape:
        return f"{tuple(then.shape)} in the file, {tuple(now.shape)} now"
    then, now = then.double(), now.double()
    alike = (then == now) | (then.isnan() & now.isnan())
    between = (then - now).abs().masked_fill(alike, 0.0)
    return f"{float(between.max()) if between.numel() else 0.0:.3g}"
