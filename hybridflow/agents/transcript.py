"""What a further request of an agent adds to a sequence of a row: messages here, tokens there.

`TurnReading` has the parser of tools, and says which calls the agent gets.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.agents.chat_requests import Asked, AskedTokens, continuation_of
from hybridflow.data.continuations import Continuations
from hybridflow.data.fields import KWARGS, TOOLS
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError
from hybridflow.errors import ConfigError, OtherConversation
from hybridflow.rollout.rows import Branch, TurnCounts
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser, ToolError


def tokens_behind(sequence: Branch, asked: AskedTokens) -> list[int]:
    """Those of a request of token ids that the row does not have yet. Errors: OtherConversation."""
    known = sequence.all_tokens
    if asked.token_ids[: len(known)] != known:
        raise OtherConversation(
            f"the request does not continue the row: its token_ids have to begin with the {len(known)} tokens of the "
            "row, those that the model has sampled included"
        )
    return asked.token_ids[len(known) :]


def new_tokens(sequence: Branch, asked: Asked, columns: Mapping[str, Any], continues: Continuations) -> list[int]:
    """Those of a request behind the tokens that the row has; all of a first request that brings the prompt.

    columns: of the row. Errors: RowError where the template fails; OtherConversation.
    """
    fields, template = fields_of(asked, columns), continues.with_tools(asked.fields.get(TOOLS, ()))
    talk, known = sequence.transcript, sequence.all_tokens
    if talk.messages is None and talk.answered:
        raise OtherConversation("the row's requests have token ids: it cannot go on with messages")
    if talk.messages is None:
        ids = template.first_tokens(asked.messages, fields)
        if ids[: len(known)] != known:
            raise OtherConversation(
                "the first request does not begin with the row's prompt: with data.environment.prompt: column its "
                "messages and tools are those of the data file"
            )
        return ids[len(known) :]
    new = continuation_of(talk.messages, asked.messages)
    if new is None:
        raise OtherConversation(
            "the request does not continue the row's conversation: its messages have to begin with those that the "
            "row has, the model's last one included, and to go on"
        )
    if asked.fields != talk.fields:
        raise OtherConversation("the request has other tools than the row's first one: a conversation keeps its tools")
    return template.tokens(talk.messages, new, fields, ended=talk.ended)


def fields_of(asked: Asked, columns: Mapping[str, Any]) -> dict[str, Any]:
    """What enters the chat template beside messages: the request's tools and arguments, or the row's arguments."""
    own = {KWARGS: columns[KWARGS]} if KWARGS in columns else {}
    return {**own, **asked.fields}


def turn_message(parsed: Parsed, call_id: Callable[[int], str]) -> Message:
    """Of the assistant, as chat templates take it. call_id: of a tool call that has none, by its number."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id or call_id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def in_openai_form(message: Message) -> Message:
    """As OpenAI's format has it: arguments are texts."""
    if "tool_calls" not in message:
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


Tools = Sequence[Mapping[str, Any]]
MOST_KEPT = 64  # parsers: agents mostly have a few lists of tools


@dataclass(frozen=True)
class TurnReading:
    """Of all rows of a rank. parser: of some tools. kept: parsers, and what their turns begin behind."""

    parser: Callable[[Tools], ToolCallParser]
    continues: Continuations
    counts: TurnCounts
    kept: dict[str, tuple[ToolCallParser, str]] = field(default_factory=dict)

    def check(self, asked: Asked, columns: Mapping[str, Any]) -> None:
        """Errors: RowError where the request's tools are none."""
        if TOOLS in asked.fields and asked.calls_tools:
            self._of(asked, columns)

    def parsed(self, text: str, asked: Asked, columns: Mapping[str, Any]) -> Parsed:
        """A turn with a call that cannot be read is a text: OpenAI's format has no such calls."""
        parser, before = self._of(asked, columns)
        found = parser.parsed(text, before)
        broken, one = sum(bool(call.problem) for call in found.calls), self.continues.takes_one_call
        self.counts.tool_calls += len(found.calls)
        self.counts.failed_calls += broken + (len(found.calls[1:]) if one and not broken else 0)
        if broken:
            return Parsed(text, ())
        return replace(found, calls=found.calls[:1]) if one or asked.one_call else found

    def _of(self, asked: Asked, columns: Mapping[str, Any]) -> tuple[ToolCallParser, str]:
        """The parser, and what a turn begins behind. Errors: RowError."""
        fields, tools = fields_of(asked, columns), asked.fields[TOOLS]
        key = json.dumps(fields, sort_keys=True, default=str)
        if key not in self.kept:
            try:
                made = self.parser(tools)
            except (ToolError, ConfigError) as error:  # it was made without these tools when the run began
                raise RowError(str(error), "request") from error
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            self.kept[key] = made, self.continues.with_tools(tools).opening(fields)
        return self.kept[key]
