"""Responses that a person reads: which of them, and what stands beside each in samples.jsonl."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NotRequired, TypedDict

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.recording.marked_turns import Turn

MOST_CHARACTERS = 2000  # of a column's value


class Sample(TypedDict):
    """A line of samples.jsonl. kind: train, or heldout of an evaluation; then with the name of the set."""

    kind: str
    prompt: str
    response: str
    score: float | None
    parts: Mapping[str, float]  # of the score, before their weights
    columns: Mapping[str, Any]  # the user's, of the row
    set: NotRequired[str]
    truncated: NotRequired[bool]  # true where the limit of tokens has cut the response; else left out
    turns: NotRequired[list[Turn]]  # of a row with an environment: the response, cut by who has written it


def samples_of(
    batch: RolloutBatch,
    prompts: PromptBatch,
    rows: Sequence[int],
    decode: Callable[[list[int]], str],
    *,
    kind: str,
    scores: Tensor | None,
    parts: Mapping[str, Tensor],
    name: str = "",
) -> list[Sample]:
    """Of these rows of the batch. scores, parts: (N,) each; a row without a score, NaN, has no parts either."""
    found = []
    for row, ids in zip(rows, batch.response_token_lists(list(rows)), strict=True):
        prompt = int(batch.prompt_indices[row])
        score = None if scores is None or scores[row].isnan() else float(scores[row])
        found.append(
            Sample(
                kind=kind,
                prompt=prompts.texts[prompt] or decode(_prompt_ids(batch, row)),  # for a row that brings the prompt
                response=decode(ids),
                score=score,
                parts={} if score is None else {name: float(part[row]) for name, part in parts.items()},
                columns={name: _short(values[prompt]) for name, values in prompts.columns.items()},
                turns=_turns(batch, row, ids, decode) if batch.environment_rewards is not None else [],
                set=name,
            )
        )
        if batch.truncated[row]:
            found[-1]["truncated"] = True
    return found


def _prompt_ids(batch: RolloutBatch, row: int) -> list[int]:
    start = int(batch.lengths[:row].sum())
    ids: list[int] = batch.input_ids[start : start + int(batch.prompt_lengths[row])].tolist()
    return ids


def _turns(batch: RolloutBatch, row: int, ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[Turn]:
    """ids: behind the prompt. Of a row that has failed no token is the model's."""
    end = int(batch.lengths[: row + 1].sum())
    own = slice(end - len(ids), end)
    sampled, starts = batch.response_mask[own].tolist(), batch.branch_starts
    sequences = [0] * len(ids) if starts is None else starts[own].cumsum(0).tolist()
    runs = groupby(zip(sequences, sampled, ids, strict=True), key=lambda one: one[:2])
    found: list[Turn] = []
    last = 0
    for (sequence, by), some in runs:
        turn = Turn(by="model" if by else "environment", text=decode([i for _, _, i in some]))
        found.append(turn if sequence == last else Turn(**turn, begins=True))
        last = sequence
    return found


def chosen_rows(prompt_indices: Tensor, num_prompts: int, number: int, *, seed: str, groups: int = 0) -> list[int]:
    """So many rows of a batch, ascending: of as many prompts as there are, drawn by the seed.

    groups: of so many prompts, the first of those that are drawn, all rows are chosen.

    num_prompts: rows of prompts from that number on cannot be shown. A prompt has a second row only where all have one.
    """
    drawing = random.Random(seed)
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_indices.tolist()):
        if prompt < num_prompts:
            rows.setdefault(prompt, []).append(row)
    for own in rows.values():
        drawing.shuffle(own)
    order = list(rows.values())
    drawing.shuffle(order)
    most = max(map(len, order), default=0)
    dealt = [own[i] for i in range(most) for own in order if i < len(own)]
    return sorted({*dealt[:number], *(row for own in order[:groups] for row in own)})


def _short(value: Any) -> Any:
    """A value for JSON; of a long value the beginning of the text."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return json.loads(text) if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
