"""The calculator of calculator.py as an agent with OpenAI's client: configs/quickstart_agent.yaml."""

import functools
import json
from collections.abc import Mapping
from typing import Any

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a", "b"],
        },
    },
}


async def run(base_url: str, row: Mapping[str, Any], num_turns: int = 3) -> float:
    """The reward is 1 for the right product as the whole answer, and 0 for any other."""
    client = _client().with_options(base_url=base_url)
    messages: list[Any] = [{"role": "user", "content": str(row["question"])}]
    for _ in range(num_turns):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[MULTIPLY])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float((message.content or "").strip() == str(row["answer"]))
        messages += [_result(call) for call in message.tool_calls]
    return 0.0


@functools.cache
def _client() -> Any:
    """One for all rows of a process: to make one takes more time than a row of a tiny model."""
    from openai import AsyncOpenAI  # vLLM brings it; no other part of this package needs it

    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="-")


def _result(call: Any) -> dict[str, str]:
    """The model's message about a call: the result, or why the call goes wrong."""
    try:
        given = json.loads(call.function.arguments)
        content = str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError) as error:  # arguments that the model has made up
        content = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": content}
