"""Turns with tool calls, by templates that want something of them: what the class's answers are to the model."""

import re
from typing import Any

import pytest
import torch

from hybridflow.batch import PromptBatch
from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.message_forms import short_id
from hybridflow.data.templates import ChatTemplate
from hybridflow.environments.classes import described
from hybridflow.environments.conversations import Environments
from hybridflow.environments.instances import Instances
from hybridflow.environments.returned import checked_messages
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer
from hybridflow.rollout.tool_calls import ToolCallParser
from hybridflow.trainers.environments import unread_calls
from tests.data.kinds_of_templates import KINDS, PLAIN, TOOLS, tokenizer_of
from tests.rollout.turn_rows import DrivenRows

pytestmark = pytest.mark.slow  # waits for processes

TALK = "tests.environments.classes_of_users:Talk"
ASK = {"role": "user", "content": "1+1="}
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class HerePool:
    """In the pool's place: the class is called in this process."""

    most_at_once = 1

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config, self._class, self._waiting = config, Instances(TALK, {}, ()), dict[int, Answer]()

    def start(self, columns: Any, *, seed: str) -> tuple[int, int]:
        self._class({"kind": "start", "row": 0, "seed": seed, "columns": dict(columns)})
        self._waiting[0] = Answer({"messages": [ASK]}, "", 0.0, "")
        return 0, 0

    def call(self, row: int, message: Any) -> int:
        self._waiting[1] = Answer(self._class(message), "", 0.0, "")
        return 1

    def answers(self, seconds: float) -> dict[int, Answer]:
        found, self._waiting = self._waiting, {}
        return found

    def finish(self, row: int) -> None:
        pass


def written(template: str, said: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, Environments]:
    """What stands behind the model's turn, and the counts of the rollout."""
    tokenizer, schemas = tokenizer_of(template), described(TALK, {}).schemas
    config = EnvironmentConfig(**{"class": TALK, "earlier_turns": "keep"})
    continues = Continuations.from_template(
        ChatTemplate(tokenizer), schemas, end_of_turn(tokenizer), earlier_turns="keep"
    )
    parser = ToolCallParser("hermes", tokenizer, schemas)
    shared = Environments(HerePool(config), continues, parser, tokenizer.decode, frozenset({continues.end}), rank=0)
    ids = torch.tensor(continues.first_tokens([ASK], {}))
    prompts = PromptBatch(ids, torch.tensor([len(ids)]), ("",), {"question": ("1+1=",)}, ([ASK],))
    rows = DrivenRows(shared, prompts, 1, 9000)
    rows.events(wait=False)
    turn = [*tokenizer(said, add_special_tokens=False)["input_ids"], continues.end]
    rows.said(0, turn, truncated=False)
    [reply] = rows.events(wait=True)
    assert not reply.failed, capsys.readouterr().err
    return tokenizer.decode(list(reply.token_ids)), shared


def test_a_second_call_is_told_where_the_template_takes_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The first is made. Elsewhere both are."""
    found, shared = written(KINDS["one call"], ADD + ADD, capsys)
    told = "error: a turn may have one tool call: this one, behind the first, was not made"
    assert found == (f"\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n{told}<|im_end|>\n<|im_start|>assistant\n")
    assert (shared.counts.tool_calls, shared.counts.failed_calls) == (2, 1)
    found, shared = written(PLAIN, ADD + ADD, capsys)
    assert found.count("<|im_start|>tool\n3<|im_end|>") == 2 and shared.counts.failed_calls == 0


def test_a_call_inside_the_thinking_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    found, shared = written(PLAIN, f"<think>shall I {ADD}</think>no", capsys)
    assert "<|im_start|>tool" not in found and shared.counts.tool_calls == 0


def test_ids_are_as_the_template_wants_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Mistral's kind: the result has its call's id, of nine letters and digits."""
    shows = "<|im_end|>\n{% endfor %}"
    strict = KINDS["strict"].replace(shows, "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}" + shows)
    found, _ = written(strict, ADD, capsys)
    assert f"tool\n3[{short_id('call_1_0')}]<|im_end|>" in found


def test_a_call_that_cannot_be_read_is_told_though_no_result_may_stand_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As gpt-oss's template has it: then the user tells."""
    lonely = "m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
    alone = f"{{% if {lonely} %}}{{{{ raise_exception('alone') }}}}{{% endif %}}"
    found, _ = written(
        PLAIN.replace("{{ m.content }}", alone + "{{ m.content }}"), "<tool_call>{oh</tool_call>", capsys
    )
    assert "<|im_start|>user\nerror: the tool call cannot be read" in found


@pytest.mark.parametrize(
    ("template", "name", "problem"),
    [
        (PLAIN, "hermes", None),
        (PLAIN, "mistral", "tool_parser = mistral: does not read the calls .*vLLM's parsers these do: .*hermes"),
        (PLAIN.replace("<tool_call>", "<use>"), "hermes", "tool_parser = hermes: does not read the calls .*<use>"),
        (KINDS["roles"], "hermes", None),  # which writes no calls: nothing is known
    ],
)
def test_a_parser_of_another_model_is_told(template: str, name: str, problem: str | None) -> None:
    tokenizer = tokenizer_of(template if "tools" in template else TOOLS + template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    [schema, *_] = described(TALK, {}).schemas
    continues = Continuations.from_template(ChatTemplate(tokenizer), (), end_of_turn(tokenizer))
    told = unread_calls(continues, schema, ToolCallParser(name, tokenizer, [schema]), name, [continues.end])
    assert told is None if problem is None else re.search(problem, told or "")


def test_a_conversation_may_begin_with_earlier_turns() -> None:
    """Of `start`, but not as its last message; and the model alone speaks later on."""
    greets = [{"role": "assistant", "content": "hello"}, ASK]
    assert checked_messages(greets, "start", begins=True) == greets
    for given, begins in (([ASK, greets[0]], True), (greets, False)):
        with pytest.raises(RewardError, match=r"a message of the assistant, .*hello.*: the model speaks there"):
            checked_messages(given, "start", begins=begins)
