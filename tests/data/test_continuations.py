"""What follows a turn, by templates of all kinds: the text by hand, and what is told where a message would be lost."""

from typing import Any

import pytest

from hybridflow.data.continuations import Continuations, EarlierTurns
from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.messages import Message
from hybridflow.data.rows import RowError
from hybridflow.data.templates import ChatTemplate
from hybridflow.errors import ConfigError, OtherConversation
from tests.data.kinds_of_templates import KINDS, calls, result, says, tokenizer_of

ASK, SAID, MORE = says("user", "what is it?"), says("assistant", "seven"), says("user", "and THEN?")
NINE_ID = "AB12cd34E"


def continuations(kind: str, mode: EarlierTurns = "keep") -> Continuations:
    tokenizer = tokenizer_of(KINDS[kind])
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", "<|eos|>"])
    return Continuations.from_template(
        ChatTemplate(tokenizer), (), end_of_turn(tokenizer), earlier_turns=mode, ends=ends
    )


def behind(
    its: Continuations, through: list[Message], answers: list[Message], ended: str | None = "", **fields: Any
) -> str:
    """The text that is written behind a turn. ended: its last token; the template's own where nothing is said."""
    tokenizer = its.template.tokenizer
    end = its.end if ended == "" else None if ended is None else tokenizer.convert_tokens_to_ids(ended)
    return tokenizer.decode(its.tokens(through, answers, fields, ended=end))


ANSWERED = {
    "plain": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "roles": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "hoists": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "forgets": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "next role": "\nand THEN?<|assistant|>\n",
    "channels": "<|start|>user<|message|>and THEN?<|end|><|start|>assistant",
    "nine": "[INST]and THEN?[/INST]",
    "null": "<|user|>and THEN?<|assistant|>",
    "one call": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "strict": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n",
    "xml": "\n<|im_start|>user\nand THEN?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "turns": "\n<|turn|>user\nand THEN?<|end|>\n<|turn|>model\n",
}
# a template may render a turn otherwise once more messages follow: which of ours do
REWRITES = {"forgets", "channels", "xml"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_follows_a_turn(kind: str) -> None:
    """Behind the token by which the model has ended the turn; without one the template's own comes first."""
    assert behind(continuations(kind), [ASK, SAID], [MORE]) == ANSWERED[kind]
    unended = behind(continuations(kind), [ASK, SAID], [MORE], None)
    ends = {"next role": "<|user|>", "nine": "</s>", "null": "<|eos|>", "channels": "<|end|>", "turns": "<|end|>"}
    assert unended == ends.get(kind, "<|im_end|>") + ANSWERED[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_rewrites_turns_is_refused_and_no_other(kind: str) -> None:
    if kind in REWRITES:
        with pytest.raises(ConfigError, match="an earlier turn of the assistant in another way"):
            continuations(kind, "refuse")
    else:
        assert behind(continuations(kind, "refuse"), [ASK, SAID], [MORE]) == ANSWERED[kind]


RESULTS = {
    "plain": "\n<|im_start|>tool\nTWELVE<|im_end|>\n<|im_start|>assistant\n",
    "forgets": "\n<|im_start|>tool\nTWELVE<|im_end|>\n<|im_start|>assistant\n",
    "next role": "<|observation|>\nTWELVE<|assistant|>\n",
    "channels": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"TWELVE"<|end|><|start|>assistant',
    "nine": f'[TOOL_RESULTS]{{"content": TWELVE, "call_id": "{NINE_ID}"}}[/TOOL_RESULTS]',
    "null": "<|result|>TWELVE<|assistant|>",
    "one call": "\n<|im_start|>tool\nTWELVE<|im_end|>\n<|im_start|>assistant\n",
    "xml": "\n<|im_start|>user\n<tool_response>\nTWELVE\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("mode", ["keep", "branch"])
def test_the_result_of_a_tool_follows_a_call(kind: str, mode: EarlierTurns) -> None:
    turn, told = calls("add", {"n": 12}, NINE_ID), result("TWELVE", NINE_ID)
    its = continuations(kind, mode)
    try:
        found = behind(its, [ASK, turn], [told], "<|call|>" if kind == "channels" else "<|eos|>")
    except OtherConversation:  # then a sequence of the row begins
        assert mode == "branch" and kind in REWRITES
    else:
        assert found == RESULTS[kind]


def test_a_role_that_ends_a_turn_is_written_once_and_another_is_not_taken_for_it() -> None:
    """The model has ended its turn as if a result came: the user's message keeps its role."""
    its = continuations("next role")
    assert behind(its, [ASK, SAID], [MORE], "<|observation|>") == "<|user|>\nand THEN?<|assistant|>\n"
    assert behind(its, [ASK, SAID], [MORE], "<|user|>") == "\nand THEN?<|assistant|>\n"


def test_a_next_role_that_ends_no_turn_is_told() -> None:
    tokenizer = tokenizer_of(KINDS["next role"])
    with pytest.raises(ConfigError, match=r"'<\|user\|>' of the next message is no end token .*generation_config"):
        Continuations.from_template(ChatTemplate(tokenizer), (), None, ends=[tokenizer.eos_token_id])


@pytest.mark.parametrize("kind", ["plain", "forgets", "channels"])
def test_an_end_token_that_the_model_has_written_out_ends_nothing(kind: str) -> None:
    """In its thinking, as the characters of the token."""
    thought = says("assistant", "<think>it ends by <|im_end|> or <|return|></think>seven")
    assert behind(continuations(kind), [ASK, thought], [MORE]) == ANSWERED[kind]
    twice = [ASK, thought, ASK, thought]
    assert behind(continuations(kind), twice, [MORE]) == ANSWERED[kind]


def test_the_model_may_write_what_the_template_refuses() -> None:
    """Its channels are content here, as it was sampled, and what it reads next stands by itself."""
    sampled = says(
        "assistant", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>seven"
    )
    assert behind(continuations("channels"), [ASK, sampled], [MORE]) == ANSWERED["channels"]


LOST = [
    ("roles", says("observation", "THE HINT"), "leaves out this message of the role 'observation', 'THE HINT'"),
    ("hoists", says("system", "THE RULE"), "leaves out this message of the role 'system', 'THE RULE'"),
    ("null", says("system", "THE RULE"), None),  # rendered as another turn: it is there
]


@pytest.mark.parametrize(("kind", "answer", "problem"), LOST)
@pytest.mark.parametrize("mode", ["refuse", "keep", "branch"])
def test_a_message_that_does_not_stand_behind_the_turn_is_told(
    mode: EarlierTurns, kind: str, answer: Message, problem: str | None
) -> None:
    """With another one beside it, and in a later turn as well."""
    its = continuations(kind, mode)
    for through in ([ASK, SAID], [ASK, SAID, MORE, SAID]):
        if problem is None:
            assert answer["content"] in behind(its, through, [MORE, answer])
            continue
        with pytest.raises((RowError, OtherConversation)) as told:
            behind(its, through, [MORE, answer])
        if kind == "hoists" and mode != "keep":  # the beginning is another one
            assert "in another way once more messages follow" in str(told.value)
        else:
            assert problem in str(told.value) and f"messages[{len(through) + 1}]" in str(told.value)


def test_a_branch_has_the_message_that_a_template_hoists() -> None:
    its = continuations("hoists", "branch")
    ids = its.first_tokens([ASK, SAID, says("system", "THE RULE"), MORE], {})
    assert its.template.tokenizer.decode(ids).startswith("<|im_start|>system\nTHE RULE<|im_end|>")
    with pytest.raises(RowError, match="of the role 'observation'"):
        continuations("roles", "branch").first_tokens([ASK, SAID, says("observation", "THE HINT")], {})


def test_equal_answers_are_each_there() -> None:
    """Two results with one text, of which a template that renders one alone loses one."""
    two = [result("TWELVE"), result("TWELVE")]
    found = behind(continuations("plain"), [ASK, calls("add", {"n": 1})], two)
    assert found.count("TWELVE") == 2
    once = KINDS["plain"].replace("{% for m in messages %}", "{% for m in messages[:3] %}")
    tokenizer = tokenizer_of(once)
    its = Continuations.from_template(ChatTemplate(tokenizer), (), end_of_turn(tokenizer), earlier_turns="keep")
    with pytest.raises(RowError, match=r"messages\[3\]: .* leaves out this message of the role 'tool', 'TWELVE'"):
        behind(its, [ASK, calls("add", {"n": 1})], two)
