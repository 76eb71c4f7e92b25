"""Tool calls in what a model has written, by vLLM's parsers, which know the formats of models.

parser = ToolCallParser("hermes", tokenizer, schemas)
parser.parsed('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rollout.patches import prepare_vllm

KEY = "data.environment.tool_parser"


@dataclass(frozen=True)
class ToolCall:
    """One that the model asks for. problem: why it cannot be called; then it has no name and no arguments."""

    name: str
    arguments: Any
    problem: str = ""


@dataclass(frozen=True)
class Parsed:
    """What a turn says beside its calls, and these."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallParser:
    """Errors: ConfigError where vLLM has no parser of that name, or it does not go with the tokenizer."""

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        prepare_vllm()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            found = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = ", ".join(ToolParserManager.list_registered())
            raise ConfigError(f"{KEY} = {name}: vLLM has no such parser; it has {known}") from None
        request: dict[str, Any] = {
            "messages": [{"role": "user", "content": "?"}],
            "model": "actor",
            "tools": [{"type": "function", "function": _plain(schema["function"])} for schema in schemas],
        }
        self._request = ChatCompletionRequest(**request)
        make: Any = found
        try:
            self._parser: Any = make(tokenizer, self._request.tools)
        except Exception as error:  # each parser refuses a tokenizer without its tokens in a way of its own
            raise ConfigError(f"{KEY} = {name}: does not go with the actor's tokenizer: {error}") from error
        self._opening: str = getattr(self._parser, "tool_call_start_token", "") or ""

    def parsed(self, text: str) -> Parsed:
        """A call that the parser cannot read is one with a problem, where it is known how a call begins."""
        with _silent():
            found = self._parser.extract_tool_calls(text, self._request)
        if not found.tools_called:
            broken = bool(self._opening) and self._opening in text
            problem = ToolCall("", None, "the tool call cannot be read: expected a JSON object with name and arguments")
            return Parsed(text, (problem,) if broken else ())
        return Parsed(found.content or "", tuple(_call(each.function) for each in found.tool_calls))


def _call(function: Any) -> ToolCall:
    try:
        return ToolCall(function.name, json.loads(function.arguments))
    except ValueError as error:
        return ToolCall("", None, f"the arguments of {function.name} are not JSON: {error}")


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Without what transformers tells of results, which OpenAI's format does not have."""
    return {name: schema[name] for name in ("name", "description", "parameters") if name in schema}


@contextmanager
def _silent() -> Iterator[None]:
    """vLLM's parsers log a traceback for each call that they cannot read: the model's mistake, which it is told."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
