"""Which special tokens of a response its text shows."""

import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.data.response_text import ResponseTexts
from tests.data.test_chat import CHATML, EAGER, LLAMA3
from tests.data.test_prompts import word_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTENT = ["<think>", "</think>", "<tool_call>"]


def tokenizer(template: str | None, *, content: list[str] = CONTENT) -> PreTrainedTokenizerFast:
    made = word_tokenizer()
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL, *content]})
    return made


def text_of(made: PreTrainedTokenizerFast, tokens: list[str], special_tokens: str, ends: tuple[int, ...] = ()) -> str:
    texts = ResponseTexts.from_tokenizer(made, ends, special_tokens=special_tokens)
    return texts.text([made.convert_tokens_to_ids(token) for token in tokens]).replace(" ", "")


@pytest.mark.parametrize(
    ("template", "turn", "end"),
    [
        (CHATML, "<|im_start|>", "<|im_end|>"),
        (EAGER, "<|im_start|>", "<|im_end|>"),
        (LLAMA3, "<|start_header_id|>", "<|eot_id|>"),
        (LLAMA3, "<|end_header_id|>", "<|eot_id|>"),
    ],
)
def test_content_is_shown_and_ends_are_not(template: str, turn: str, end: str) -> None:
    made = tokenizer(template)
    said = ["<think>", "one", "</think>", "<tool_call>", "two"]
    tokens = [*said, end, turn, made.pad_token or made.eos_token]
    assert text_of(made, tokens, "content") == "".join(said)
    assert text_of(made, tokens, "none") == "onetwo"
    assert text_of(made, tokens, "all") == "".join(tokens)


def test_what_ends_a_response_is_no_content_whatever_the_template_says() -> None:
    made = tokenizer(None)
    end = made.convert_tokens_to_ids("<|eot_id|>")
    assert text_of(made, ["<think>", "one", "<|eot_id|>"], "content", (end,)) == "<think>one"
    assert text_of(made, ["one", "<|eot_id|>"], "content") == "one<|eot_id|>"  # nobody says that it is an end


def test_without_content_tokens_the_text_is_what_transformers_makes_of_it() -> None:
    made = tokenizer(CHATML, content=[])
    ids = made.convert_tokens_to_ids(["one", "two", "<|im_end|>"])
    assert ResponseTexts.from_tokenizer(made, (), special_tokens="content").text(ids) == made.decode(
        ids, skip_special_tokens=True
    )


def test_a_template_that_refuses_is_none() -> None:
    assert text_of(tokenizer("{{ raise_exception('no') }}"), ["<think>", "one"], "content") == "<think>one"
