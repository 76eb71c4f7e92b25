"""vLLM's own parsers of tool calls, on what models write."""

import json
import logging

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rollout.thinking import behind_thoughts
from hybridflow.rollout.tool_calls import ToolCall, ToolCallParser, ToolError, parsers_that_read
from tests.environments.tiny_chat import make_tokenizer

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        "return": {"type": "string"},
    },
}


@pytest.fixture(scope="module")
def parser() -> ToolCallParser:
    return ToolCallParser("hermes", make_tokenizer(), [SCHEMA])


def test_calls_are_found_beside_a_text(parser: ToolCallParser) -> None:
    text = 'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "b", "arguments": {}}'
    found = parser.parsed(text)
    assert found.content == "so" and found.calls == (ToolCall("add", {"a": 1}), ToolCall("b", {}))
    assert parser.parsed("nothing") == type(found)("nothing", ())


@pytest.mark.parametrize("text", ["{broken", '{"name": "add"}', "[1]", "", "{'name': 'add', 'arguments': {}}"])
def test_a_call_that_cannot_be_read_is_told(
    parser: ToolCallParser, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = parser.parsed(f"<tool_call>{text}</tool_call>")
    assert found.content == f"<tool_call>{text}</tool_call>"
    [call] = found.calls
    assert "cannot be read" in call.problem
    assert caplog.records == [] and logging.root.manager.disable == 0


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tool_parser = nobody: vLLM has no such parser; it has .*hermes"):
        ToolCallParser("nobody", make_tokenizer(), [SCHEMA])


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "before", "num_calls"),
    [
        (f"<think>I could {CALL}</think>no", "", 0),
        (f"<think>hm</think>so {CALL}", "", 1),
        (f"<think>one {CALL}</think>so {CALL}<think>two {CALL}</think>", "", 1),
        (f"I could {CALL}</think>no", "<|im_start|>assistant\n<think>\n", 0),
        (f"hm</think>{CALL}", "<|im_start|>assistant\n<think>\n", 1),
        (f"I go on and on {CALL}", "<|im_start|>assistant\n<think>\n", 0),
        (CALL, "<|im_start|>assistant\n<think>\n\n</think>\n\n", 1),
        (f"<think>not ended {CALL}", "", 0),
        (f"[THINK]I could {CALL}[/THINK]no", "", 0),
        (f"<|channel|>analysis<|message|>I could {CALL}<|end|>no", "", 0),
        (f"<|START_THINKING|>I could {CALL}<|END_THINKING|>no", "", 0),
        ('<tool_call>{"name": "add", "arguments": {"text": "</think>"}}</tool_call>', "", 1),
        ('<tool_call>{"name": "add", "arguments": {"text": "<think>"}}</tool_call>', "", 1),
    ],
)
def test_what_a_model_thinks_of_is_no_call(parser: ToolCallParser, text: str, before: str, num_calls: int) -> None:
    """As vLLM's server reads calls behind the thinking alone. before: what the prompt has begun the turn with."""
    found = parser.parsed(text, before)
    assert len(found.calls) == num_calls
    if not num_calls:
        assert found.content == text


def test_thoughts_stay_where_they_are_in_the_text_and_in_arguments(parser: ToolCallParser) -> None:
    """An argument may hold what looks like a thought, with characters that JSON writes otherwise."""
    thought = '<think>a "word"\nof \u2042</think>'
    call = json.dumps({"name": "add", "arguments": {"text": f"see {thought}", "a": 1}})
    found = parser.parsed(f"{thought}so<tool_call>{call}</tool_call>")
    assert found.content == f"{thought}so"
    assert found.calls == (ToolCall("add", {"text": f"see {thought}", "a": 1}),)


def test_tools_that_are_none_are_told() -> None:
    """Whoever has asked with them is told; the run goes on."""
    for function in ({"name": "add", "parameters": "none"}, {"name": "add", "description": 5}, {"name": 5}):
        with pytest.raises(ToolError, match="tools: "):
            ToolCallParser("hermes", make_tokenizer(), [{"type": "function", "function": function}])


XML = "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"


def test_calls_in_xml_behind_a_thought_that_the_prompt_begins() -> None:
    """As Qwen3.5 writes calls: values are of the types that the tool declares. A call in the thought is none."""
    parser, before = ToolCallParser("qwen3_coder", make_tokenizer(), [SCHEMA]), "<|im_start|>assistant\n<think>\n"
    found = parser.parsed(f"maybe {XML}?\n</think>\n\nso {XML}", before)
    assert found.calls == (ToolCall("add", {"a": 7}),)
    assert "qwen3_coder" in parsers_that_read(XML, "add", make_tokenizer(), [SCHEMA])


def test_the_parsers_that_read_a_call_are_known() -> None:
    """vLLM's own, of which hermes' format is also that of others."""
    found = parsers_that_read(CALL, "add", make_tokenizer(), [SCHEMA])
    assert "hermes" in found and "mistral" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("a</thought>b", "b"),
        ("[THINK]a[/THINK]b", "b"),
        ("<|channel|>analysis<|message|>a<|end|>b", "b"),
        ("a<|end|>b", "a<|end|>b"),
        ("<think>a", None),
        ("<think>a</think>b<think>c", None),
    ],
)
def test_what_is_said_behind_thoughts(text: str, expected: str | None) -> None:
    assert behind_thoughts(text) == expected
