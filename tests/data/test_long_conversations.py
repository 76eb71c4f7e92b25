"""Conversations of many turns: what is rendered grows with the turns, and is what the whole conversation gives."""

from typing import Any

import pytest

from hybridflow.data.continuations import Continuations, EarlierTurns
from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate
from tests.data.kinds_of_templates import KINDS, PLAIN, says, tokenizer_of

ROUNDS = PLAIN.replace("{{ m.content }}", "[{{ loop.index }}]{{ m.content }}")
LATE = "{% if loop.index > 23 %}{{ messages[4].content }}{% endif %}"
RECALLS = PLAIN.replace("{{ m.content }}", LATE + "{{ m.content }}")


def of_template(template: str, mode: EarlierTurns = "keep") -> Continuations:
    tokenizer = tokenizer_of(template)
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", "<|eos|>"])
    return Continuations.from_template(
        ChatTemplate(tokenizer), (), end_of_turn(tokenizer), earlier_turns=mode, ends=ends
    )


def conversation(turns: int, *, asked_once: bool = False) -> list[Message]:
    """Up to the model's last turn. asked_once: the user speaks once, and then a tool."""
    messages = [says("user", "what is it?")]
    for turn in range(turns):
        role = "tool" if asked_once else "user"
        answer = {"name": "look", **says(role, f"look {turn}")} if asked_once else says(role, f"no {turn}")
        messages += [says("assistant", f"a{turn}"), answer]
    return messages[:-1]


def text(continues: Continuations, messages: list[Message], answer: str = "THEN?") -> str:
    ids = continues.tokens(messages, [says("user", answer)], {}, ended=continues.end)
    return continues.template.tokenizer.decode(ids)


@pytest.mark.parametrize("asked_once", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_conversation_goes_on_as_a_short_one(kind: str, asked_once: bool) -> None:
    """Of templates that look no further back: the text of each turn is that of the whole conversation."""
    continues, whole = of_template(KINDS[kind]), of_template(KINDS[kind])
    whole.misread.append("it is given whole conversations")
    for turns in (1, 7, 8, 9, 12, 16, 21):
        messages = conversation(turns, asked_once=asked_once)
        outcomes = []
        for each in (continues, whole):
            try:
                outcomes.append(text(each, messages))
            except RowError as error:  # such as of a role that the template does not know
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
    assert continues.misread == []


def test_what_is_rendered_grows_with_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the turns are four to five times the characters; 16 times where all is rendered with each turn."""
    found = {}
    for turns in (80, 320):
        continues, size = of_template(PLAIN), 0
        apply = continues.template.tokenizer.apply_chat_template

        def counted(*args: Any, apply: Any = apply, **how: Any) -> str:
            nonlocal size
            rendered = apply(*args, **how)
            size += len(rendered)
            return rendered

        monkeypatch.setattr(continues.template.tokenizer, "apply_chat_template", counted)
        messages = conversation(turns)
        for turn in range(turns):
            text(continues, messages[: 2 * turn + 2])
        found[turns] = size
    assert 4 * found[80] <= found[320] <= 5 * found[80]


def test_a_template_that_numbers_its_turns_is_given_whole_conversations() -> None:
    continues = of_template(ROUNDS)
    for turns in (1, 7, 8, 9, 13):
        assert f"user\n[{2 * turns + 1}]THEN?<|im_end|>" in text(continues, conversation(turns))
    assert continues.misread == ["turn 8 depends on more than the last turns"]


def test_a_row_whose_template_looks_back_late_fails_and_later_ones_are_whole() -> None:
    """From the 24th message on this one repeats the fifth."""
    continues = of_template(RECALLS)
    for turns in (8, 11):
        text(continues, conversation(turns))
    with pytest.raises(RowError, match="renders a turn by messages far back: later rows are whole"):
        text(continues, conversation(16))
    assert "user\nno 1THEN?<|im_end|>" in text(continues, conversation(16))
