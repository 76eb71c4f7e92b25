"""What rows of a class answer to messages that the model cannot read: a pool whose answers are given."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.batch import PromptBatch
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.length_buckets import always
from hybridflow.data.continuations import Continuations
from hybridflow.data.templates import ChatTemplate
from hybridflow.environments.conversations import Environments
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.turns import TurnEvent
from tests.environments.tiny_chat import END, TEMPLATE, make_tokenizer

RAISES = "{%- if messages[-1].content == 'raise' -%}{{ raise_exception('on purpose') }}{%- endif -%}" + TEMPLATE
TOKENIZER = make_tokenizer(RAISES)
END_ID = TOKENIZER.convert_tokens_to_ids(END)
USER = {"role": "user", "content": "1+1="}
SURROGATE = "half a pair: \ud83d"


class GivenPool:
    """In the pool's place: every row is answered to its first turn with `answer`."""

    def __init__(self, config: EnvironmentConfig, answer: str) -> None:
        self.config, self._answer, self._waiting, self._next = config, answer, dict[int, Answer](), 0

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
    rows = shared.conversations(prompts, torch.tensor([1]), always(32), (1,))
    assert rows.begin([0]) == [32] and rows.replies(wait=False) == []
    rows.said(0, TOKENIZER(f"3{END}", add_special_tokens=False)["input_ids"], [-0.5, -0.5], truncated=False)
    return rows.replies(wait=True)


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
