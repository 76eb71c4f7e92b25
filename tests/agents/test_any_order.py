"""Agents that do at random what agents do: a row has what its agent was told, each answer behind what was asked.

Sub-agents ask at the same time, histories are cut, clients hang up and ask again. Server, sessions and turns are real;
the engine stands in, and draws tokens by the prompt and the seed.
"""

import itertools
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from hybridflow.agents.sessions import Agents
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.templates import ChatTemplate
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.engine import Request
from hybridflow.rollout.row import BEGINS, CUT, ENDED, SAMPLED, RolloutRow
from hybridflow.rollout.turns import Episode, LeaderBroadcast, NewRow, TurnTaking
from tests.agents.test_sessions import AGAIN, END_ID, TOKENIZER, GivenAgents
from tests.environments.tiny_chat import END

pytestmark = pytest.mark.thorough

MOST_PROMPT, MOST_BEHIND = 60, 140  # tokens
Talk = list[dict[str, str]]


@dataclass
class Told:
    """What an agent has seen: (the conversation's text, the answer). lost: of the conversations whose answer was."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)


class Client:
    """An agent of one row. ask: a message, or nothing where the request is refused."""

    def __init__(self, url: str, rng: random.Random, *, several: bool) -> None:
        self._url, self._rng, self._several, self.told = url, rng, several, Told()
        self._left: list[threading.Thread] = []

    def run(self) -> None:
        self._converse("1+1=", depth=0)
        for thread in self._left if self._rng.random() < 0.8 else ():
            thread.join()

    def _converse(self, begins: str, depth: int) -> None:
        messages = [{"role": "user", "content": begins}]
        for _ in range(self._rng.randint(1, 4)):
            answer = self._ask(messages)
            if answer is None:
                return
            messages = [*messages, answer, {"role": "user", "content": str(self._rng.randint(0, 99))}]
            if self._several and depth < 2 and self._rng.random() < 0.4:
                self._send_others(depth + 1)
            if self._several and self._rng.random() < 0.2:
                messages = [{"role": "user", "content": f"so {messages[-1]['content']}"}]

    def _send_others(self, depth: int) -> None:
        others = [
            threading.Thread(target=self._converse, args=(f"{self._rng.randint(0, 10**9)}+", depth))
            for _ in range(self._rng.randint(1, 3))
        ]
        for other in others:
            other.start()
        if self._rng.random() < 0.3:
            self._left += others
        else:
            for other in others:
                other.join()

    def _ask(self, messages: Talk) -> dict[str, str] | None:
        fate, headers = self._rng.choice(["taken"] * 6 + ["cut", "lost"]), {}
        while True:
            try:
                body, seconds = {"model": "policy", "messages": messages}, 0.03 if fate == "cut" else 60.0
                answer = httpx.post(f"{self._url}/chat/completions", json=body, headers=headers, timeout=seconds)
            except httpx.TimeoutException:
                fate = "lost"
            else:
                if answer.status_code != 200:
                    return None
            if fate != "lost":
                said = answer.json()["choices"][0]["message"]["content"]
                self.told.answers[text_of(messages), said] += 1
                return {"role": "assistant", "content": said}
            self.told.lost[text_of(messages)] += 1
            fate, headers = "taken", AGAIN


class Running(GivenAgents):
    """In the pool's place: agents run in threads."""

    def __init__(self, config: EnvironmentConfig, seed: int, *, several: bool) -> None:
        super().__init__(config)
        self.most_at_once, self._seed, self._several = random.Random(seed).choice([2, 8]), seed, several
        self.clients: dict[int, Client] = {}
        self._returned, self._threads = deque[tuple[int, Answer]](), list[threading.Thread]()

    def run(self, base_url: str, columns: Any) -> tuple[int, int]:
        row, ticket = int(base_url.split("/")[3].partition("-")[0]), len(self.clients)
        rng = random.Random(f"{self._seed},{row}")
        client = self.clients[row] = Client(base_url, rng, several=self._several)

        def go() -> None:
            client.run()
            problem = "the agent raised ValueError: on purpose" if rng.random() < 0.15 else ""
            self._returned.append((ticket, Answer({"reward": [float(row)]}, problem, 0.0, "")))

        self._threads.append(threading.Thread(target=go))
        self._threads[-1].start()
        return ticket, ticket

    def answers(self, seconds: float) -> dict[int, Answer]:
        return dict(self._returned.popleft() for _ in range(len(self._returned)))

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Until nobody asks any more."""
        for client in self.clients.values():
            self._threads += client._left
        while any(thread.is_alive() for thread in self._threads):
            meanwhile()


class Drawn:
    """In the engine's place. Each step ends some of the turns, also such as were aborted while it was under way."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._there, self._late = rng, dict[str, tuple[Request, int]](), dict[str, tuple[Request, int]]()

    def add(self, name: str, request: Request, params: Any, *, max_tokens: int) -> str:
        assert name not in self._there and 1 <= max_tokens <= MOST_PROMPT + MOST_BEHIND - len(request.prompt)
        self._there[name] = request, max_tokens
        return name

    def abort_all(self) -> list[tuple[str, RolloutRow]]:
        """Each turn has some of its tokens."""
        there, self._there = self._there, {}
        found = [(name, self._drawn(*asked)) for name, asked in there.items()]
        parts = [(name, ids[: self._rng.randrange(len(ids))]) for name, ids in found]
        return [
            (
                name,
                RolloutRow(ids, log_probs_of(ids), experts=experts_of([*there[name][0].prompt, *ids]) if ids else None),
            )
            for name, ids in parts
        ]

    def _drawn(self, request: Request, most: int) -> list[int]:
        draw = random.Random(f"{request.prompt}{request.seed}")
        token_ids = [draw.randint(4, 13) for _ in range(draw.randint(1, 3))]
        return [*token_ids, *([END_ID] if draw.random() < 0.85 else [])][:most]

    def abort(self, name: str) -> None:
        self._late[name] = self._there.pop(name)

    most_rows = 1 << 30

    @property
    def is_busy(self) -> bool:
        return bool(self._there)

    def step(self) -> Iterator[Any]:
        late, self._late = self._late, {}
        ended = {name: self._there.pop(name) for name in list(self._there) if self._rng.random() < 0.4}
        for name, (request, most) in {**late, **ended}.items():
            token_ids = self._drawn(request, most)
            state = ENDED if token_ids[-1] == END_ID else CUT
            experts = experts_of([*request.prompt, *token_ids])
            response = RolloutRow(token_ids, log_probs_of(token_ids), state=state, experts=experts)
            yield SimpleNamespace(request_id=name, num_cached_tokens=0, outputs=[response])

    def response(self, output: RolloutRow, num_before: int, name: str) -> RolloutRow:
        assert output.experts is not None and len(output.experts) == num_before + len(output.token_ids) - 1
        return output

    def wait_until_idle(self) -> None:
        assert not self._there


def experts_of(token_ids: list[int]) -> torch.Tensor:
    """(tokens - 1, 1, 2): each token that a request has read, and the token's place."""
    return torch.tensor([[[token, place]] for place, token in enumerate(token_ids)])[:-1]


def log_probs_of(token_ids: list[int]) -> list[float]:
    return [-token / 10 for token in token_ids]


def text_of(messages: Talk) -> str:
    return "".join(f"<|{each['role']}|>{each['content']}{END}" for each in messages) + "<|assistant|>"


def turns_of(response: RolloutRow) -> Counter[tuple[str, str]]:
    """(all of the sequence before it, what the model said there), of all turns of a row."""
    found = Counter[tuple[str, str]]()
    starts = [at for at, flag in enumerate(response.flags) if flag & BEGINS]
    bounds = [0, *starts, len(response.token_ids)]
    for start, end in itertools.pairwise(bounds):
        ids, flags, log_probs = (each[start:end] for each in (response.token_ids, response.flags, response.log_probs))
        sampled = [bool(flag & SAMPLED) for flag in flags]
        assert log_probs == [-token / 10 if by else 0.0 for token, by in zip(ids, sampled, strict=True)]
        begins = [at for at, by in enumerate(sampled) if by and not (at and sampled[at - 1])]
        for at in begins:
            stop = next((place for place in range(at, len(ids)) if not sampled[place]), len(ids))
            said = ids[at : stop - 1] if ids[stop - 1] == END_ID else ids[at:stop]
            found[TOKENIZER.decode(ids[:at]), TOKENIZER.decode(said)] += 1
        assert begins, "a sequence in which the model says nothing is none"
        read = max(at for at, by in enumerate(sampled) if by)  # the last of the model's tokens is in no request
        experts = response.experts[start:end]
        assert torch.equal(experts[:read], experts_of(ids)[:read]) and not experts[read:].any()
    return found


def with_stops(taking: TurnTaking, engine: Drawn, rows: list[NewRow]) -> dict[int, RolloutRow]:
    """Two rows begin with each version of the actor, while there are any."""
    found, left = dict[int, RolloutRow](), rows
    for version in itertools.count():
        some, left = left[:2], left[2:]
        new = {(row.name, 0): row for row in some}
        ended = taking.until_whole(engine, [None], new, number=1, urgent=set(), version=version)
        found |= {row: response for (row, _), response in ended.items()}
        for response in ended.values():
            assert max(response.versions) <= version and len(response.versions) == len(response.token_ids)
        if len(found) == len(rows):
            return found
    raise AssertionError


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_row_has_what_its_agent_was_told(seed: int, stops: bool) -> None:
    """Each answer that a client has, behind the text that it asked with; beside these only answers that it lost.

    stops: the engine stops when a row has ended, within turns of others, and goes on with another version.
    """
    rng, several = random.Random(seed), seed % 4 != 0
    how = {"earlier_turns": "branch"} if several else {}
    pool = Running(
        EnvironmentConfig(**{"agent": "a:b", "max_turns": rng.choice([4, 30]), **how}), seed, several=several
    )
    continues = Continuations.from_template(
        ChatTemplate(TOKENIZER), (), END_ID, earlier_turns=pool.config.earlier_turns
    )
    limits = (MOST_PROMPT, MOST_PROMPT + MOST_BEHIND)
    agents = Agents(pool, continues, None, TOKENIZER.decode, frozenset({END_ID}), 0, "prompt", None, *limits)
    taking = TurnTaking(agents, LeaderBroadcast(None, 0), room=1 << 30)
    episode = Episode({}, None, MOST_BEHIND, "")
    rows = [NewRow(Request([], seed=row), episode, row) for row in range(rng.randint(1, 6))]
    if stops:
        found = with_stops(taking, Drawn(rng), rows)
    else:
        found = dict(taking.stream(Drawn(rng), rows, [None]))
    pool.wait(meanwhile=taking._answers.end)
    agents.server.close()
    assert sorted(found) == list(range(len(rows)))
    for row, response in found.items():
        if math.isnan(response.rewards[0]):
            assert not any(response.flags), "a row that has failed"
            continue
        told, has = pool.clients[row].told, turns_of(response)
        assert not told.answers - has
        assert not Counter(text for text, _ in (has - told.answers).elements()) - told.lost
