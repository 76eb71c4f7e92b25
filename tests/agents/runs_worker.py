"""As rollouts_worker, with agents for classes: python -m tests.agents.runs_worker CONFIG OUT CASE ..."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.agents.addresses import own_address
from tests.environments import rollouts_worker

USERS = "tests.agents.agents_of_users"
ONE = "num_iterations=1"


def named(name: str, **more: Any) -> str:
    return "data.environment=" + json.dumps({"agent": f"{USERS}:{name}", "num_workers": 2, **more})


TALK = {"max_turn_tokens": 16}
SHORT = {"max_turn_tokens": 8}
EACH_ALONE = {"num_workers": 10, "concurrency": 1}  # a process that dies takes all its rows along; more than rows
TWO_EACH = "sampling={samples_per_prompt: 2, max_response_length: 160}"
CRITIC = "critic={model: DIRECTORY/critic, dtype: float32, optimizer: {lr: 0.001}}"
PROMPTS = ("data.train=DIRECTORY/prompts.jsonl", "data.heldout=null")
WRONG = {
    "asks for nothing": "turn 0: the agent returned before the model had answered a request",
    "asks for two": "n = 2: is refused, as the model samples as the experiment says",
    "another conversation": "turn 1: the request does not continue the row's conversation",
    "other tools": "turn 1: the request has other tools than the row's first one",
    "two at once": "turn 1: ",
    "too long": "the request has 55 tokens, more than data.max_prompt_length = 32",
    "returns a text": "turn 1: the agent returned 'a text'; expected a finite number as the reward",
}
CASES = {
    "calculator": [named("calculator", **TALK)],
    "calculator again": [named("calculator", **TALK)],
    "calculator at tp 2": [
        named("calculator", arguments={"delay": 0.05}, concurrency=3, **TALK),
        "actor.tensor_parallel_size=2",
    ],
    "leaves at tp 2": [named("leaves", max_turn_tokens=48), "actor.tensor_parallel_size=2", ONE],
    "streamed": [named("streamed", parts={"tokens": 0.5, "one": 1.0}), ONE],
    "given prompt": [named("given_prompt", prompt="column", **TALK), *PROMPTS, ONE],
    "other prompt": [named("streamed", prompt="column", on_error="end_run"), *PROMPTS, ONE],
    "fragile": [named("fragile", call_seconds=15, **SHORT, **EACH_ALONE), TWO_EACH, ONE],
    "fragile ends": [named("fragile", on_error="end_run", call_seconds=15, **SHORT, **EACH_ALONE), TWO_EACH, ONE],
    **{
        f"wrong {number}": [named("wrong", arguments={"what": what}, on_error="end_run", **SHORT), ONE]
        for number, what in enumerate(WRONG)
    },
    "leaves": [named("leaves", max_turn_tokens=48), ONE],
    "few turns": [named("endless", max_turns=3, **SHORT), ONE],
    "few tokens": [named("endless", max_turns=99, **SHORT), ONE],
    "late": [named("blocks", call_seconds=1.0), ONE],
    "silent": [named("sometimes_silent", **TALK), ONE],
    "ppo": [named("calculator", **TALK), rollouts_worker.PPO, CRITIC, ONE],
    "dynamic": [named("calculator", **TALK), rollouts_worker.DYNAMIC],
    "evaluated": [named("calculator", **TALK), "metrics.eval_interval=1", ONE],
}
ADDRESS = own_address()
WORD = "DIRECTORY/word.txt"
if ADDRESS is not None:  # a host without a network has none
    listens = {"listen": ADDRESS, "token_file": WORD, "parts": {"tokens": 1.0, "refused": 1.0}}
    CASES["elsewhere"] = [named("with_word", arguments={"file": WORD, "address": ADDRESS}, **listens, **TALK), ONE]


def main(config: Path, out: Path, names: list[str]) -> None:
    directory = str(config.parent)
    cases = {name: [one.replace("DIRECTORY", directory) for one in CASES[name]] for name in names}
    rollouts_worker.run(config, out, cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
