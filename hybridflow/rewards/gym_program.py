"""Scores answers to reasoning-gym's tasks whose scorers execute them: a program of `rewards.code`'s confined process.

Imports nothing of hybridflow. Standard input is JSON lines: {"token": ..., "seconds": ...}, then {"task": {...},
"entry": "a Python literal", "answer": ...} for each answer. It prints the token when it begins, and then a line
TOKEN SCORE for each answer. An answer is scored by a separate fork, which ends after so many seconds: 0 of one that
did not end by itself, or gave no number. An answer that executes can give itself any score.
"""

import ast
import json
import math
import os
import select
import signal
import sys


def main() -> None:
    import reasoning_gym  # once, for all answers: it takes a second

    first, *rest = [json.loads(line) for line in sys.stdin]
    print(first["token"], flush=True)
    for asked in rest:
        print(first["token"], score(reasoning_gym, asked, first["seconds"]), flush=True)


def score(package, asked, seconds):  # type: ignore[no-untyped-def]
    """Of one answer, by a fork."""
    near, far = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_score(package, asked, far)
        finally:  # whatever the answer has raised
            os._exit(0)
    os.close(far)
    there, _, _ = select.select([near], [], [], seconds)
    text = os.read(near, 64) if there else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(near)
    return number(text)


def write_score(package, asked, end):  # type: ignore[no-untyped-def]
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    data = package.create_dataset(asked["task"]["name"], seed=0, size=1, **asked["task"]["config"])
    found = float(data.score_answer(asked["answer"], ast.literal_eval(asked["entry"])))
    os.write(end, repr(found).encode())


def number(text):  # type: ignore[no-untyped-def]
    try:
        found = float(text)
    except ValueError:  # it has raised, was killed, or wrote something else
        return 0.0
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


if __name__ == "__main__":
    main()
