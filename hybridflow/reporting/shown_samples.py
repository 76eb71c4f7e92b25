"""The samples that a page shows: of each iteration the best and the worst, with reference answers. Pure."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.recording.marked_turns import marked
from hybridflow.reporting.runs import Sample, Samples

MOST_ROWS = 16  # of an iteration and a kind: the best half and the worst half
MOST_CHARACTERS = 4000  # of a prompt or response
OWN = ("iteration", "kind", "prompt", "response", "score", "columns", "turns")  # other fields as they are called
ANSWERS = (  # columns that hold the right answer, by the names that data sets give them
    *("answer", "answers", "ground_truth", "ground_truths", "reference", "reference_answer", "reference_answers"),
    *("solution", "solutions", "target", "targets", "expected", "expected_answer", "label", "labels"),
)


def shown_samples(samples: Samples, config: Mapping[str, str]) -> dict[str, Any]:
    """config: by dotted key, values as JSON; an `answer` among a function's arguments names the column."""
    answers = (*answer_columns(config), *ANSWERS)
    return {"of": samples.of, "iterations": [_iteration(*each, answers) for each in samples.by_iteration.items()]}


def _iteration(iteration: int, rows: Sequence[Sample], answers: Sequence[str]) -> dict[str, Any]:
    kinds = ([row for row in rows if _is_heldout(row) == heldout] for heldout in (True, False))
    shown = [_shown(row, answers) for kind in kinds for row in chosen(kind)]
    return {"iteration": iteration, "count": len(rows), "rows": shown}


def answer_columns(config: Mapping[str, str]) -> list[str]:
    pattern = r"(reward\.functions\.\d+|metrics\.eval_reward)\.arguments\.answer"
    found = (json.loads(value) for key, value in config.items() if re.fullmatch(pattern, key))
    return list(dict.fromkeys(name for name in found if isinstance(name, str)))


def chosen(rows: Sequence[Sample]) -> list[Sample]:
    """The rows from the highest score to the lowest, those without a finite one last.

    Of too many rows: the best and the worst prompts in turn, by their best rows, each with all rows, as many as go in.
    A prompt that would leave half of the room empty is cut to the best and the worst rows.
    """
    ranked, groups = sorted(rows, key=_place), dict[str, list[Sample]]()
    if len(ranked) <= MOST_ROWS:
        return ranked
    for row in ranked:
        groups.setdefault(_plain(row["prompt"]), []).append(row)
    found: list[Sample] = []
    left = list(groups.values())
    while left:
        group = left.pop(0 if (len(groups) - len(left)) % 2 == 0 else -1)
        room = MOST_ROWS - len(found)
        if len(group) > room and room > MOST_ROWS // 2:
            found += [*group[: (room + 1) // 2], *group[len(group) - room // 2 :]]
        if len(group) > room:
            break
        found += group
    return sorted(found, key=_place)


def _is_heldout(row: Sample) -> bool:
    return row.get("kind") == "heldout"


def _place(row: Sample) -> float:
    number = _number(row)
    return math.inf if number is None else -number


def _number(row: Sample) -> float | None:
    """The score, where it is a finite number."""
    score = row.get("score")
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        return None
    return float(score)


def _shown(sample: Sample, answers: Sequence[str]) -> dict[str, Any]:
    columns = dict(sample["columns"]) if isinstance(sample.get("columns"), dict) else {}
    answer = taken_answer(columns, answers)
    rest = {name: value for name, value in sample.items() if name not in OWN}
    more = {name: value for name, value in {**columns, **rest}.items() if value is not None and value != {}}
    score = sample.get("score")
    return {
        "heldout": _is_heldout(sample),
        "prompt": _cut(sample["prompt"]),
        "response": _cut(marked(sample["turns"]) if sample.get("turns") else sample["response"]),
        "answer": None if answer is None else _cut(answer),
        "score": f"{score:.6g}" if isinstance(score, float) else None if score is None else _plain(score),
        "number": _number(sample),
        "more": {name: _cut(value) for name, value in more.items()},
    }


def taken_answer(columns: dict[str, Any], names: Sequence[str]) -> Any:
    """Take the right answer out of the columns, also of one column within another; None where there is none."""
    for name in names:
        if columns.get(name) is not None:
            return columns.pop(name)
    for column, inner in columns.items():
        for name in names:
            if isinstance(inner, dict) and inner.get(name) is not None:
                columns[column] = {key: value for key, value in inner.items() if key != name}
                return inner[name]
    return None


def _plain(value: Any) -> str:
    """What is no text as JSON, where NaN may stand."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(value: Any) -> dict[str, Any]:
    text = _plain(value)
    return {"text": text[:MOST_CHARACTERS], "cut": max(0, len(text) - MOST_CHARACTERS)}
