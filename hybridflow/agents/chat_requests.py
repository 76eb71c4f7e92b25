"""What an agent asks for in a chat completion: messages, tools and a limit of tokens, checked.

The model samples as the experiment says: otherwise the engine's log-probs would be of another distribution than the one
that is trained. So what changes how tokens are drawn is left aside (`IGNORED`), as most clients send it unasked. What
an answer cannot have without being drawn otherwise is refused (`REFUSED`), with status 400.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.data.fields import KWARGS, TOOLS
from hybridflow.data.message_forms import REASONING
from hybridflow.data.messages import Message, read_messages
from hybridflow.data.rows import RowError, shown

IGNORED = frozenset(
    "model temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty user store "
    "metadata parallel_tool_calls service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "reasoning_effort verbosity cache_salt".split()
)
# each with the values that ask for nothing
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "web_search_options": (None,),
}
STOP = "stop"
READ = frozenset(
    f"messages {TOOLS} {KWARGS} tool_choice max_tokens max_completion_tokens stream stream_options {STOP}".split()
)
SAID = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)  # of a message
UNREAD = ("function_call", "refusal", "audio")  # of a message: no template renders them
ID = "id"


@dataclass(frozen=True)
class Asked:
    """messages: as chat templates take them. fields: that enter the template beside them, the tools and its arguments.

    max_tokens: of the turn, None where the client sets no limit. calls_tools: tool calls in the turn are told apart.
    one_call: of several the client takes the first.
    """

    messages: list[Message]
    fields: Mapping[str, Any]
    max_tokens: int | None
    calls_tools: bool
    tells_usage: bool
    one_call: bool = False


def asked_for(body: Any, stop: Sequence[str] = ()) -> Asked:
    """Of a request. stop: texts that end a turn, as the experiment has them.

    Errors: RowError that names the key, the value and the rule.
    """
    if not isinstance(body, dict):
        raise _problem(f"the request {shown(body)} is no JSON object")
    for key, value in body.items():
        if key in REFUSED and value not in REFUSED[key]:
            raise _problem(f"{key} = {shown(value)}: is refused, as the model samples as the experiment says")
        if key not in IGNORED and key not in REFUSED and key not in READ:
            raise _problem(f"{key} = {shown(value)}: is no key that is known here")
    _check_stop(body.get(STOP), stop)
    messages = [_plain(one, f"messages[{i}]") for i, one in enumerate(read_messages(body.get("messages"), "messages"))]
    if messages[-1]["role"] == "assistant":
        raise _problem("messages ends with one of the assistant: a turn that is begun cannot be continued")
    choice, tools = body.get("tool_choice"), body.get(TOOLS) or None
    if choice not in (None, "auto", "none"):
        raise _problem(f"tool_choice = {shown(choice)}: is refused, as the model chooses: auto and none are known")
    options = body.get("stream_options")
    return Asked(
        messages,
        {name: value for name, value in ((TOOLS, _tools(tools)), (KWARGS, body.get(KWARGS))) if value},
        _limit(body),
        calls_tools=tools is not None and choice != "none",
        tells_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        one_call=body.get("parallel_tool_calls") is False,
    )


@dataclass(frozen=True)
class AskedTokens:
    """token_ids: of a whole sequence of the row, (n,). max_tokens: as in `Asked`."""

    token_ids: list[int]
    max_tokens: int | None


def tokens_asked_for(body: Any) -> AskedTokens:
    """Of a request with token ids. Errors: RowError that names the key, the value and the rule."""
    if not isinstance(body, dict):
        raise _problem(f"the request {shown(body)} is no JSON object")
    ids, sampling = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise _problem(f"token_ids = {shown(ids)}: is no list of token ids")
    if not isinstance(sampling, dict):
        raise _problem(f"sampling_params = {shown(sampling)}: is no JSON object")
    for key, value in sampling.items():
        if key == "n" and value not in (None, 1):
            raise _problem(f"sampling_params.n = {shown(value)}: is refused: a request is one turn of a row")
    for key in ("features", "content_parts"):
        if body.get(key):
            raise _problem(f"{key}: is refused, as rows are texts alone")
    return AskedTokens(ids, _limit(sampling))


def ignored_keys(body: Any) -> set[str]:
    """Keys of a request that ask for another way to sample, and are left aside."""
    body = {**body, **sampling} if isinstance(sampling := body.get("sampling_params"), dict) else body
    asking = IGNORED - {"model", "user", "store", "metadata", "parallel_tool_calls"}
    return {key for key, value in body.items() if key in asking and value is not None}


def continuation_of(known: Sequence[Message], messages: Sequence[Message]) -> list[Message] | None:
    """What stands behind the conversation that is known; None where it is no beginning, or nothing follows."""
    same = len(messages) > len(known) and all(
        _compared(one) == _compared(other) for one, other in zip(known, messages, strict=False)
    )
    return list(messages[len(known) :]) if same else None


def _compared(message: Message) -> Any:
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], message["content"], calls, next((message[n] for n in REASONING if message.get(n)), "")


def _plain(message: Message, field: str) -> Message:
    """With what templates read, and arguments of tool calls as objects. Errors: RowError."""
    for key in UNREAD:
        if message.get(key):
            raise _problem(f"{field}.{key} = {shown(message[key])}: is refused, as no chat template renders it")
    found = {key: message[key] for key in SAID if message.get(key) not in (None, [], "")}
    for key in REASONING:
        if not isinstance(found.get(key, ""), str):
            raise _problem(f"{field}.{key} = {shown(found[key])}: is no text")
    found |= {key: message[key] for key in ("role", "content")}
    if "tool_calls" in found:
        if not isinstance(found["tool_calls"], list):
            raise _problem(f"{field}.tool_calls = {shown(found['tool_calls'])}: is no list")
        found["tool_calls"] = [_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(found["tool_calls"])]
    return found


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _problem(f"{field} = {shown(call)}: has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise _problem(f"{field}.function.arguments = {shown(arguments)}: is no JSON: {error}") from error
    named = {ID: call[ID]} if isinstance(call.get(ID), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise _problem(f"{TOOLS} = {shown(tools)}: is no list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _problem(f"{TOOLS}[{i}] = {shown(tool)}: is no function with a name")
    return list(tools)


def _check_stop(given: Any, own: Sequence[str]) -> None:
    """Errors: RowError unless it asks for nothing, or for what the experiment has."""
    texts = [given] if given and isinstance(given, str) else given
    if not texts or (isinstance(texts, list) and sorted(map(str, texts)) == sorted(own)):
        return
    raise _problem(
        f"{STOP} = {shown(given)}: is refused, as the model samples as the experiment says: sampling.stop = {list(own)}"
    )


def _limit(body: Mapping[str, Any]) -> int | None:
    given = {key: body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None}
    for key, value in given.items():
        if type(value) is not int or value < 1:
            raise _problem(f"{key} = {shown(value)}: is no number of tokens from 1 on")
    return min(given.values(), default=None)


def _problem(what: str) -> RowError:
    return RowError(what, "request")
