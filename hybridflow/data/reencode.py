"""Responses in the tokens of a reward model with another tokenizer than the actor's.

The prompt and the response are texts again. A conversation is rendered by the reward model's chat template, up to the
token that ends the assistant's turn there; a plain prompt is followed by the response and the model's end token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.data.messages import Message
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Reencoder:
    """decode: token ids of the actor as text. max_tokens: that the reward model reads of a sequence."""

    name: str
    template: ChatTemplate
    decode: Callable[[list[int]], str]
    max_tokens: int

    @classmethod
    def for_model(cls, name: str, model: str, decode: Callable[[list[int]], str], max_tokens: int) -> "Reencoder":
        template = ChatTemplate(load_tokenizer(Path(model)), TemplateOptions(model_key=f"{name}.model"))
        return cls(name, template, decode, max_tokens)

    def __call__(self, rollout: RolloutBatch, prompts: PromptBatch) -> RolloutBatch:
        """The same rows; tokens alone have a meaning, and of each row the last is read. Errors: ConfigError."""
        sequences = rollout.input_ids.split(rollout.lengths.tolist())
        starts, numbers = rollout.prompt_lengths.tolist(), rollout.prompt_indices.tolist()
        texts = [
            self._text(prompts, number, self.decode(ids[start:].tolist()))
            for ids, start, number in zip(sequences, starts, numbers, strict=True)
        ]
        tokenizer = self.template.tokenizer
        encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(map(len, encoded))
        if longest > self.max_tokens:
            raise ConfigError(
                f"{self.name}.reencode: a prompt with its response has {longest} tokens of this model, more than the "
                f"{self.max_tokens} that the model reads (micro_batch_tokens, max_position_embeddings)"
            )
        lengths = torch.tensor([len(ids) for ids in encoded], dtype=torch.int64)
        size = int(lengths.sum())
        return RolloutBatch(
            input_ids=torch.tensor([token_id for ids in encoded for token_id in ids], dtype=torch.int64),
            lengths=lengths,
            prompt_lengths=torch.ones_like(lengths),
            prompt_indices=rollout.prompt_indices,
            truncated=rollout.truncated,
            response_mask=torch.zeros(size, dtype=torch.bool),
            rollout_log_probs=torch.zeros(size),
        )

    def _text(self, prompts: PromptBatch, number: int, response: str) -> str:
        messages = prompts.conversations[number] if prompts.conversations else None
        if messages is None:
            tokenizer = self.template.tokenizer
            first = tokenizer.bos_token if tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id] else None
            return f"{first or ''}{prompts.texts[number]}{response}{tokenizer.eos_token or ''}"
        where, whole = f"{self.name}: a response", _with_response(messages, response)
        text = self.template.whole(whole, where, {})
        end = self.template.end_of_turn
        if end is not None and end in text:
            return text[: text.rindex(end) + len(end)]
        return text


def _with_response(messages: Sequence[Message], response: str) -> list[Message]:
    """The messages, with the response as the assistant's message, or as the rest of the one that the prompt began."""
    if messages[-1]["role"] == "assistant":
        return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + response}]
    return [*messages, {"role": "assistant", "content": response}]
