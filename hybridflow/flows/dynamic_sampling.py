"""Dynamic sampling: train on groups that differ in their scores, and generate until there are enough. arXiv 2503.14476.

A group, the responses to one prompt, is kept if the raw scores differ: else every advantage is zero.
While groups are missing the next prompts are drawn and generated, `max_generation_rounds` times in an iteration at
most. Groups of equal scores, in order, then fill the batch up, so that every batch has the full size.

Choices: the raw score decides, before penalties, normalisation and clipping. Groups count in the order of the prompts.
Groups beyond a full batch come first in the next iteration (`surplus: keep`), one update older than the other groups,
or are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hybridflow.algorithms.groups import equal_groups
from hybridflow.batch import RolloutBatch, joined, offsets, token_index
from hybridflow.checkpoint.state import RunState, Tensors
from hybridflow.config.algorithms import DynamicSampling
from hybridflow.flows.run import Run
from hybridflow.models.routing import as_record
from hybridflow.rewards.scorer import Scores
from hybridflow.rollout.routing_records import EXPERTS, RoutingRecords

SURPLUS, PROMPTS = "surplus", "prompts"  # groups beyond the batch of an iteration, in `RunState.kept`; their numbers
PART = "part of the score "  # before the names of such tensors in a surplus


@dataclass(frozen=True)
class Groups:
    """Responses and raw scores, group after group; prompt_indices count the groups.

    parts: of the scores, (N,) by name; those that all rows have.
    """

    prompts: tuple[int, ...]  # of the data set, one a group
    rollout: RolloutBatch
    raw_scores: Tensor  # (N,)
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def sizes(self) -> Tensor:
        """Responses of each group, int64 (groups,)."""
        return self.rollout.prompt_indices.bincount(minlength=len(self))

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each group's prompt."""
        return self.rollout.prompt_lengths[offsets(self.sizes)].tolist()

    def select(self, numbers: Sequence[int]) -> Self:
        """The groups of these numbers, in this order."""
        groups, sizes = torch.tensor(numbers, dtype=torch.int64), self.sizes
        rows = token_index(sizes, groups)
        rollout = _numbered(self.rollout.select(rows), sizes[groups])
        parts = {name: part[rows] for name, part in self.parts.items()}
        return type(self)(tuple(self.prompts[i] for i in numbers), rollout, self.raw_scores[rows], parts)

    def followed_by(self, other: Self) -> Self:
        rollout = _numbered(joined(self.rollout, other.rollout), torch.cat([self.sizes, other.sizes]))
        scores = torch.cat([self.raw_scores, other.raw_scores])
        common = [name for name in self.parts if name in other.parts]
        parts = {name: torch.cat([self.parts[name], other.parts[name]]) for name in common}
        return type(self)((*self.prompts, *other.prompts), rollout, scores, parts)

    def tensors(self) -> Tensors | None:
        """For the next iteration, and a checkpoint: a rollout's, raw_scores and their parts, and the prompts' numbers.

        None where there are no groups.
        """
        parts = {f"{PART}{name}": part for name, part in self.parts.items()}
        numbers = torch.tensor(self.prompts, dtype=torch.int64)
        tensors = self.rollout.tensors() | {"raw_scores": self.raw_scores, PROMPTS: numbers} | parts
        return tensors if self.prompts else None


def _numbered(rollout: RolloutBatch, sizes: Tensor) -> RolloutBatch:
    return replace(rollout, prompt_indices=torch.arange(len(sizes)).repeat_interleave(sizes))


def groups_of(kept: Tensors) -> Groups:
    """What `Groups.tensors` gave."""
    tensors = dict(kept)
    raw_scores, prompts = tensors.pop("raw_scores"), tuple(tensors.pop(PROMPTS).tolist())
    parts = {name.removeprefix(PART): tensors.pop(name) for name in list(tensors) if name.startswith(PART)}
    return Groups(prompts, RolloutBatch(**tensors), raw_scores, parts)


def with_records(state: RunState, records: RoutingRecords | None) -> RunState:
    """Move the engine's experts from a checkpoint's surplus to `records`, and return the state without them. Local.

    records: None: the run does not replay experts, and the experts are dropped.
    """
    tensors = dict(state.kept.get(SURPLUS, {}))
    experts = tensors.pop(EXPERTS, None)
    if experts is None:
        return state
    groups = groups_of(tensors)
    if records is not None:
        groups = replace(groups, rollout=records.take(groups.rollout, as_record(experts)))
    return state.keeping(SURPLUS, groups.tensors())


def sample_groups(run: Run, c: DynamicSampling | None) -> tuple[RolloutBatch, Scores | Tensor]:
    """The iteration's responses and their raw scores, which without dynamic sampling are yet to be exchanged."""
    if c is None:
        rollout = run.generate()
        return rollout, run.scores(rollout)
    wanted, kept, equal = run.prompts_per_iteration, _from_before(run), list[Groups]()
    num_generated, num_rounds, num_before = 0, 0, len(kept) if kept is not None else 0
    # the first round always: the prompts are drawn. A surplus may fill a batch where the config asked for more before
    while num_rounds == 0 or (num_rounds < c.max_generation_rounds and kept is not None and len(kept) < wanted):
        if num_rounds:
            run.draw()
        made = _generated(run)
        is_equal = nothing_to_learn(made.raw_scores, made.rollout)
        differ = made.select((~is_equal).nonzero().flatten().tolist())
        equal.append(made.select(is_equal.nonzero().flatten().tolist()))
        kept = differ if kept is None else kept.followed_by(differ)
        num_rounds, num_generated = num_rounds + 1, num_generated + len(made)
    assert kept is not None, "there is one round at least"
    batch, rest = kept.select(range(min(wanted, len(kept)))), kept.select(range(wanted, len(kept)))
    filled = _filled(batch, equal, wanted)
    run.state = run.state.keeping(SURPLUS, rest.tensors() if c.surplus == "keep" else None)
    run.take(filled.prompts, filled.rollout, filled.parts)
    numbers = {"before": num_before, "generated": num_generated, "rounds": num_rounds, "filled": wanted - len(batch)}
    _tell(run, numbers, num_equal=sum(map(len, equal)), num_rest=len(rest), keeps=c.surplus == "keep")
    return filled.rollout, filled.raw_scores


def nothing_to_learn(scores: Tensor, rollout: RolloutBatch) -> Tensor:
    """bool, one a group: whether the group's rows that have not failed score alike. One such row, or none, does."""
    failed, groups = rollout.failed, rollout.prompt_indices
    if failed.any():
        of_others = torch.full((int(groups.max()) + 1,), -torch.inf, dtype=scores.dtype)
        of_others = of_others.scatter_reduce(0, groups[~failed], scores[~failed], "amax")
        scores = torch.where(failed, of_others[groups], scores)
    return equal_groups(scores, groups)


def _from_before(run: Run) -> Groups | None:
    """The surplus of the iteration before; None where there is none, or where a group had another size then."""
    if SURPLUS not in run.state.kept:
        return None
    groups = groups_of(run.state.kept[SURPLUS])
    return groups if groups.sizes.tolist() == run.samples.for_lengths(groups.prompt_lengths) else None


def _generated(run: Run) -> Groups:
    rollout = run.generate()
    raw_scores = run.whole(raw_scores=run.scores(rollout)).raw_scores
    return Groups(run.prompt_rows, rollout, raw_scores, run.score_parts)


def _filled(batch: Groups, equal: Sequence[Groups], wanted: int) -> Groups:
    """With groups of equal scores where there are too few others."""
    for groups in equal:
        missing = wanted - len(batch)
        batch = batch.followed_by(groups.select(range(min(missing, len(groups)))))
    return batch


def _tell(run: Run, numbers: dict[str, int], *, num_equal: int, num_rest: int, keeps: bool) -> None:
    """In the metrics, and in a line for the person who watches."""
    run.metrics |= {
        "rollout/generation_rounds": torch.tensor(float(numbers["rounds"])),
        "rollout/groups_generated": torch.tensor(float(numbers["generated"])),
        "rollout/groups_equal": torch.tensor(float(num_equal)),
        "rollout/groups_filled": torch.tensor(float(numbers["filled"])),
        "rollout/groups_surplus": torch.tensor(float(num_rest)),
    }
    rest = "kept for the next" if keeps else "dropped"
    rounds = f"{numbers['rounds']} round{'s' if numbers['rounds'] != 1 else ''}"
    line = (
        f"iteration {run.iteration}: {numbers['generated']} groups generated in {rounds}, "
        f"{num_equal} of them with equal scores; {numbers['before']} from before, {num_rest} {rest}"
    )
    if numbers["filled"]:
        line += f"; {numbers['filled']} of equal scores fill the batch (max_generation_rounds)"
    run.say(line)
