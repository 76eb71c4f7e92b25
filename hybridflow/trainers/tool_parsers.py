"""Whether `data.environment.tool_parser` reads the calls that the model's chat template writes.

The template shows how the model was taught to call a tool. A parser of another model finds no call in that text, and a
run would never call a tool.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from hybridflow.data.continuations import Continuations
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError, shown
from hybridflow.rollout.tool_calls import KEY, ToolCallParser, parsers_that_read

ASKED = "hybridflow asks"
SAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


def unread_calls(
    continuations: Continuations,
    schema: Mapping[str, Any],
    parser: ToolCallParser,
    name: str,
    hidden: Iterable[int],
) -> str | None:
    """What is wrong with the parser `name`; None where it reads the template's call, or the template writes none.

    schema: of the tool that is called. hidden: special tokens that the text of a turn does not show.
    """
    tool, template = str(schema["function"]["name"]), continuations.template
    text = _written(continuations, schema, tool)
    if tool not in text:
        return None
    for token_id in hidden:
        text = text.replace(str(template.tokenizer.convert_ids_to_tokens(token_id)), "")
    if any(call.name == tool for call in parser.parsed(text).calls):
        return None
    others = parsers_that_read(text, tool, template.tokenizer, [schema])
    hint = f"; of vLLM's parsers these do: {', '.join(others)}" if others else "; no parser of vLLM's does"
    return (
        f"{KEY} = {name}: does not read the calls that the chat template of {template.tokenizer.name_or_path} writes, "
        f"{shown(text, 200)}{hint}"
    )


def _written(continuations: Continuations, schema: Mapping[str, Any], tool: str) -> str:
    """A turn with a call, by the template; nothing where it fails."""
    ask: list[Message] = [{"role": "user", "content": ASKED}]
    call = {"name": tool, "arguments": _arguments(schema["function"].get("parameters"))}
    calls = [{"id": continuations.call_id("call_0_0"), "type": "function", "function": call}]
    template, with_tool = continuations.template, continuations.with_tools([schema])
    try:
        arguments = with_tool.arguments({})
        text = template.whole([*ask, {"role": "assistant", "content": "", "tool_calls": calls}], KEY, arguments)
        begun = template.whole(ask, KEY, arguments, begins=True)
    except RowError:
        return ""
    return text.removeprefix(begun) if text.startswith(begun) else text.rpartition(ASKED)[2]


def _arguments(parameters: Any) -> dict[str, Any]:
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else {}
    return {
        name: SAMPLES.get(str(kind.get("type")), "some") if isinstance(kind, Mapping) else "some"
        for name, kind in properties.items()
    }
