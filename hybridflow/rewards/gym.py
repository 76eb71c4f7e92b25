"""`hybridflow.rewards:reasoning_gym`: what the scorer of a row's reasoning-gym task gives the answer in a response.

The columns are those that `data/gym_files.py` writes: `task` and `entry`. The scorer of a task with `execute: true`
runs where `passes_tests` runs programs (`rewards/code.py`), one process for all rows of a call and a fork for each.
"""

import ast
import functools
import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hybridflow.rewards.code import check_limits, run_confined, wall_seconds

PROGRAM = Path(__file__).with_name("gym_program.py")
TAGGED = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)  # as reasoning_gym.utils.extract_answer
WRONG = 0.0
Asked = tuple[Mapping[str, Any], str, str]  # task, entry, answer


def reasoning_gym(
    prompts: list[str],
    responses: list[str],
    columns: dict[str, list[Any]],
    *,
    tagged: bool = True,
    cpu_seconds: int = 10,
    memory_mib: int = 2048,
    network: Literal["refuse", "allow"] = "allow",
) -> list[float]:
    """A number from 0 to 1 a row: what the task's scorer gives the answer.

    tagged: the answer is what stands in the last <answer> ... </answer>, and a response without it scores 0; else the
    whole response. cpu_seconds, memory_mib, network: of confined processes, as in `passes_tests`.
    """
    limits = (cpu_seconds, memory_mib, 1)
    check_limits(limits, network)
    scores = [WRONG] * len(responses)
    confined: dict[int, Asked] = {}
    for i, (response, task, entry) in enumerate(zip(responses, columns["task"], columns["entry"], strict=True)):
        answer = answer_in(response, tagged=tagged)
        if answer is None:
            continue
        if task["execute"]:
            confined[i] = (task, entry, answer)
        else:
            scores[i] = _score(task, entry, answer)
    if confined:
        found = _scored_apart(list(confined.values()), limits, refuse=network == "refuse")
        for i, score in zip(confined, found, strict=True):
            scores[i] = score
    return scores


def answer_in(response: str, *, tagged: bool) -> str | None:
    """Stripped. None of a response without tags, where there have to be some."""
    if not tagged:
        return response.strip()
    found = TAGGED.findall(response)
    return found[-1].strip() if found else None


def _score(task: Mapping[str, Any], entry: str, answer: str) -> float:
    """By a scorer that reads the answer alone. What it raises says that the answer cannot be read."""
    data = _data(task["name"], json.dumps(task["config"], sort_keys=True))
    try:
        return float(data.score_answer(answer, ast.literal_eval(entry)))
    except Exception as error:
        _say_once(f"reasoning-gym's scorer of {task['name']} raised {type(error).__name__}, which scores {WRONG:g}")
        return WRONG


@functools.cache
def _data(name: str, config: str) -> Any:
    """The task, whose rows are in the file already: of any seed."""
    from reasoning_gym.factory import create_dataset  # takes a second: for those who ask for it

    return create_dataset(name, seed=0, size=1, **json.loads(config))


def _scored_apart(asked: Sequence[Asked], limits: tuple[int, int, int], *, refuse: bool) -> list[float]:
    """By a confined process. Errors: RuntimeError where it does not begin."""
    token, seconds = secrets.token_hex(16), wall_seconds(limits)
    lines = [{"token": token, "seconds": seconds}]
    lines += [{"task": dict(task), "entry": entry, "answer": answer} for task, entry, answer in asked]
    given = "".join(json.dumps(line) + "\n" for line in lines)
    status, printed, said = run_confined(
        PROGRAM.read_text(encoding="utf-8"), given, limits, seconds=(len(asked) + 1) * seconds, refuse=refuse
    )
    told = [line.removeprefix(token).strip() for line in printed.splitlines() if line.startswith(token)]
    if not told:
        last = (said.splitlines() or [f"exit status {status}"])[-1]
        raise RuntimeError(f"the confined process that scores answers has not begun: {last}")
    found = [float(text) for text in told[1:]][: len(asked)]
    return found + [WRONG] * (len(asked) - len(found))


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)
