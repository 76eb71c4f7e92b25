"""A turn of the model as OpenAI's API has it, whole or in the chunks of a stream; or as vLLM has tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Completion:
    """message: of the assistant, arguments of tool calls as JSON texts. tokens: of the request, and of the turn.

    tells_usage: a streamed one ends with a chunk that has the numbers of tokens.
    """

    name: str
    message: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    tells_usage: bool = False

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True)
class TokenCompletion:
    """log_probs: of each token. prompt_tokens: of the request."""

    name: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int


def generated(completion: TokenCompletion, model: str) -> dict[str, Any]:
    """As `/inference/v1/generate` answers: vLLM 0.32.0 names a token by its number, verifiers 0.4.0 asks for a text."""
    both = zip(completion.token_ids, completion.log_probs, strict=True)
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": log_prob} for token, log_prob in both]
    choice = {
        "index": 0,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": content},
    }
    tokens, own = completion.prompt_tokens, len(completion.token_ids)
    usage = {"prompt_tokens": tokens, "completion_tokens": own, "total_tokens": tokens + own}
    return {"request_id": completion.name, "created": 0, "model": model, "choices": [choice], "usage": usage}


def whole(completion: Completion, model: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {**completion.message, "refusal": None},
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }
    return _head(completion, model, "chat.completion") | {"choices": [choice], "usage": completion.usage}


def chunks(completion: Completion, model: str) -> list[dict[str, Any]]:
    """The role, what is said, and why it ends."""
    message = completion.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    if message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]})
    reasons = [None] * len(deltas) + [completion.finish_reason]
    choices = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        for delta, reason in zip([*deltas, {}], reasons, strict=True)
    ]
    head = _head(completion, model, "chat.completion.chunk")
    last = [head | {"choices": [], "usage": completion.usage}] if completion.tells_usage else []
    return [*(head | {"choices": [choice]} for choice in choices), *last]


def _head(completion: Completion, model: str, kind: str) -> dict[str, Any]:
    return {"id": completion.name, "object": kind, "created": 0, "model": model}
