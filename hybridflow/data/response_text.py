"""The text of a response as reward functions and samples.jsonl see it: with special tokens that are content, or not.

    texts = ResponseTexts.from_tokenizer(tokenizer, end_token_ids, special_tokens="content")
    texts.text(token_ids)        "<think>two and two</think>4", without <|im_end|>

Special tokens that end or pad a response, begin a text, or are of the chat template's turns are no content. All others
are, such as <think> or <tool_call> where the tokenizer has them as special tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridflow.config.rewards import SpecialTokens
from hybridflow.data.tokenizers import decoded
from hybridflow.rewards.texts import opening_of

NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
SAID = "hybridflow"  # what stands in for messages, and is in no template


@dataclass(frozen=True)
class ResponseTexts:
    """hidden: special tokens that no text shows. shown: special tokens that texts show."""

    tokenizer: PreTrainedTokenizerBase
    hidden: frozenset[int]
    shown: frozenset[int]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], *, special_tokens: SpecialTokens
    ) -> "ResponseTexts":
        special = _special_ids(tokenizer)
        if special_tokens == "all":
            return cls(tokenizer, frozenset(), special)
        if special_tokens == "none":
            return cls(tokenizer, special, frozenset())
        named = {getattr(tokenizer, f"{name}_token_id", None) for name in NAMED}
        hidden = special & ({*ends} | named | _of_turns(tokenizer))
        return cls(tokenizer, hidden, special - hidden)

    def text(self, token_ids: list[int]) -> str:
        shows = not self.shown.isdisjoint(token_ids)  # else as transformers leaves special tokens out
        kept = [i for i in token_ids if i not in self.hidden] if shows else token_ids
        return decoded(kept, self.tokenizer, skip_special_tokens=not shows)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _of_turns(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Of what the chat template puts around a user's message, and around the assistant's turn.

    Thinking that the template begins is the assistant's own.
    """
    user, assistant = ({"role": role, "content": SAID} for role in ("user", "assistant"))
    begun = _rendered(tokenizer, [user], prompts=True)
    ended = _rendered(tokenizer, [user, assistant], prompts=False).rpartition(SAID)[2]
    texts = [begun[: len(begun) - len(opening_of(begun))], ended]
    return {i for text in texts if text for i in tokenizer(text, add_special_tokens=False)["input_ids"]}


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, prompts: bool) -> str:
    """Nothing where there is no template, or one that takes no such messages."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompts, tokenize=False)
    except Exception:  # a template is a program of the model's authors and raises what it likes
        return ""
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    return text
