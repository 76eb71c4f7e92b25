"""Agents as users write them, with OpenAI's client as it is; tests name them in configs."""

import asyncio
import contextlib
import json
import os
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def client_of(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="-")


def first(row: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": row["question"]}]


def number(row: dict[str, Any]) -> int:
    return int(row["question"].partition("+")[0])


async def calculator(base_url: str, row: dict[str, Any], turns: int = 3, delay: float = 0.0) -> float:
    """Talks for so many turns, with a tool; a row's reward is the number of characters said, over 100."""
    messages, said = first(row), 0
    async with client_of(base_url) as client:
        for _ in range(turns):
            answer = await client.chat.completions.create(
                model="gpt", messages=messages, tools=[ADD], temperature=0.1, seed=3
            )
            message = answer.choices[0].message
            assert (answer.choices[0].finish_reason == "tool_calls") == bool(message.tool_calls)
            assert answer.usage.completion_tokens <= 16 and answer.usage.prompt_tokens >= 13
            messages.append(message)
            said += len(message.content or "")
            if delay:
                await asyncio.sleep(random.SystemRandom().uniform(0.0, delay))
            for call in message.tool_calls or ():
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"]) if call.function.name == "add" else "unknown"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                messages.append({"role": "user", "content": f"no {len(message.content or '')}"})
    return said / 100


async def stops_between(base_url: str, row: dict[str, Any], at: int | None = None, words: str = "") -> float:
    """As the calculator. Rows of one question stop behind the first answer, and a file names their processes."""
    if number(row) == at:
        async with client_of(base_url) as client:
            await client.chat.completions.create(model="gpt", messages=first(row), tools=[ADD])
        own = await asyncio.create_subprocess_exec("sleep", "600")
        word = Path(words) / base_url.split("/")[-2]
        word.with_suffix(".part").write_text(f"{os.getpid()} {own.pid}")
        word.with_suffix(".part").rename(word.with_suffix(".pids"))
        await own.wait()
    return await calculator(base_url, row)


async def streamed(base_url: str, row: dict[str, Any]) -> dict[str, float]:
    """The same messages by a stream, with a limit of its own; parts of a reward."""
    messages, tokens = first(row), 0
    async with client_of(base_url) as client:
        names = [model.id async for model in client.models.list()]
        for _ in range(2):
            text, usage = "", None
            stream = await client.chat.completions.create(
                model=names[0], messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert usage is not None and usage.completion_tokens <= 5
            tokens += usage.completion_tokens
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return {"tokens": float(tokens), "one": 1.0}


async def given_prompt(base_url: str, row: dict[str, Any]) -> float:
    """Begins with the prompt of the data file."""
    async with client_of(base_url) as client:
        answer = await client.chat.completions.create(model="gpt", messages=row["prompt"], tools=row["tools"])
        return float(len(answer.choices[0].message.content or ""))


async def with_word(base_url: str, row: dict[str, Any], file: str, address: str) -> dict[str, float]:
    """At another interface: tries all other ways in, and then comes with the word of the file."""
    url = urlsplit(base_url)
    assert url.hostname == address
    with contextlib.suppress(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", url.port)
        raise AssertionError("it is reached at 127.0.0.1")
    tries = 0
    async with DefaultAsyncHttpxClient(trust_env=False) as http:
        for word in ("-", "another", "secrets"):
            client = AsyncOpenAI(base_url=base_url, api_key=word, http_client=http)
            with contextlib.suppress(openai.AuthenticationError):
                await client.chat.completions.create(model="gpt", messages=first(row))
                raise AssertionError(f"{word!r} was answered")
            tries += 1
        client = AsyncOpenAI(base_url=base_url, api_key=Path(file).read_text().strip(), http_client=http)
        answer = await client.chat.completions.create(model="gpt", messages=first(row))
    return {"tokens": float(answer.usage.completion_tokens), "refused": float(tries)}


async def fragile(base_url: str, row: dict[str, Any]) -> Any:
    """By the row's question: ends well, raises, hangs, ends its process."""
    async with client_of(base_url) as client:
        await client.chat.completions.create(model="gpt", messages=first(row))
    match number(row):
        case 1:
            raise ValueError("on purpose")
        case 2:
            await asyncio.sleep(600)
        case 3:
            os._exit(7)
    return 1.0


async def wrong(base_url: str, row: dict[str, Any], what: str) -> Any:
    """Does what an agent may not do."""
    messages = first(row)
    async with client_of(base_url) as client:
        create = client.chat.completions.create
        match what:
            case "asks for nothing":
                return 1.0
            case "asks for two":
                await create(model="gpt", messages=messages, n=2)
            case "another conversation":
                await create(model="gpt", messages=messages)
                with contextlib.suppress(openai.BadRequestError):
                    await create(model="gpt", messages=[*messages, *messages])
            case "other tools":
                answer = await create(model="gpt", messages=messages)
                await create(model="gpt", messages=[*messages, answer.choices[0].message, *messages], tools=[ADD])
            case "two at once":
                both = [create(model="gpt", messages=messages) for _ in range(2)]
                await asyncio.gather(*both, return_exceptions=True)
            case "too long":
                await create(model="gpt", messages=messages * 9)
            case "returns a text":
                await create(model="gpt", messages=messages)
                return "a text"
    return 1.0


async def sometimes_silent(base_url: str, row: dict[str, Any]) -> float:
    """Asks for nothing where the row's question is an odd one; others have a reward by chance of their words."""
    if number(row) % 2:
        raise ValueError("on purpose")
    return await calculator(base_url, row, turns=2)


async def leaves(base_url: str, row: dict[str, Any]) -> float:
    """No longer waits for an answer, and asks again."""
    messages = first(row)
    async with client_of(base_url) as client:
        for _ in range(2):
            task = asyncio.ensure_future(client.chat.completions.create(model="gpt", messages=messages))
            await asyncio.sleep(0.02 * (1 + number(row)))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            again = {"x-stainless-retry-count": "1"}  # whether the server has noticed or not
            answer = await client.chat.completions.create(model="gpt", messages=messages, extra_headers=again)
            messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        return 1.0


async def endless(base_url: str, row: dict[str, Any]) -> float:
    """Goes on until it is refused; then some raise, and some have a reward."""
    messages = first(row)
    async with client_of(base_url) as client:
        while True:
            try:
                answer = await client.chat.completions.create(model="gpt", messages=messages)
            except openai.BadRequestError as error:
                assert error.code in ("turns_used_up", "context_length_exceeded")
                if number(row) % 2:
                    raise
                return 0.5
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]


async def with_sub_agents(base_url: str, row: dict[str, Any], delay: float = 0.0) -> float:
    """Asks, has two sub-agents at work at the same time, says what they found, and goes on with a shortened history."""
    said = 0
    async with client_of(base_url) as client:

        async def ask(messages: list[Any]) -> str:
            nonlocal said
            await asyncio.sleep(random.SystemRandom().uniform(0.0, delay))
            answer = await client.chat.completions.create(model="gpt", messages=messages)
            messages.append(answer.choices[0].message)
            said += len(messages[-1].content or "")
            return messages[-1].content or ""

        async def sub_agent(name: str) -> str:
            messages = [{"role": "system", "content": name}, *first(row)]
            await ask(messages)
            messages.append({"role": "user", "content": "again"})
            return await ask(messages)

        messages = first(row)
        await ask(messages)
        found = await asyncio.gather(sub_agent("one"), sub_agent("two"))
        messages.append({"role": "user", "content": " ".join(map(str, map(len, found)))})
        last = await ask(messages)
        await ask([{"role": "user", "content": f"so far {len(last)}"}])
    return said / 100


async def together(base_url: str, row: dict[str, Any], delay: float = 0.0) -> float:
    """Begins two conversations at the same time, one of them twice, and then goes on with the other one."""
    async with client_of(base_url) as client:

        async def ask(messages: list[Any]) -> list[Any]:
            await asyncio.sleep(random.SystemRandom().uniform(0.0, delay))
            answer = await client.chat.completions.create(model="gpt", messages=messages)
            return [*messages, answer.choices[0].message]

        other = [{"role": "system", "content": "other"}, *first(row)]
        begun = await asyncio.gather(ask(first(row)), ask(other), ask(other))
        begun.append(await ask([*begun[0], {"role": "user", "content": "no"}]))
    return sum(len(messages[-1].content or "") for messages in begun) / 100


async def blocks(base_url: str, row: dict[str, Any]) -> float:
    """Does not end when it is told to."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


def no_coroutine(base_url: str, row: dict[str, Any]) -> float:
    return 1.0


async def takes_one(base_url: str) -> float:
    return 1.0
