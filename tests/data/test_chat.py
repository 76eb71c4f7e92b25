"""Which characters of a conversation the assistant says, by several templates, and where that cannot be told."""

import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.data.chat import render_chats
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from tests.data.test_prompts import word_tokenizer
from tests.messages import like

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# leaves out what the assistant thought, but in the last message, as reasoning models have it
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# lets a run begin with thinking that is not in the conversations
EAGER = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>{% endif")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = word_tokenizer()
    made.chat_template = template
    made.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>"]}
    )
    return made


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [
    message("system", "be brief"),
    message("user", "one"),
    message("assistant", "two"),
    message("user", "why"),
    message("assistant", "<think>hm</think>so"),
]


def chat(template: str, turns: str = "auto") -> ChatTemplate:
    return ChatTemplate(tokenizer(template), TemplateOptions(turns=turns))


def said(template: str, messages: list, *, turns: str = "together", **options: int) -> list[str]:
    (found,) = render_chats(messages, chat(template, turns), "a, line 1: messages", **options)
    return [found.text[start:end] for start, end in found.spans]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (MARKED, "<|im_end|>"), (FORGETFUL, "<|im_end|>")],
)
def test_the_assistant_says_its_messages_and_their_ends(template, end) -> None:
    assert said(template, TALK) == [f"two{end}", f"<think>hm</think>so{end}"]
    assert said(template, TALK, first=4) == [f"<think>hm</think>so{end}"]
    assert said(template, TALK[:3]) == [f"two{end}"]


def test_the_text_is_the_whole_conversation() -> None:
    assert render_chats(TALK[:3], chat(LLAMA3), "a")[0].text == (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|>"
    )


def test_a_template_without_an_end_token_leaves_the_message_whole() -> None:
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert said(plain, TALK[:3]) == ["two\n"]


THOUGHT = [message("user", "one"), message("assistant", "<think>hm</think>two"), *TALK[3:]]


def test_a_template_that_forgets_is_refused_where_there_is_something_to_forget() -> None:
    with pytest.raises(RowError) as raised:
        said(FORGETFUL, THOUGHT)
    assert str(raised.value) == (
        like(
            "a, line 1: messages[1]: which tokens are the assistant's cannot be told: the chat template renders the "
            "conversation up to it otherwise once more messages follow; give the tokenizer a template with "
            "{% generation %} marks"
        )
    )
    assert said(FORGETFUL, THOUGHT, first=3) == ["<think>hm</think>so<|im_end|>"]
    assert said(CHATML, THOUGHT) == ["<think>hm</think>two<|im_end|>", "<think>hm</think>so<|im_end|>"]


def test_a_template_that_begins_a_run_otherwise_is_refused() -> None:
    with pytest.raises(RowError, match=r"the message otherwise than it lets a run begin one, .*<think>'"):
        said(EAGER, TALK[:3])
    thinking = [TALK[1], message("assistant", "<think>hm</think>two")]
    assert said(EAGER, thinking) == ["hm</think>two<|im_end|>"]


def test_marks_have_to_be_as_many_as_messages() -> None:
    last = MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last")
    with pytest.raises(RowError, match=r"marks 1 parts by \{% generation %\}, the assistant has 2 messages"):
        said(last, TALK)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_conversation_without_the_assistant_is_refused(template) -> None:
    for messages, first in ((TALK[:2], 0), (TALK, 5)):
        with pytest.raises(RowError, match="a, line 1: messages: has no message of the assistant to be trained on"):
            said(template, messages, first=first)


def test_a_tokenizer_without_a_template_and_a_template_that_raises() -> None:
    without = word_tokenizer()
    without.chat_template = None
    with pytest.raises(RowError, match="a: the tokenizer has no chat template"):
        render_chats(TALK, ChatTemplate(without), "a")
    for template in (CHATML, MARKED):
        with pytest.raises(
            RowError, match="a, line 1: messages: the tokenizer's chat template cannot render it: no one"
        ):
            said(template + "{{ raise_exception('no one') }}", TALK)
