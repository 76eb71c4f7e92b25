"""What rows of agents answer to requests in an order that no agent can be relied on for: a real door, given turns."""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from hybridflow.agents.sessions import Agents, Sessions
from hybridflow.batch import PromptBatch
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.templates import ChatTemplate
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.row import ENDED, RolloutRow
from hybridflow.rollout.rows import TurnEvent
from tests.environments.tiny_chat import END, make_tokenizer
from tests.rollout.turn_rows import DrivenRows

TOKENIZER = make_tokenizer()
END_ID = TOKENIZER.convert_tokens_to_ids(END)
USER = {"role": "user", "content": "1+1="}
AGAIN = {"x-stainless-retry-count": "1"}


class GivenAgents:
    """In the pool's place: what its agents return is given, and what they are told is kept."""

    most_at_once = 8

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config, self.urls, self.returned, self.finished = config, [], {}, []
        self._readable, _ = os.pipe()

    def fileno(self) -> int:
        return self._readable

    def start_processes(self) -> list[Answer]:
        return []

    def set_aside(self, tickets: Any) -> None:
        """Nobody else asks for them here."""

    take_back = set_aside

    def run(self, base_url: str, columns: Any) -> tuple[int, int]:
        self.urls.append(base_url)
        return len(self.urls) - 1, len(self.urls) - 1

    def finish(self, row: int) -> None:
        self.finished.append(row)

    def answers(self, seconds: float) -> dict[int, Answer]:
        found, self.returned = self.returned, {}
        return found


def driven(shared: Agents, count: int, *, room: int = 1 << 30) -> DrivenRows:
    """So many rows of one prompt, which their agents bring."""
    prompt = PromptBatch(torch.zeros(0, dtype=torch.int64), torch.tensor([0]), ("",), {"answer": ("2",)}, (None,))
    return DrivenRows(shared, prompt, count, 32, room=room)


class Rows:
    """Sessions of some rows of one prompt, and the requests to them."""

    def __init__(self, count: int = 1, *, room: int = 100, **more: Any) -> None:
        self.pool = GivenAgents(EnvironmentConfig(**{"agent": "a:b", **more}))
        earlier_turns = self.pool.config.earlier_turns
        continues = Continuations.from_template(ChatTemplate(TOKENIZER), (), END_ID, earlier_turns=earlier_turns)
        self.shared = shared = Agents(
            self.pool,
            replace(continues, vocab_size=100),
            None,
            TOKENIZER.decode,
            frozenset({END_ID}),
            rank=0,
            prompt_key="prompt",
            token=None,
            max_prompt_length=16,
            max_model_len=64,
        )
        self.driven = driven(shared, count, room=room)
        self.sessions: Sessions = self.driven.answers
        self.door, self.threads = shared.server, ThreadPoolExecutor(10)
        assert self.driven.rows.take_events() == []

    def ask(
        self, *messages: Any, row: int = 0, headers: Any = None, client: Any = httpx, **more: Any
    ) -> Future[httpx.Response]:
        url = f"{self.pool.urls[row]}/chat/completions"
        body = {"model": "gpt", "messages": list(messages), **more}
        return self.threads.submit(client.post, url, json=body, headers=headers, timeout=60)

    def ask_tokens(self, token_ids: Any, row: int = 0, **sampling: Any) -> Future[httpx.Response]:
        url = f"{self.pool.urls[row].removesuffix('/v1')}/inference/v1/generate"
        body = {"model": "policy", "token_ids": token_ids, "sampling_params": {"logprobs": 1, **sampling}}
        return self.threads.submit(httpx.post, url, json=body, timeout=60)

    def replies(self) -> list[TurnEvent]:
        return self.driven.events(wait=True)


@pytest.fixture()
def rows() -> Iterator[Rows]:
    made = Rows()
    yield made
    made.door.close()
    made.threads.shutdown()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


FIRST = ids(f"<|user|>1+1={END}<|assistant|>")


def said(answer: Future[httpx.Response]) -> dict[str, Any]:
    found = answer.result(60)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


def test_a_request_is_tokens_and_a_limit(rows: Rows) -> None:
    first = rows.ask(USER, max_tokens=5)
    assert rows.replies() == [TurnEvent(0, FIRST, 5)]
    rows.driven.said(0, ids(f"3{END}"), truncated=False)
    message = said(first)
    assert (message["role"], message["content"]) == ("assistant", "3")
    assert first.result().json()["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    rows.ask(USER, message, {"role": "user", "content": "no"})
    more = ids(f"<|user|>no{END}<|assistant|>")
    assert rows.replies() == [TurnEvent(0, more, 32 - 2 - len(more))]
    rows.driven.said(0, ids("45"), truncated=True)
    rows.pool.returned = {0: Answer({"reward": [1.5]}, "", 0.0, "")}
    assert rows.replies() == [TurnEvent(0, ends=True, truncated=True, rewards=(1.5,))]
    assert rows.pool.finished == [0]


def test_a_text_that_is_no_text_is_refused(rows: Rows) -> None:
    """Half of a surrogate pair, which JSON can write: a tool's result that was cut."""
    body = b'{"model": "gpt", "messages": [{"role": "user", "content": "\\ud83d"}]}'
    replies = rows.threads.submit(rows.replies)
    answer = httpx.post(f"{rows.pool.urls[0]}/chat/completions", content=body, timeout=60)
    assert answer.status_code == 400 and "which is no character" in answer.text
    rows.ask(USER)
    assert replies.result(60) == [TurnEvent(0, FIRST, 32)]


def test_a_request_may_be_token_ids(rows: Rows) -> None:
    """All of a row each time: what is behind the row's own tokens is new. Then the agent goes on with tokens alone."""
    first = rows.ask_tokens(list(FIRST), max_tokens=3, temperature=0.2)
    assert rows.replies() == [TurnEvent(0, FIRST, 3)]
    own = ids(f"3{END}")
    rows.driven.say(0, RolloutRow(list(own), [-0.25, -1.5], state=ENDED))
    body = first.result(60).json()
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9} and body["request_id"]
    assert body["choices"] == [
        {
            "index": 0,
            "token_ids": list(own),
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {"token": f"token_id:{own[0]}", "token_id": own[0], "logprob": -0.25},
                    {"token": f"token_id:{own[1]}", "token_id": own[1], "logprob": -1.5},
                ]
            },
        }
    ]
    more = ids(f"<|user|>no{END}<|assistant|>")
    second = rows.ask_tokens([*FIRST, *own, *more])
    assert rows.replies() == [TurnEvent(0, more, 32 - 2 - len(more))]
    rows.driven.said(0, ids("45"), truncated=True)
    assert second.result(60).json()["choices"][0]["finish_reason"] == "length"
    rows.ask(USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no"})
    [reply] = rows.replies()
    assert reply.failed, "the row's messages are not known"


@pytest.mark.parametrize(
    ("token_ids", "sampling", "problem"),
    [
        ("1 2", {}, "token_ids = '1 2': is no list of token ids"),
        ([], {}, "token_ids = []: is no list of token ids"),
        ([3, -1], {}, "token_ids = [3, -1]: is no list of token ids"),
        ([3, 99, 100], {}, "the request has the token id 100, the model knows those from 0 to vocab_size - 1 = 99"),
        ([3], {"n": 2}, "sampling_params.n = 2: is refused: a request is one turn of a row"),
        ([3], {"max_tokens": 0}, "max_tokens = 0: is no number of tokens from 1 on"),
    ],
)
def test_a_request_of_tokens_that_makes_no_sense_is_refused(
    token_ids: Any, sampling: dict[str, Any], problem: str, rows: Rows
) -> None:
    refused = rows.ask_tokens(token_ids, **sampling)
    while not refused.done():
        rows.driven.events(wait=False)
    assert refused.result().status_code == 400 and refused.result().json()["error"]["message"] == problem


def test_token_ids_that_are_not_the_rows_fail_the_row(rows: Rows) -> None:
    """Such as those of a client that has encoded the model's turn again."""
    rows.ask_tokens(list(FIRST))
    rows.replies()
    rows.driven.said(0, ids(f"3{END}"), truncated=False)
    other = rows.ask_tokens([*FIRST, *ids(f"4{END}<|user|>no{END}<|assistant|>")])
    [reply] = rows.replies()
    assert reply.failed
    message = other.result(60).json()["error"]["message"]
    assert message.startswith("the request does not continue the row: its token_ids have to begin with the 9 tokens")


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_row_without_a_token_left_is_cut_whatever_its_agent_raises(by_tokens: bool, rows: Rows) -> None:
    own, more = ids(f"3{END}"), "0" * 32
    first = rows.ask_tokens(list(FIRST)) if by_tokens else rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    rows.driven.said(0, own, truncated=False)
    assert first.result(60).status_code == 200
    if by_tokens:
        second = rows.ask_tokens([*FIRST, *own, *ids(f"<|user|>{more}{END}<|assistant|>")])
    else:
        second = rows.ask(USER, said(first), {"role": "user", "content": more})
    while not second.done():
        assert rows.driven.events(wait=False) == []
    assert second.result().status_code == 400
    assert second.result().json()["error"]["code"] == "context_length_exceeded"
    rows.pool.returned = {0: Answer(None, "the agent raised BadRequestError: ", 0.0, "")}
    assert rows.replies() == [TurnEvent(0, ends=True, truncated=True, rewards=(0.0,))]


def test_a_second_request_while_the_model_answers_fails_the_row(rows: Rows) -> None:
    rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    second = rows.ask(USER, USER)
    [reply] = rows.replies()
    assert (reply.ends, reply.failed, reply.drops, reply.token_ids) == (True, True, True, (END_ID, END_ID))
    assert all(math.isnan(reward) for reward in reply.rewards)
    assert "a second request while the model answers one" in second.result(60).json()["error"]["message"]


def test_a_request_that_comes_again_takes_the_place_of_the_first(rows: Rows) -> None:
    """While the model answers, and after its answer was lost."""
    first = rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    rows.ask(USER, headers=AGAIN)
    assert rows.replies() == [TurnEvent(0, drops=True), TurnEvent(0, FIRST, 32)]
    assert first.result(60).json()["error"]["code"] == "repeated"
    rows.driven.said(0, ids(f"3{END}"), truncated=False)
    third = rows.ask(USER, headers=AGAIN)
    assert rows.replies() == [TurnEvent(0, drops=True), TurnEvent(0, FIRST, 32)]
    rows.driven.said(0, ids(f"4{END}"), truncated=False)
    assert said(third)["content"] == "4"


def test_an_answer_is_no_answer_to_another_request(rows: Rows) -> None:
    """The same request of a client that is still there: which of two answers counts is not known."""
    with httpx.Client(timeout=60) as client:
        rows.ask(USER, client=client)
        rows.replies()
        rows.driven.said(0, ids(f"3{END}"), truncated=False)
        again = rows.ask(USER)
        [reply] = rows.replies()
    assert reply.failed and not reply.drops and reply.token_ids == ()
    assert again.result(60).json()["error"]["code"] == "no_continuation"


def test_a_client_that_has_left_may_ask_the_same_again(rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    """It has lost its patience while the answer was on the way, and says nothing of it."""
    first = rows.ask(USER)
    rows.replies()
    speak(rows, THREE)
    first.result(60)  # its connection ends with that
    again = rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, drops=True), TurnEvent(0, FIRST, 32)]
    speak(rows, FOUR)
    assert said(again)["content"] == "4"
    assert "asks the same again: the row has the later answer alone" in capsys.readouterr().err


def test_an_agent_that_returns_while_the_model_answers_ends_the_turn(rows: Rows) -> None:
    asked = rows.ask(USER)
    rows.replies()
    rows.driven.said(0, ids(f"3{END}"), truncated=False)
    rows.ask(USER, said(asked), {"role": "user", "content": "no"})
    rows.replies()
    rows.pool.returned = {0: Answer({"reward": [1.0]}, "", 0.0, "")}
    assert rows.replies() == [TurnEvent(0, ends=True, rewards=(1.0,), drops=True)]


def test_a_row_that_has_ended_answers_nobody() -> None:
    rows = Rows(2)
    rows.pool.returned = {1: Answer(None, "the agent raised ValueError: ", 0.0, "")}
    [reply] = rows.replies()
    assert (reply.row, reply.failed, reply.token_ids) == (1, True, (END_ID, END_ID))
    late = rows.ask(USER, row=1)
    while not late.done():
        assert rows.driven.events(wait=False) == []
    rows.ask(USER, row=0)
    assert [reply.row for reply in rows.replies()] == [0]
    assert late.result(60).json()["error"]["code"] == "row_ended"
    rows.door.close()


def test_rows_that_are_left_when_a_rollout_has_no_time_left_fail() -> None:
    """One that the model answers, one whose agent is expected, one whose agent does not run yet; one has ended."""
    rows = Rows(4, rollout_seconds=1.0)
    rows.pool.most_at_once = 3
    for row in (0, 2):
        rows.ask(USER, row=row)
        assert rows.replies() == [TurnEvent(row, FIRST, 32)]
    rows.driven.said(2, THREE, truncated=False)
    rows.pool.returned = {2: Answer({"reward": [1.0]}, "", 0.0, "")}
    assert rows.replies() == [TurnEvent(2, ends=True, rewards=(1.0,))]
    failed: list[TurnEvent] = []
    while len(failed) < 3:
        failed += rows.replies()
    assert [(reply.row, reply.failed, reply.drops) for reply in failed] == [
        (0, True, True),
        (1, True, False),
        (3, True, False),
    ]
    assert rows.driven.events(wait=False) == [] and rows.pool.finished == [2, 0, 1, 3]
    rows.door.close()


@pytest.mark.slow
def test_times_are_looked_at() -> None:
    """Between an answer and the next request, and of the whole row while the model answers."""
    for limit, asks in (({"call_seconds": 1.0}, False), ({"row_seconds": 5.0}, True)):
        rows = Rows(**limit)
        if asks:
            rows.ask(USER)
            assert rows.replies() == [TurnEvent(0, FIRST, 32)]
        [reply] = rows.replies()
        assert reply.failed and reply.drops == asks
        rows.door.close()


NO = {"role": "user", "content": "no"}
THREE, FOUR = ids(f"3{END}"), ids(f"4{END}")
OTHER = {"role": "user", "content": "2+2="}
SECOND = ids(f"<|user|>2+2={END}<|assistant|>")
MORE = ids(f"<|user|>no{END}<|assistant|>")


@pytest.fixture()
def branching() -> Iterator[Rows]:
    made = Rows(earlier_turns="branch")
    yield made
    made.door.close()
    made.threads.shutdown()


def speak(rows: Rows, token_ids: tuple[int, ...], branch: int = 0, *, truncated: bool = False) -> None:
    rows.driven.said(0, token_ids, truncated=truncated, branch=branch)


def test_another_conversation_begins_a_branch_and_each_goes_on_by_itself(branching: Rows) -> None:
    """A sub-agent asks while the model answers the agent; 48 tokens are in each sequence."""
    main = branching.ask(USER)
    assert branching.replies() == [TurnEvent(0, FIRST, 48 - len(FIRST))]
    sub = branching.ask(OTHER)
    assert branching.replies() == [TurnEvent(0, SECOND, 48 - len(SECOND), branch=1)]
    speak(branching, FOUR, 1)
    speak(branching, THREE)
    assert (said(main)["content"], said(sub)["content"]) == ("3", "4")
    assert sub.result().json()["usage"]["prompt_tokens"] == len(SECOND)
    branching.ask(OTHER, said(sub), NO)
    assert branching.replies() == [TurnEvent(0, MORE, 48 - len(SECOND) - 2 - len(MORE), branch=1)]
    branching.ask(USER, said(main), NO)
    assert branching.replies() == [TurnEvent(0, MORE, 48 - len(FIRST) - 2 - len(MORE))]
    speak(branching, FOUR, 1)
    speak(branching, THREE)
    branching.pool.returned = {0: Answer({"reward": [1.5]}, "", 0.0, "")}
    assert branching.replies() == [TurnEvent(0, ends=True, rewards=(1.5,))]


def test_a_shortened_history_begins_a_branch(branching: Rows) -> None:
    main = branching.ask(USER)
    branching.replies()
    speak(branching, THREE)
    summary = {"role": "user", "content": f"said {said(main)['content']}"}
    branching.ask(summary)
    begins = ids(f"<|user|>said 3{END}<|assistant|>")
    assert branching.replies() == [TurnEvent(0, begins, 48 - len(begins), branch=1)]
    speak(branching, FOUR, 1, truncated=True)
    branching.pool.returned = {0: Answer({"reward": [1.0]}, "", 0.0, "")}
    assert branching.replies() == [TurnEvent(0, ends=True, truncated=True, rewards=(1.0,))]


def test_token_ids_go_on_with_the_longest_branch_that_they_begin_with(branching: Rows) -> None:
    branching.ask_tokens(list(FIRST))
    branching.replies()
    speak(branching, THREE)
    branching.ask_tokens(list(FIRST[:-1]))
    assert branching.replies() == [TurnEvent(0, FIRST[:-1], 48 - len(FIRST) + 1, branch=1)]
    speak(branching, FOUR, 1)
    branching.ask_tokens([*FIRST, *THREE, *MORE])
    assert branching.replies() == [TurnEvent(0, MORE, 48 - len(FIRST) - 2 - len(MORE))]


def test_a_request_that_comes_again_is_no_branch(branching: Rows) -> None:
    branching.ask(USER)
    branching.replies()
    branching.ask(OTHER)
    branching.replies()
    branching.ask(OTHER, headers=AGAIN)
    assert branching.replies() == [TurnEvent(0, drops=True, branch=1), TurnEvent(0, SECOND, 48 - len(SECOND), branch=1)]


def test_of_equal_requests_none_is_taken_for_another(branching: Rows) -> None:
    """One of three clients that ask the same asks again: which of the answers was lost is not known."""
    first, second = branching.ask(OTHER), branching.ask(OTHER)
    while len(branching.sessions._by_number[0].open_requests) < 2:
        branching.driven.events(wait=False)
    branching.ask(OTHER, headers=AGAIN)
    [reply] = branching.replies()
    assert (reply.branch, reply.drops) == (2, False)
    speak(branching, THREE, 0)
    speak(branching, FOUR, 1)
    assert {said(first)["content"], said(second)["content"]} == {"3", "4"}


def test_a_turn_that_was_dropped_is_none_of_the_rows() -> None:
    rows = Rows(max_turns=1)
    rows.ask(USER)
    rows.replies()
    rows.ask(USER, headers=AGAIN)
    assert rows.replies() == [TurnEvent(0, drops=True), TurnEvent(0, FIRST, 32)]
    rows.door.close()


def test_an_agent_that_raises_before_it_has_an_answer_fails_its_row(branching: Rows) -> None:
    """Its requests were too many; nothing is left of the row to train on."""
    for number in range(9):
        branching.ask({"role": "user", "content": str(number)})
        while branching.sessions._by_number[0].number < min(number + 1, 8):
            branching.driven.events(wait=False)
    while not branching.sessions._by_number[0].spent:
        branching.driven.events(wait=False)
    branching.pool.returned = {0: Answer(None, "the agent raised BadRequestError: ", 0.0, "")}
    [reply] = branching.replies()
    assert reply.failed and reply.drops and reply.token_ids == (END_ID, END_ID)


def test_a_row_that_recovers_is_not_cut(branching: Rows) -> None:
    """Its request has no room, and a shortened one has."""
    main = branching.ask(USER)
    branching.replies()
    speak(branching, THREE)
    said(main)
    refused = branching.ask({"role": "user", "content": "1" * 60})
    while not refused.done():
        branching.driven.events(wait=False)
    error = refused.result().json()["error"]
    assert error["code"] == "context_length_exceeded" and "no token is left for an answer" in error["message"]
    branching.ask(OTHER)
    assert [reply.branch for reply in branching.replies()] == [1]
    speak(branching, FOUR, 1)
    branching.pool.returned = {0: Answer({"reward": [1.0]}, "", 0.0, "")}
    assert branching.replies() == [TurnEvent(0, ends=True, rewards=(1.0,))]


def test_the_turns_of_all_branches_count(branching: Rows) -> None:
    """And a row that ends while the model answers drops what nobody waits for."""
    for number in range(8):
        branching.ask({"role": "user", "content": str(number)})
        [reply] = branching.replies()
        assert reply.branch == number
    refused = branching.ask({"role": "user", "content": "8"})
    while not refused.done():
        branching.driven.events(wait=False)
    assert refused.result().json()["error"]["code"] == "turns_used_up"
    speak(branching, THREE, 3)
    branching.pool.returned = {0: Answer({"reward": [1.0]}, "", 0.0, "")}
    assert branching.replies() == [TurnEvent(0, ends=True, truncated=True, rewards=(1.0,), drops=True)]


def test_what_would_be_a_branch_is_told_where_rows_have_none(rows: Rows) -> None:
    rows.ask(USER)
    rows.replies()
    refused = rows.ask(OTHER)
    assert rows.replies()[0].failed
    message = refused.result(60).json()["error"]["message"]
    assert message.endswith("data.environment.earlier_turns: branch begins another sequence of the row then")


LOST = Answer(None, "the process that called it ended with status 3", 0.0, "", lost=True)


def test_an_agent_starts_again_where_its_process_ends_before_the_model_has_answered() -> None:
    """With its URL and its room; once it has an answer, the row fails."""
    rows = Rows()
    rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    rows.pool.returned = {0: LOST}
    assert rows.replies() == [TurnEvent(0, drops=True)] and len(rows.pool.urls) == 2
    assert rows.pool.urls[0] == rows.pool.urls[1] and rows.pool.finished == [0]
    first = rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    rows.driven.said(0, THREE, truncated=False)
    assert said(first)["content"] == "3"
    rows.pool.returned = {1: LOST}
    [reply] = rows.replies()
    assert reply.failed and rows.pool.finished == [0, 1]
    rows.door.close()


def test_agents_run_when_the_engine_has_room() -> None:
    """An agent that has not asked yet is about to."""
    rows = Rows(3, room=1)
    rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)] and len(rows.pool.urls) == 1
    rows.driven.said(0, THREE, truncated=False)
    assert rows.driven.events(wait=False) == [] and len(rows.pool.urls) == 2
    rows.door.close()


def test_requests_wait_while_the_engine_does_something_else() -> None:
    """Nobody else gets them: not those who talk to other rows at the same server, as an evaluation does."""
    rows = Rows(3, call_seconds=10.0)
    waits = rows.ask(USER)
    assert rows.replies() == [TurnEvent(0, FIRST, 32)]
    url = urlsplit(f"{rows.pool.urls[1]}/chat/completions")
    leaves = HTTPConnection(str(url.hostname), url.port)
    leaves.request("POST", url.path, json.dumps({"model": "gpt", "messages": [USER]}))
    assert rows.replies() == [TurnEvent(1, FIRST, 32)]
    for row in (0, 1):
        rows.driven.rows[row].hear(0, ids("3"), [-0.5], ends=False)
    rows.sessions.pause()
    asks = rows.ask(USER, row=2)
    meanwhile = driven(rows.shared, 1)
    evaluated = rows.ask(USER, row=3)
    assert [event.row for event in meanwhile.events(wait=True)] == [0]
    meanwhile.said(0, ids(f"5{END}"), truncated=False)
    assert said(evaluated)["content"] == "5"
    leaves.close()
    for record in rows.driven.rows.records:  # as if it had taken long
        record.begun -= 60
        record.waiting_since = None if record.waiting_since is None else record.waiting_since - 60
    rows.sessions._times.paused -= 60
    rows.pool.returned[3] = Answer({"reward": [1.0]}, "", 0.0, "")
    assert [event.row for event in meanwhile.events(wait=True)] == [0] and not asks.done()
    meanwhile.answers.end()
    rows.sessions.resume()
    events = {event.row: event for event in rows.replies()}
    while len(events) < 2:
        events |= {event.row: event for event in rows.replies()}
    assert events == {1: TurnEvent(1, drops=True), 2: TurnEvent(2, FIRST, 32)}, "none has failed"
    assert rows.driven.rows[1].branches[0].token_ids == []
    rows.driven.rows.hear(0, 0, ids(f"4{END}"), [-0.5] * 2)
    rows.sessions.on_turn_end(rows.driven.rows[0], 0, RolloutRow(list(ids(f"34{END}")), [-0.5] * 3, state=ENDED))
    assert said(waits)["content"] == "34" and waits.result().json()["usage"]["completion_tokens"] == 3
    rows.driven.said(2, ids(f"6{END}"), truncated=False)
    assert said(asks)["content"] == "6"
    rows.door.close()
    rows.threads.shutdown()
