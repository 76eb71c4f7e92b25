"""What a template takes of reasoning and calls, found by trying; and what is told where it leaves something out."""

import json
from typing import Any

import pytest

from hybridflow.data.example_texts import Kind, example_texts
from hybridflow.data.message_forms import REASONING, MessageForm, short_id
from hybridflow.data.rows import Row, RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.errors import ConfigError
from tests.data.kinds_of_templates import KINDS, PLAIN, calls, result, says, tokenizer_of

ASK, SAID, MORE = says("user", "what is it?"), says("assistant", "seven"), says("user", "and THEN?")
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def template(kind: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(KINDS.get(kind, kind)), TemplateOptions(**options))


FORMS = {
    "plain": MessageForm(),
    "roles": MessageForm(),  # which renders no calls
    "forgets": MessageForm(("reasoning_content",)),
    "next role": MessageForm(texts=False),
    "channels": MessageForm(("thinking",), single_call=True, result_needs_call=True),
    "nine": MessageForm(short_ids=True),
    "null": MessageForm(objects=False, null_content=True),
    "one call": MessageForm(single_call=True),
}


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_of_a_template(kind: str) -> None:
    assert template(kind).form == FORMS[kind]


@pytest.mark.parametrize("spelling", REASONING)
@pytest.mark.parametrize("kind", ["forgets", "channels"])
def test_reasoning_reaches_the_model_in_all_spellings(kind: str, spelling: str) -> None:
    """Of the last turn; earlier thinking is left out as the template has it, and that is no loss."""
    [found] = sft(kind, [ASK, SAID | {spelling: "I THINK"}])
    assert "I THINK" in found and "seven" in found
    prompt = template(kind).prompt([ASK, SAID | {spelling: "I THINK"}, MORE], {}, "a")
    assert "I THINK" not in prompt and "seven" in prompt


@pytest.mark.parametrize("spelling", REASONING)
def test_reasoning_that_no_template_reads_is_told(spelling: str) -> None:
    problem = rf"messages\[1\]\.{spelling} = 'I THINK': the tokenizer's chat template leaves it out"
    with pytest.raises(RowError, match=problem):
        sft("plain", [ASK, SAID | {spelling: "I THINK"}])
    with pytest.raises(RowError, match=problem.replace("messages", "a")):
        template("plain").prompt([ASK, SAID | {spelling: "I THINK"}, MORE], {}, "a")


ARGUMENTS = {"city": "OSLO", "days": [1, {"deep": "DEEP"}], "sure": True}
TEXT = '{"city": "OSLO", "days": [1, {"deep": "DEEP"}], "sure": true}'
CALLED = {
    "plain": f'<tool_call>{{"name": "add", "arguments": {TEXT}}}</tool_call>',
    "next role": "<tool_call>add<key>city</key><value>OSLO</value>",
    "channels": f"to=functions.add<|channel|>commentary json<|message|>{TEXT}<|call|>",
    "nine": f'"arguments": {TEXT}',
    "null": f"<|call|>add {TEXT}<|eos|>",
    "one call": f'<tool_call>{{"name": "add", "arguments": {TEXT}}}</tool_call>',
}
TALK = [ASK, calls("add", ARGUMENTS), result("TWELVE"), says("assistant", "it is TWELVE")]


@pytest.mark.parametrize("kind", CALLED)
def test_calls_and_results_reach_the_model(kind: str) -> None:
    """In prompts and in what is trained on, whatever the template wants of them."""
    prompt = template(kind).prompt([*TALK, MORE], {}, "a")
    assert CALLED[kind] in prompt and prompt.count("TWELVE") == 2
    assert CALLED[kind] in "".join(sft(kind, TALK))


def test_arguments_as_text_are_objects_where_a_template_iterates() -> None:
    """And stay the text that they are where a template takes both."""
    as_text = [ASK, calls("add", json.dumps({"n": 12})), result("TWELVE")]
    assert "<tool_call>add<key>n</key><value>12</value>" in template("next role").prompt(as_text, {}, "a")
    tokenizer = tokenizer_of(PLAIN)
    plain = tokenizer.apply_chat_template(as_text, tokenize=False, add_generation_prompt=True)
    assert template("plain").prompt(as_text, {}, "a") == plain


@pytest.mark.parametrize(
    ("kind", "said", "problem"),
    [
        ("roles", calls("add", ARGUMENTS), r"\.tool_calls\[0\]\.function\.name = 'add'"),
        ("nine", calls("add", ARGUMENTS) | {"content": "I look"}, "leaves out this message of the role 'assistant'"),
        ("channels", calls("add", {}) | {"tool_calls": [TALK[1]["tool_calls"][0]] * 2}, r"\.tool_calls\[1\]"),
    ],
)
def test_a_call_that_a_template_leaves_out_is_told(kind: str, said: dict[str, Any], problem: str) -> None:
    """A name, an argument, or the text beside it."""
    talk = [ASK, said, result("TWELVE"), SAID]
    with pytest.raises(RowError, match=problem):
        sft(kind, talk)
    with pytest.raises(RowError, match=problem):
        template(kind).prompt([*talk, MORE], {}, "a")


def test_an_argument_that_is_left_out_is_told_though_another_text_has_it() -> None:
    """The user has named the city."""
    first = PLAIN.replace(
        "{{ c.function | tojson }}", "{{ c.function.name }} {{ c.function.arguments.values() | first }}"
    )
    talk = [says("user", "two and OSLO"), calls("add", {"n": 2, "city": "OSLO"}), result("TWELVE")]
    with pytest.raises(RowError, match=r"a\[1\]\.tool_calls\[0\]\.function\.arguments\.city = 'OSLO'"):
        template(first).prompt(talk, {}, "a")


def test_pairs_are_looked_at_too() -> None:
    """DPO and reward models: what is chosen and what is rejected."""
    good, bad = {**SAID, "thinking": "I THINK"}, says("assistant", "eight")
    with pytest.raises(RowError, match=r"rejected\[1\]\.thinking = 'I THINK'"):
        texts("plain", "pairs", prompt=[ASK], chosen=[bad], rejected=[good])
    chosen, _ = texts("forgets", "pairs", prompt=[ASK], chosen=[good], rejected=[bad])
    assert "<think>I THINK</think>seven" in chosen


@pytest.mark.parametrize("asks", ["what is it?", "add to it"])
def test_tools_that_are_not_rendered_are_told(asks: str) -> None:
    """Also where a template names tools, and where a message has the tool's name."""
    silent = "{# tools #}" + KINDS["roles"]
    for kind in ("roles", silent):
        with pytest.raises(RowError, match="a: the row has tools, which the tokenizer's chat template does not read"):
            template(kind).prompt([says("user", asks)], {"tools": [TOOL]}, "a")
    assert '"name": "add"' in template("plain").prompt([says("user", asks)], {"tools": [TOOL]}, "a")


def test_ids_are_nine_letters_for_both_sides() -> None:
    """Each result has its call's; one without an id has that of the next call."""
    two = calls("add", {}) | {"tool_calls": [calls("add", {"n": n}, f"call_{n}")["tool_calls"][0] for n in (1, 2)]}
    bare = {key: value for key, value in result("TWELVE").items() if key != "tool_call_id"}
    form = FORMS["nine"]
    written = form.as_read([ASK, two, result("a", "call_2"), result("b", "call_1")])
    assert [call["id"] for call in written[1]["tool_calls"]] == [short_id("call_1"), short_id("call_2")]
    assert [message["tool_call_id"] for message in written[2:]] == [short_id("call_2"), short_id("call_1")]
    assert written == form.as_read(written)
    assert [its["tool_call_id"] for its in form.as_read([ASK, two, bare, bare])[2:]] == [
        short_id("call_1"),
        short_id("call_2"),
    ]
    assert len({short_id(str(n)) for n in range(999)}) == 999 and short_id("AB12cd34E") == "AB12cd34E"


# ------------------------------------------------------------------------------------------------ rows that are odd


@pytest.mark.parametrize("said", ["", "  \n"])
def test_an_answer_without_a_text_is_told(said: str) -> None:
    """But for a call, for reasoning, and for one that is not trained on."""
    with pytest.raises(RowError, match=r"row: messages\[3\]\.content = .* is empty: an answer of the assistant needs"):
        sft("plain", [ASK, SAID, MORE, says("assistant", said)])
    assert sft("plain", [ASK, says("assistant", said, weight=0), MORE, SAID])
    assert sft("forgets", [ASK, says("assistant", said, reasoning="I THINK")])


def test_a_conversation_may_begin_with_the_assistant() -> None:
    """What nobody has asked for is context, since no run generates it."""
    greeting = says("assistant", "hello")
    [found] = example_texts(Row("row", {"messages": [greeting, ASK, SAID]}), "sft", tokenizer_of(PLAIN)).sequences
    assert found.text.startswith("<|im_start|>assistant\nhello<|im_end|>")
    assert [found.text[start:end] for start, end in found.spans] == ["seven<|im_end|>"]
    with pytest.raises(RowError, match=r"row: messages\[0\] is the assistant's, and no other .* follows"):
        sft("plain", [greeting, ASK])
    prompt = template("plain").prompt([greeting, ASK], {}, "a")
    assert prompt.startswith("<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt", "messages", "tools", "self"])
def test_arguments_that_are_no_templates_are_told(name: str) -> None:
    with pytest.raises(RowError, match=f"a: chat_template_kwargs.{name}: is no argument of a chat template"):
        template("plain").prompt([ASK], {"chat_template_kwargs": {name: True}}, "a")
    with pytest.raises(ConfigError, match=f"data.chat_template_kwargs.{name}: is no argument of a chat template"):
        template("plain", kwargs={name: True}).check_options()


def texts(kind: str, of: Kind, **fields: Any) -> list[str]:
    tokenizer = tokenizer_of(KINDS.get(kind, kind))
    return [its.text for its in example_texts(Row("row", fields), of, tokenizer).sequences]


def sft(kind: str, messages: list[dict[str, Any]]) -> list[str]:
    return texts(kind, "sft", messages=messages)
