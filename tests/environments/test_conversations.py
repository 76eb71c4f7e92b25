"""What rows of a class answer to messages that the model cannot read: a pool whose answers are given."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.batch import PromptBatch
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.templates import ChatTemplate
from hybridflow.environments import time_limits
from hybridflow.environments.conversations import Environments
from hybridflow.environments.time_limits import TimeLimits
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.rows import TurnEvent
from tests.environments.tiny_chat import END, TEMPLATE, make_tokenizer
from tests.rollout.turn_rows import DrivenRows

RAISES = "{%- if messages[-1].content == 'raise' -%}{{ raise_exception('on purpose') }}{%- endif -%}" + TEMPLATE
TOKENIZER = make_tokenizer(RAISES)
END_ID = TOKENIZER.convert_tokens_to_ids(END)
USER = {"role": "user", "content": "1+1="}
SURROGATE = "half a pair: \ud83d"


class GivenPool:
    """In the pool's place: every row is answered to its first turn with `answer`."""

    def __init__(self, config: EnvironmentConfig, answer: str) -> None:
        self.config, self._answer, self._waiting, self._next = config, answer, dict[int, Answer](), 0
        self.most_at_once = 1

    def start(self, columns: Any, *, seed: str) -> tuple[int, int]:
        return 0, self._ticket({"messages": [USER]})

    def call(self, row: int, message: Any) -> int:
        return self._ticket({"messages": [{"role": "user", "content": self._answer}]})

    def answers(self, seconds: float) -> dict[int, Answer]:
        found, self._waiting = self._waiting, {}
        return found

    def finish(self, row: int) -> None:
        pass

    def _ticket(self, value: Any) -> int:
        self._next += 1
        self._waiting[self._next] = Answer(value, "", 0.0, "")
        return self._next


def replies(answer: str, *, vocab_size: int = 100, **more: Any) -> list[TurnEvent]:
    """To a row's first turn."""
    pool = GivenPool(EnvironmentConfig(**{"class": "a:B", **more}), answer)
    continues = replace(Continuations.from_template(ChatTemplate(TOKENIZER), (), END_ID), vocab_size=vocab_size)
    shared = Environments(pool, continues, None, TOKENIZER.decode, frozenset({END_ID}), rank=0)
    ids = torch.tensor(TOKENIZER(f"<|user|>1+1={END}<|assistant|>", add_special_tokens=False)["input_ids"])
    prompts = PromptBatch(ids, torch.tensor([len(ids)]), ("",), {}, ([USER],))
    rows = DrivenRows(shared, prompts, 1, 32)
    assert rows.events(wait=False) == [TurnEvent(0, max_tokens=32)]
    rows.said(0, TOKENIZER(f"3{END}", add_special_tokens=False)["input_ids"], truncated=False)
    return rows.events(wait=True)


def test_messages_are_tokens_behind_the_turn() -> None:
    ids = TOKENIZER(f"<|user|>no{END}<|assistant|>", add_special_tokens=False)["input_ids"]
    assert replies("no") == [TurnEvent(0, tuple(ids), 32 - 2 - len(ids))]


@pytest.mark.parametrize(
    ("answer", "vocab_size", "problem"),
    [
        ("raise", 100, "on purpose"),
        (SURROGATE, 100, "the text holds '\\ud83d', which is no character"),
        ("no", END_ID, f"the text has the token id {END_ID}, the model knows those from 0 to vocab_size - 1"),
    ],
)
def test_messages_that_the_model_cannot_read_fail_the_row(
    answer: str, vocab_size: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [reply] = replies(answer, vocab_size=vocab_size)
    assert (reply.ends, reply.failed) == (True, True)
    told = capsys.readouterr().err
    assert problem in told and "a:B: row 0, turn 1: its messages cannot be read by the model: " in told
    with pytest.raises(RewardError, match="on_error: fail_row"):
        replies(answer, vocab_size=vocab_size, on_error="end_run")


class ManualPool(GivenPool):
    """Answers come when the test says so, by `arrive`. calls: of the class, by ticket: (row of the pool, kind)."""

    def __init__(self, config: EnvironmentConfig, most_at_once: int) -> None:
        super().__init__(config, "no")
        self.most_at_once, self.calls, self.finished = most_at_once, list[tuple[int, str]](), list[int]()
        self._num_rows, self.aside = 0, list[int]()

    def set_aside(self, tickets: Any) -> None:
        self.aside += tickets

    def take_back(self, tickets: Any) -> None:
        self.aside = [ticket for ticket in self.aside if ticket not in tickets]

    def start(self, columns: Any, *, seed: str) -> tuple[int, int]:
        self._num_rows += 1
        self.calls.append((self._num_rows - 1, "start"))
        return self._num_rows - 1, len(self.calls) - 1

    def call(self, row: int, message: Any) -> int:
        self.calls.append((row, message["kind"]))
        return len(self.calls) - 1

    def arrive(self, ticket: int, value: Any, *, lost: bool = False) -> None:
        problem = "the process that called it ended with status 3" if lost else ""
        self._waiting[ticket] = Answer(value, problem, 0.0, "", lost)

    def finish(self, row: int) -> None:
        self.finished.append(row)


def manual(count: int, *, most_at_once: int = 100, room: int = 100, **more: Any) -> tuple[ManualPool, DrivenRows]:
    pool = ManualPool(EnvironmentConfig(**{"class": "a:B", **more}), most_at_once)
    continues = Continuations.from_template(ChatTemplate(TOKENIZER), (), END_ID)
    shared = Environments(pool, continues, None, TOKENIZER.decode, frozenset({END_ID}), rank=0)
    ids = torch.tensor(TOKENIZER(f"<|user|>1+1={END}<|assistant|>", add_special_tokens=False)["input_ids"])
    prompts = PromptBatch(ids, torch.tensor([len(ids)]), ("",), {}, ([USER],))
    return pool, DrivenRows(shared, prompts, count, 32, room=room)


THREE = TOKENIZER(f"3{END}", add_special_tokens=False)["input_ids"]


def test_rows_begin_when_the_engine_and_the_processes_have_room() -> None:
    pool, rows = manual(5, most_at_once=3, room=2)
    assert rows.events(wait=False) == [TurnEvent(row, max_tokens=32) for row in (0, 1)]
    assert pool.calls == [(0, "start"), (1, "start")] and rows.events(wait=False) == []
    rows.said(0, THREE, truncated=False)  # row 0 waits for the class: the engine has room
    assert rows.events(wait=False) == [TurnEvent(2, max_tokens=32)]
    rows.said(1, THREE, truncated=False)
    assert rows.events(wait=False) == [], "three instances are there, which is all that there may be"
    pool.arrive(2, {"reward": [1.0]})
    assert rows.events(wait=True) == [TurnEvent(0, ends=True, rewards=(1.0,)), TurnEvent(3, max_tokens=32)]
    assert pool.finished == [0] and pool.calls[4:] == [(1, "turn"), (3, "start")]


def test_the_time_of_a_row_begins_with_its_first_turn() -> None:
    pool, rows = manual(2, room=1, row_seconds=0.3)
    assert rows.events(wait=False) == [TurnEvent(0, max_tokens=32)]
    time.sleep(0.5)
    assert rows.events(wait=False) == [], "one that the model writes ends its turn first"
    rows.said(0, THREE, truncated=False)
    time.sleep(0.2)
    late, begun = sorted([*rows.events(wait=True)], key=lambda event: event.row)
    assert late.failed and late.row == 0 and begun == TurnEvent(1, max_tokens=32)
    rows.said(1, THREE, truncated=False)
    pool.arrive(3, {"reward": [1.0]})
    assert rows.events(wait=True) == [TurnEvent(1, ends=True, rewards=(1.0,))]


def test_a_row_that_has_not_begun_fails_when_the_rollout_has_no_time_left() -> None:
    """With a token behind the prompt: a model computes nothing for a row without one."""
    _, rows = manual(2, room=1, rollout_seconds=0.2)
    rows.events(wait=False)
    time.sleep(0.3)
    [failed] = rows.events(wait=True)
    assert (failed.row, failed.failed, failed.token_ids) == (1, True, (END_ID,))
    rows.said(0, THREE, truncated=False)
    assert rows.events(wait=True)[0].failed


def test_an_instance_starts_again_where_its_process_ends_before_it_hears_a_turn() -> None:
    pool, rows = manual(1)
    rows.events(wait=False)
    pool.arrive(0, None, lost=True)
    assert rows.events(wait=False) == [] and pool.calls == [(0, "start"), (1, "start")]
    pool.arrive(1, {"messages": [USER]})
    rows.said(0, THREE, truncated=False)
    assert pool.calls[2:] == [(1, "turn")]
    pool.arrive(2, None, lost=True)
    [failed] = rows.events(wait=True)
    assert failed.failed and failed.ends, "the instance had heard a turn"


def test_no_row_starts_again_for_ever() -> None:
    pool, rows = manual(1)
    for ticket in range(3):
        rows.events(wait=False)
        pool.arrive(ticket, None, lost=True)
    assert rows.events(wait=False) == [] and len(pool.calls) == 3
    rows.said(0, THREE, truncated=False)
    assert rows.events(wait=True)[0].failed


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1000, 16000])
def test_what_is_looked_at_grows_with_the_rows_under_way(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with all rows of a rollout: eight are under way at a time, each for two calls of `work`."""
    looked = 0

    def row(limits: TimeLimits, begun: float) -> str:
        nonlocal looked
        looked += 1
        return ""

    monkeypatch.setattr(TimeLimits, "row", row)
    monkeypatch.setattr(time_limits, "LOOK_SECONDS", 0.0)
    pool, rows = manual(count, most_at_once=8)
    ended = 0
    while ended < count:
        for event in rows.events(wait=False):
            ended += event.ends
            if not event.ends:
                rows.said(event.row, THREE, truncated=False)
                pool.arrive(len(pool.calls) - 1, {"reward": [1.0]})
    assert looked <= 2 * count


def test_what_passes_while_the_engine_does_something_else_is_no_time_of_a_row() -> None:
    pool, rows = manual(2, room=1, row_seconds=0.5, rollout_seconds=1.0)
    rows.events(wait=False)
    rows.said(0, THREE, truncated=False)
    assert [event.row for event in rows.events(wait=False)] == [1]
    rows.answers.pause()
    assert sorted(pool.aside) == [0, 1, 2], "two starts and a call"
    time.sleep(1.2)
    rows.answers.resume()
    assert pool.aside == [] and rows.events(wait=False) == []
    pool.arrive(1, {"reward": [1.0]})
    assert rows.events(wait=True) == [TurnEvent(0, ends=True, rewards=(1.0,))]
    rows.said(1, THREE, truncated=False)
    time.sleep(0.6)
    assert [event.failed for event in rows.events(wait=True)] == [True], "and the clock goes on"
