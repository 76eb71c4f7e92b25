"""Odd requests of agents at random: bodies that are nearly right, values of any kind in any place, broken bytes.

`python -m tests.agents.odd_requests --seed 7 --count 20000` sends more of them than the test does.
"""

import argparse
import copy
import json
import random
import select
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import httpx
import torch

from hybridflow.agents.sessions import Agents
from hybridflow.batch import PromptBatch
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations, EarlierTurns
from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.templates import ChatTemplate
from hybridflow.rollout.tool_calls import ToolCallParser
from tests.agents.test_sessions import GivenAgents
from tests.data.kinds_of_templates import KINDS, tokenizer_of
from tests.rollout.turn_rows import DrivenRows

NUM_ROWS, NUM_SENDERS = 1600, 8
CALL = '<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>'
SAID = ("seven", CALL, CALL * 2, f"<think>{CALL}</think>no", "<tool_call>{", "</think>", "\u2042", "<|im_end|> is it")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"n": {}}}}}
CALLS = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}]
PLAIN: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "name": "add", "content": "twelve"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 9,
    "stream": False,
    "stream_options": {"include_usage": True},
    "stop": None,
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": False},
}
TOKENS: dict[str, Any] = {"model": "policy", "token_ids": [40, 41], "sampling_params": {"max_tokens": 4, "n": 1}}
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**63,
        10**400,
        1e308,
        float("nan"),
        float("inf"),
        "",
        " ",
        "\ud83d",
        "\0",
        "a" * 5000,
    ),
    *(
        "assistant",
        "tool",
        "developer",
        "{",
        "[1",
        "{}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "<|im_end|>",
        "<think>",
        "auto",
        "required",
    ),
    *([], {}, [[]], [None], [{}], {"": None}, {"function": 1}, {"function": {"name": "x"}}, [TOOL, 5], CALLS, ["a", 1]),
    *(
        {"tokenize": True},
        {"messages": []},
        {"chat_template": "x"},
        {"conversation": 1},
        {"add_generation_prompt": False},
    ),
    *({"where": 1}, {"self": 1}, {"tools": 3}, {"bos_token": {"a": 1}}, {"content": "x", "role": "user"}),
    [{"type": "function", "function": {"name": "f", "parameters": "no schema"}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1], "required": "n"}}}],
    [{"type": "function", "function": {"name": "f", "description": {"a": 1}, "parameters": {"$ref": "#"}}}],
    [{"type": "image_url", "image_url": {"url": "x"}}],
)
KEYS = (
    *PLAIN,
    "n",
    "logprobs",
    "functions",
    "temperature",
    "refusal",
    "thinking",
    "weight",
    "role",
    "arguments",
    "id",
    "",
    "x",
)


def odd_bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """(path behind the row's URL, body), without an end."""
    rng = random.Random(seed)
    while True:
        by_tokens = rng.random() < 0.15
        body = copy.deepcopy(TOKENS if by_tokens else PLAIN)
        if rng.random() < 0.4:
            body = {key: value for key, value in body.items() if rng.random() < 0.7}
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            body = _changed(body, rng)
        if rng.random() < 0.02:
            body = _nested(rng.choice([50, 99, 150, 900, 20_000]), rng.random() < 0.5, body)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        yield ("inference/v1/generate" if by_tokens else "v1/chat/completions"), _broken(raw, rng)


def _changed(value: Any, rng: random.Random) -> Any:
    """With something odd in one place, at any depth."""
    odd = copy.deepcopy(rng.choice(ODD))
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return odd
    key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    way = rng.random()
    if way < 0.6:
        value[key] = _changed(value[key], rng)
    elif way < 0.75 and isinstance(value, dict):
        value[rng.choice(KEYS)] = odd
    elif way < 0.85:
        del value[key]
    elif isinstance(value, list):
        value.insert(key, copy.deepcopy(rng.choice(value)))
    else:
        value[key] = odd
    return value


def _nested(depth: int, lists: bool, body: Any) -> bytes:
    """As bytes: Python cannot write what is nested deeper than it calls."""
    opened, closed = ("[", "]") if lists else ('{"a":', "}")
    inner = f"{opened * depth}1{closed * depth}"
    return json.dumps({**(body if isinstance(body, dict) else {}), "tools": "HERE"}).replace('"HERE"', inner).encode()


def _broken(raw: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        place = rng.randrange(len(raw) + 1)
        return raw[:place] + rng.choice([b"", b"\xff", b"}", b"\0", b'"']) + raw[place + rng.choice([0, 1, 99]) :]
    return raw


class OddRows:
    """Rows of agents with a real door and real parsers. The engine stands in: it says something of `SAID`.

    Nobody asks in the last row.
    """

    def __init__(
        self,
        seed: int,
        earlier_turns: EarlierTurns,
        kind: str = "plain",
        says: Sequence[str] = SAID,
        num_rows: int = NUM_ROWS,
    ) -> None:
        self._says, self._num_rows = says, num_rows
        self._tokenizer, self._rng, self.seed = tokenizer_of(KINDS[kind]), random.Random(seed), seed
        end = end_of_turn(self._tokenizer)
        config = {"agent": "a:b", "earlier_turns": earlier_turns, "max_turns": 10**6, "call_seconds": 1e6}
        self.pool = GivenAgents(EnvironmentConfig(**config))
        self.pool.most_at_once = num_rows
        continues = Continuations.from_template(ChatTemplate(self._tokenizer), (), end, earlier_turns=earlier_turns)
        self._end = continues.end
        shared = Agents(
            self.pool,
            replace(continues, vocab_size=len(self._tokenizer)),
            partial(ToolCallParser, "hermes", self._tokenizer),
            self._tokenizer.decode,
            frozenset({continues.end}),
            rank=0,
            prompt_key="prompt",
            token=None,
            max_prompt_length=3000,
            max_model_len=9000,
        )
        prompts = PromptBatch(torch.zeros(0, dtype=torch.int64), torch.tensor([0]), ("",), {}, (None,))
        self.driven = DrivenRows(shared, prompts, num_rows, 6000)
        self.sessions = self.driven.answers
        self.ended: set[int] = set()

    def sent(self, count: int) -> Counter[tuple[int, str]]:
        """(status, code) of the answers to so many odd requests."""
        bodies, found = list(islice(odd_bodies(self.seed), count)), Counter[tuple[int, str]]()
        with ThreadPoolExecutor(NUM_SENDERS) as threads:
            parts = [threads.submit(self._send, bodies[i::NUM_SENDERS], i) for i in range(NUM_SENDERS)]
            while not all(part.done() for part in parts):
                self.step()
        for part in parts:
            found += part.result()
        return found

    def step(self) -> None:
        """What the engine does meanwhile. It has nothing else to do, and leaves the others their time."""
        select.select([self.sessions._server], [], [], 0.05)
        for reply in self.driven.events(wait=False):
            if reply.ends:
                self.ended.add(reply.row)
            elif not reply.drops:
                text = self._rng.choice(self._says)
                ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._end][: reply.max_tokens]
                cut = ids[-1] != self._end
                self.driven.said(reply.row, ids, truncated=cut, branch=reply.branch)

    def answer(self, row: int, body: dict[str, Any]) -> httpx.Response:
        """To one request."""
        with ThreadPoolExecutor(1) as thread, httpx.Client(timeout=60, trust_env=False) as client:
            found = thread.submit(client.post, f"{self.pool.urls[row]}/chat/completions", json=body)
            while not found.done():
                self.step()
        return found.result()

    def _send(self, bodies: list[tuple[str, bytes]], number: int) -> Counter[tuple[int, str]]:
        found, rng = Counter[tuple[int, str]](), random.Random(number)
        with httpx.Client(timeout=120, trust_env=False) as client:
            for path, body in bodies:
                there = [row for row in range(number, self._num_rows - 1, NUM_SENDERS) if row not in self.ended]
                row = rng.choice(there) if there else 0
                url = self.pool.urls[row].removesuffix("v1") + path
                while True:
                    answer = client.post(url, content=body, headers={"content-type": "application/json"})
                    told = answer.json()["error"]["code"] if answer.status_code != 200 else ""
                    found[answer.status_code, told] += 1
                    if told or rng.random() < 0.5 or not (goes_on := _goes_on(body, answer, rng)):
                        break
                    body = goes_on
        return found


def _goes_on(body: bytes, answer: httpx.Response, rng: random.Random) -> bytes:
    """The next request of a conversation, with a message that may be odd; nothing of tokens or a stream."""
    asked = json.loads(body)
    if asked.get("stream") or "message" not in answer.json()["choices"][0]:
        return b""
    more = copy.deepcopy(rng.choice(PLAIN["messages"]))
    more = _changed(more, rng) if rng.random() < 0.5 else more
    messages = [*asked["messages"], answer.json()["choices"][0]["message"], more]
    return json.dumps({**asked, "messages": messages}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--earlier-turns", choices=["refuse", "keep", "branch"], default="branch")
    parser.add_argument("--kind", choices=KINDS, default="plain")
    given = parser.parse_args()
    rows = OddRows(given.seed, given.earlier_turns, given.kind)
    for (status, code), count in sorted(rows.sent(given.count).items()):
        print(f"{status} {code or 'answered'}: {count}")


if __name__ == "__main__":
    main()
