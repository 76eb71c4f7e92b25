"""Reward models behind HTTP, as `reward.remote` names them: one request a response, several under way, tried again.

json_score    POST URL {"prompt", "response", "columns"} -> a number, or {"score": number}
judge_score   POST URL/chat/completions of an OpenAI-compatible server -> what the judge says (`rewards/verdict.py`)

What is tried again: no connection, no answer in time, and a status that says later. A wrong answer is an error at once.
"""

import asyncio
import base64
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridflow.parallel.proxies import is_loopback
from hybridflow.rewards.verdict import verdict

if TYPE_CHECKING:
    import httpx

CUT = frozenset({"length", "max_tokens", "model_length", "content_filter", "abort", "error"})  # finish_reason
LATER = frozenset({408, 409, 425, 429, *range(500, 600)})  # statuses after which it is tried again
NAME = re.compile(r"\{(\w+)\}")
SHOWN = 200  # characters of an answer in a message


async def json_score(
    prompts: list[str],
    responses: list[str],
    columns: dict[str, list[Any]],
    *,
    url: str,
    request_seconds: float,
    retries: int,
    backoff_seconds: float,
    api_key: str | None = None,
) -> list[float]:
    """Errors: ConnectionError where no attempt had an answer, ValueError where the answer is no score."""
    scores = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = {name: values[row] for name, values in columns.items()}
        answer = await _answer(
            url,
            {"prompt": prompt, "response": response, "columns": own},
            request_seconds=request_seconds,
            retries=retries,
            backoff_seconds=backoff_seconds,
            api_key=api_key,
        )
        scores.append(_number(answer.get("score") if isinstance(answer, dict) else answer, url, answer))
    return scores


async def judge_score(
    prompts: list[str],
    responses: list[str],
    columns: dict[str, list[Any]],
    *,
    url: str,
    model: str,
    template: str,
    max_tokens: int,
    lowest: float,
    highest: float,
    request_seconds: float,
    retries: int,
    backoff_seconds: float,
    api_key: str | None = None,
) -> list[float]:
    """Greedy. Errors: as `json_score`, and ValueError for a number that is not in [lowest, highest]."""
    scores = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        own = {name: values[row] for name, values in columns.items()}
        text = filled(template, own | {"prompt": prompt, "response": response})
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        answer = await _answer(
            f"{url.rstrip('/')}/chat/completions",
            asked,
            request_seconds=request_seconds,
            retries=retries,
            backoff_seconds=backoff_seconds,
            api_key=api_key,
        )
        scores.append(_judgement(answer, url, lowest, highest))
    return scores


def filled(template: str, values: dict[str, Any]) -> str:
    """With {name} replaced, once: what a response has in braces stays. Errors: ValueError for a name that is none."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise ValueError(f"template: {found[0]} is none of {', '.join(sorted(values))}")
        return str(values[found[1]])

    return NAME.sub(value, template)


async def _answer(
    url: str, asked: Any, *, request_seconds: float, retries: int, backoff_seconds: float, api_key: str | None
) -> Any:
    """What the server says, as JSON."""
    import httpx  # for those who ask for it

    headers = {"Content-Type": "application/json"}
    headers |= {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    body = json.dumps(_as_json(asked)).encode()
    problem = ""
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(backoff_seconds * 2 ** (attempt - 1))
        try:
            async with asyncio.timeout(request_seconds):
                reply = await _client(is_loopback(url)).post(url, content=body, headers=headers)
        except TimeoutError:
            problem = f"none within {request_seconds:g} s"
            continue
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if reply.status_code not in LATER:
            return _read(reply, url)
        problem = f"status {reply.status_code}: {reply.text[:SHOWN]}"
    raise ConnectionError(f"{url}: no answer in {retries + 1} attempts; the last: {problem}")


@functools.cache
def _client(is_direct: bool) -> "httpx.AsyncClient":
    """Of this process: connections stay open between rows. Time limits are the caller's: httpx's are of each read.

    is_direct: no proxy of the environment is asked.
    """
    import httpx

    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=not is_direct)


def _as_json(value: Any) -> Any:
    """What JSON has no word for: null of what is not finite, base64 of bytes, lists of arrays, else the text of it."""
    if hasattr(value, "tolist"):  # of numpy or torch
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int) else str(value)


def _read(reply: "httpx.Response", url: str) -> Any:
    if reply.status_code != 200:
        raise ValueError(f"{url}: status {reply.status_code}: {reply.text[:SHOWN]}")
    try:
        return reply.json()
    except ValueError as error:
        raise ValueError(f"{url}: answers what is not JSON: {reply.text[:SHOWN]!r}") from error


def _number(score: Any, url: str, answer: Any) -> float:
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        shown = repr(answer)[:SHOWN]
        raise ValueError(f'{url}: answers {shown}; expected a finite number, or {{"score": number}}')
    return float(score)


def _judgement(answer: Any, url: str, lowest: float, highest: float) -> float:
    try:
        choice = answer["choices"][0]
        text, ended = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{url}: answers {repr(answer)[:SHOWN]}; expected a chat completion") from error
    if ended in CUT:
        raise ValueError(f"{url}: the judge is cut (finish_reason {ended}), which is no score: {repr(text)[-SHOWN:]}")
    if not isinstance(text, str):
        raise ValueError(f"{url}: answers {repr(answer)[:SHOWN]}; expected a chat completion")
    try:
        return verdict(text, lowest, highest)
    except ValueError as error:
        raise ValueError(f"{url}: {error}: {text[-SHOWN:]!r}") from error
