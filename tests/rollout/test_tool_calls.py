"""vLLM's own parsers of tool calls, on what models write."""

import logging

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rollout.tool_calls import ToolCall, ToolCallParser
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
