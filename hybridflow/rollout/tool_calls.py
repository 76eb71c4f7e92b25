"""Tool calls in what a model has written, by vLLM's parsers, which know the formats of models.

parser = ToolCallParser("hermes", tokenizer, schemas)
parser.parsed('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError, UserError
from hybridflow.rollout.patches import prepare_vllm
from hybridflow.rollout.thinking import Thinking

KEY = "data.environment.tool_parser"


class ToolError(UserError):
    """Tools of a request that are none."""


@dataclass(frozen=True)
class ToolCall:
    """One that the model asks for. problem: why it cannot be called. id: that the model has written; mostly none."""

    name: str
    arguments: Any
    problem: str = ""
    id: str = ""


@dataclass(frozen=True)
class Parsed:
    """What a turn says beside calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallParser:
    """Errors: ConfigError where vLLM has no parser of that name, or it does not go with the tokenizer; ToolError."""

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        prepare_vllm()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        found = _class_of(name)
        request: dict[str, Any] = {
            "messages": [{"role": "user", "content": "?"}],
            "model": "actor",
            "tools": [{"type": "function", "function": _plain(schema["function"])} for schema in schemas],
        }
        try:
            self._request = ChatCompletionRequest(**request)
        except ValueError as error:  # pydantic's, which has many lines
            raise ToolError(f"tools: {' '.join(str(error).split())}") from error
        try:
            self._parser: Any = found(tokenizer, self._request.tools)
        except Exception as error:  # each parser refuses a tokenizer without the needed tokens in another way
            raise ConfigError(f"{KEY} = {name}: does not go with the actor's tokenizer: {error}") from error
        self._opening: str = getattr(self._parser, "tool_call_start_token", "") or ""

    def parsed(self, text: str, before: str = "") -> Parsed:
        """A call that the parser cannot read is one with a problem, where it is known how a call begins.

        What looks like a call inside the model's thinking is none. before: the end of what the text goes on from.
        """
        thinking = Thinking.hidden(text, self._opening, before)
        found: Any = None
        with _silent(), suppress(Exception):  # of a parser that fails on what a model may write
            found = self._parser.extract_tool_calls(thinking.text, self._request)
        if found is None or not found.tools_called:
            broken = bool(self._opening) and self._opening in thinking.text
            problem = ToolCall("", None, "the tool call cannot be read: expected a JSON object with name and arguments")
            return Parsed(text, (problem,) if broken else ())
        calls = tuple(_call(each, thinking) for each in found.tool_calls)
        return Parsed(thinking.shown(found.content or ""), calls)


def parsers_that_read(text: str, tool: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of vLLM's parsers that find a call of this tool in a text."""
    prepare_vllm()
    from vllm.tool_parsers import ToolParserManager

    found = []
    for name in ToolParserManager.list_registered():
        with suppress(Exception):  # one that does not go with the tokenizer, or with another release of a package
            calls = ToolCallParser(name, tokenizer, schemas).parsed(text).calls
            found += [name] if any(call.name == tool for call in calls) else []
    return found


def _class_of(name: str) -> Any:
    """Errors: ConfigError."""
    from vllm.tool_parsers import ToolParserManager

    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(ToolParserManager.list_registered())
        raise ConfigError(f"{KEY} = {name}: vLLM has no such parser; it has {known}") from None


def _call(found: Any, thinking: Thinking) -> ToolCall:
    """An id is the model's own where the model has written it; other ids of vLLM's are random."""
    function, own = found.function, str(found.id or "")
    try:
        arguments = json.loads(thinking.shown(function.arguments))
    except ValueError as error:
        return ToolCall("", None, f"the arguments of {function.name} are not JSON: {error}")
    return ToolCall(function.name, arguments, id=own if own and own in thinking.text else "")


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what transformers tells of results, which OpenAI's format does not have."""
    return {name: schema[name] for name in ("name", "description", "parameters") if name in schema}


@contextmanager
def _silent() -> Iterator[None]:
    """vLLM's parsers log a traceback for each call that they cannot read: the model hears of this mistake."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
