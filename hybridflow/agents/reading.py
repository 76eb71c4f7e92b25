"""How turns of an agent's row are read: the parser of tools, and which calls the agent gets."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.agents.chat_requests import Asked
from hybridflow.agents.transcript import fields_of
from hybridflow.data.continuations import Continuations
from hybridflow.data.fields import TOOLS
from hybridflow.data.rows import RowError
from hybridflow.errors import ConfigError
from hybridflow.rollout.tool_calls import Parsed, ToolCallParser, ToolError
from hybridflow.rollout.turn_counts import TurnCounts

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
