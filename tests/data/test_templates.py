"""What enters a chat template, what comes out of it, and which token ends a turn."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.data.end_tokens import end_of_turn, end_tokens
from hybridflow.data.example_texts import example_texts
from hybridflow.data.messages import read_messages
from hybridflow.data.reencode import Reencoder
from hybridflow.data.rows import Row, RowError
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.errors import ConfigError
from tests.data.test_chat import CHATML, EAGER, FORGETFUL, LLAMA3, chat, message, tokenizer

USER = message("user", "one")
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CHATML
SWITCH = CHATML.replace("assistant\n{% endif", "assistant\n{% if enable_thinking is false %}<no>{% endif %}{% endif")
TWO_ROLES = (
    "{% for message in messages %}{% if message.role == 'user' %}U:{{ message.content }}"
    "{% elif message.role == 'assistant' %}A:{{ message.content }}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather"}}


def prompt(template: str, messages: list, fields: dict | None = None, **options: Any) -> str:
    made = ChatTemplate(tokenizer(template), TemplateOptions(**options))
    return made.prompt(read_messages(messages, "a", made.options.form), fields or {}, "a")


def test_tools_of_a_row_are_rendered() -> None:
    """As objects, or as the JSON text that Parquet files have; a template that does not read them is no place."""
    expected = tokenizer(TOOLS).apply_chat_template([USER], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert "weather" in expected
    for tools in ([TOOL], json.dumps([TOOL])):
        assert prompt(TOOLS, [USER], {"tools": tools}) == expected
    assert "<tools>" not in prompt(TOOLS, [USER], {"tools": None}) + prompt(TOOLS, [USER], {"tools": []})
    with pytest.raises(RowError, match="a: the row has tools, which the tokenizer's chat template does not read"):
        prompt(CHATML, [USER], {"tools": [TOOL]})
    known = "{%- set tools_are_known = true -%}" + CHATML  # the model knows its tools by training
    assert prompt(known, [USER], {"tools": [TOOL]}) == prompt(CHATML, [USER])
    with pytest.raises(RowError, match=r"a: tools = 'no' is a text that is not JSON"):
        prompt(TOOLS, [USER], {"tools": "no"})


def test_arguments_of_the_config_and_of_the_row() -> None:
    assert prompt(SWITCH, [USER], kwargs={"enable_thinking": False}).endswith("assistant\n<no>")
    assert prompt(SWITCH, [USER]).endswith("assistant\n")
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(SWITCH, [USER], own, kwargs={"enable_thinking": False}).endswith("assistant\n")
    made = ChatTemplate(tokenizer(CHATML), TemplateOptions(kwargs={"enable_thinking": False}))
    with pytest.raises(ConfigError, match=r"data\.chat_template_kwargs\.enable_thinking: .* does not read it"):
        made.check_options()


def test_an_assistants_message_at_the_end_is_continued() -> None:
    for template in (CHATML, CHATML.replace("message.content", "message.content | trim")):
        for said in ("Let me see: ", "```python\n", " hello", "\nhello", "\n\nhello\n", "\n"):
            assert prompt(template, [USER, message("assistant", said)]).endswith("|im_start|>assistant\n" + said)
    thinking = "{% if '</think>' in message.content %}(thinks) {% endif %}{{ message.content | trim }}"
    thinking, thought = CHATML.replace("{{ message.content }}", thinking), "<think>hm</think>two"
    assert prompt(thinking, [USER, message("assistant", thought + " ")]).endswith("(thinks) " + thought + " ")
    with pytest.raises(RowError, match=r"\[1\]\.content = '\\n<think>.* renders this beginning .* otherwise, "):
        prompt(thinking, [USER, message("assistant", "\n" + thought)])


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_messages_in_other_forms_are_the_same_text(template: str) -> None:
    plain = prompt(template, [USER])
    assert prompt(template, [{"role": "user", "content": [{"type": "text", "text": "o"}, {"text": "ne"}]}]) == plain
    assert prompt(template, [{"from": "human", "value": "one"}], form="sharegpt") == plain
    assert prompt(template, [{"role": "user", "content": "one", "tool_calls": None}]) == plain
    with pytest.raises(RowError, match=r"a\[0\] has from and value .*: data\.message_format: sharegpt reads them"):
        prompt(template, [{"from": "human", "value": "one"}])
    with pytest.raises(RowError, match=r"a\[0\]\.from = 'bing': data\.message_format sharegpt knows human, gpt, "):
        prompt(template, [{"from": "bing", "value": "one"}], form="sharegpt")
    with pytest.raises(RowError, match=r"a\[0\]\.content\[0\] = .*image.* is no text part"):
        prompt(template, [{"role": "user", "content": [{"type": "image"}]}])


def test_a_call_of_a_tool_needs_no_content() -> None:
    calls = [{"function": {"name": "weather"}}]
    (found,) = read_messages([{"role": "assistant", "content": None, "tool_calls": calls}], "a")
    assert found == {"role": "assistant", "content": "", "tool_calls": calls}


def test_a_message_that_leaves_nothing_is_named() -> None:
    """With the roles that the template renders. A template may cut what was said: then something of it is left."""
    with pytest.raises(
        RowError, match=r"a\[0\]: .* leaves out this message of the role 'system', 'be brief'; it .*user"
    ):
        prompt(TWO_ROLES, [message("system", "be brief"), USER])
    with pytest.raises(RowError, match=r"a\[1\]: .* leaves out this message of the role 'tool', 'one'"):
        prompt(TWO_ROLES, [USER, message("tool", "one"), USER])  # the text of another message is not its own
    thought = message("assistant", "<think>hm</think>two")
    assert "two<|im_end|>" in prompt(FORGETFUL, [USER, thought, USER])


# ------------------------------------------------------------------------------------------------ what is trained


def sequences(template: str, fields: dict, **options: Any) -> list[tuple[str, list[str]]]:
    found = example_texts(Row("row", fields), "sft", tokenizer(template), TemplateOptions(**options)).sequences
    return [(its.text, [its.text[start:end] for start, end in its.spans]) for its in found]


def test_a_weight_of_0_is_not_trained_on() -> None:
    talk = [USER, message("assistant", "bad") | {"weight": 0}, USER, message("assistant", "good") | {"weight": 1}]
    [(text, said)] = sequences(CHATML, {"messages": talk})
    assert said == ["good<|im_end|>"] and "bad" in text
    with pytest.raises(RowError, match=r"row: messages\[1\]\.weight = 0\.5, expected 0 or 1"):
        sequences(CHATML, {"messages": [USER, message("assistant", "bad") | {"weight": 0.5}]})


THOUGHT = [USER, message("assistant", "<think>hm</think>two"), message("user", "why"), message("assistant", "so")]


def test_each_turn_is_trained_in_the_past_that_a_run_would_see() -> None:
    """Where the template leaves out earlier thinking, and nowhere else, unless the config says so."""
    first = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    second = "two<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>"
    thinking = "<think>hm</think>two<|im_end|>"
    apart = [(first + thinking, [thinking]), (first + second, ["so<|im_end|>"])]
    assert sequences(FORGETFUL, {"messages": THOUGHT}) == apart
    assert sequences(FORGETFUL, {"messages": THOUGHT}, turns="each") == apart
    assert len(sequences(CHATML, {"messages": THOUGHT})) == 1
    assert [said for _, said in sequences(CHATML, {"messages": THOUGHT}, turns="each")] == [
        [thinking],
        ["so<|im_end|>"],
    ]
    with pytest.raises(RowError, match="which tokens are the assistant's cannot be told"):
        sequences(FORGETFUL, {"messages": THOUGHT}, turns="together")
    with pytest.raises(RowError, match="lets a run begin one"):
        sequences(EAGER, {"messages": THOUGHT}, turns="each")


def test_a_sequence_ends_with_the_end_of_the_last_turn() -> None:
    """Also where a template's marks leave the end token out: a run's response has it, and a score is read there."""
    marked = CHATML.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}")
    marked = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}" + (
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for template, said in ((CHATML, "two<|im_end|>"), (marked, "two")):
        [(text, spans)] = sequences(template, {"messages": [USER, message("assistant", "two")]})
        assert text.endswith("two<|im_end|>") and spans == [said]


# ------------------------------------------------------------------------------------------------ end tokens


@pytest.mark.parametrize(("template", "token"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (TWO_ROLES, None)])
def test_the_token_that_ends_a_turn(template: str, token: str | None) -> None:
    made = tokenizer(template)
    assert end_of_turn(made) == (None if token is None else made.convert_tokens_to_ids(token))


def test_all_that_ends_a_response(tmp_path: Path) -> None:
    """Both files, the tokenizer, and of conversations the template; each with those who name it."""
    made = tokenizer(CHATML)
    end, turn = made.eos_token_id, made.convert_tokens_to_ids("<|im_end|>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, end]}))
    found = end_tokens(tmp_path, made, 99, template=True)
    assert found.ids == tuple(sorted({4, 5, end, turn})) and found.of_template == turn
    assert f"'<|im_end|>' ({turn}) by the chat template" in found.described(made)
    assert f"({end}) by generation_config.json, the tokenizer" in found.described(made)
    assert turn not in end_tokens(tmp_path, made, 99, template=False).ids


# ------------------------------------------------------------------------------------------------ another tokenizer


def test_texts_are_encoded_anew_by_the_reward_models_own_template() -> None:
    judge = tokenizer(LLAMA3)
    prompts = PromptBatch(
        *(rows([[1], [1], [1]]).input_ids, rows([[1], [1], [1]]).lengths, ("", "", "one"), {}),
        conversations=([USER], [USER, message("assistant", "two")], None),
    )
    names = {7: "two", 8: " why"}
    reencode = Reencoder("reward.models.0", ChatTemplate(judge), lambda ids: "".join(names[i] for i in ids), 99)
    found = reencode(rows([[1, 7], [1, 8], [1, 8]]), prompts)
    texts = [judge.decode(ids) for ids in found.input_ids.split(found.lengths.tolist())]
    wanted = [
        judge.apply_chat_template([USER, message("assistant", said)], tokenize=False) for said in ("two", "two why")
    ]
    plain = judge("one why" + judge.eos_token)["input_ids"]
    assert texts[:2] == [judge.decode(judge(text, add_special_tokens=False)["input_ids"]) for text in wanted]
    assert found.input_ids.split(found.lengths.tolist())[2].tolist() == plain
    with pytest.raises(
        ConfigError, match=r"reward\.models\.0\.reencode: .* tokens of this model, more than the 3 that the model reads"
    ):
        Reencoder("reward.models.0", chat(LLAMA3), lambda ids: "two", 3)(rows([[1, 7]]), prompts)


def rows(ids: list[list[int]]) -> RolloutBatch:
    """Prompts of one token each, and their responses."""

    lengths = torch.tensor([len(one) for one in ids])
    flat = torch.tensor([token for one in ids for token in one])
    count = torch.arange(len(ids))
    none = torch.zeros(len(flat), dtype=torch.bool)
    return RolloutBatch(flat, lengths, torch.ones_like(lengths), count, count < 0, none, torch.zeros(len(flat)))
