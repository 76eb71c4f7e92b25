"""What is refused when a run starts: classes that are no environments, and what cannot go with one."""

import re
from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.data.continuations import Continuations, EarlierTurns
from hybridflow.data.templates import ChatTemplate
from hybridflow.environments.classes import described
from hybridflow.errors import ConfigError, OtherConversation
from tests.environments.tiny_chat import END, TEMPLATE, make_tokenizer

USERS = "tests.environments.classes_of_users"
END_ID = make_tokenizer().convert_tokens_to_ids(END)


@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("nowhere:Calculator", {}, "data.environment.class nowhere:Calculator: cannot import nowhere"),
        (f"{USERS}:Nobody", {}, "has no Nobody"),
        (f"{USERS}:USERS", {}, "has no USERS"),
        ("os.path:join", {}, "data.environment.class = os.path:join: is a function, no class"),
        (f"{USERS}:WithoutStep", {}, "has no method step(self, said), which every environment needs"),
        (
            f"{USERS}:Talk",
            {"turn": 3},
            "got an unexpected keyword argument 'turn'; data.environment.arguments gives turn",
        ),
        (f"{USERS}:WithoutTypes", {}, "the tool add has no schema: Argument a is missing a type hint"),
        (f"{USERS}:WithoutDocstring", {}, "the tool add has no schema: Cannot generate JSON schema for add"),
        (f"{USERS}:WithoutTool", {}, "tools names 'add', which is no method of the class"),
    ],
)
def test_what_is_no_environment_is_refused(path: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        described(path, arguments)


def test_a_tool_has_a_schema() -> None:
    add, fails = described(f"{USERS}:Talk", {"turns": 2}).schemas
    assert add["function"]["name"] == "add" and fails["function"]["name"] == "fails"
    assert add["function"]["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.chat_template=false"], "environment cannot go with chat_template = false: turns are messages"),
        (["algorithm={name: remax}", "reference=null"], "remax compares with one greedy row a prompt"),
        (["data.environment={class: no_colon}"], "data.environment"),
        (["data.environment={class: 'a:B', max_turns: 0}"], "data.environment.max_turns"),
        (["data.environment={class: 'a:B', turns: 3}"], "data.environment.turns"),
    ],
)
def test_configs_that_cannot_be_are_refused(overrides: list[str], problem: str) -> None:
    given = ["reward=null", "data.chat_template=true", "data.environment={class: 'a:B'}", "metrics.eval_reward=null"]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        ExperimentConfig.from_yaml("configs/quickstart_grpo.yaml", [*given, *overrides])


def test_a_text_is_the_class_alone() -> None:
    given = ["reward=null", "data.chat_template=true", "data.environment=a:B"]
    config = ExperimentConfig.from_yaml("configs/quickstart_grpo.yaml", given)
    assert config.data.environment is not None and config.data.environment.path == "a:B"


def continuations(template: str, *, earlier_turns: EarlierTurns = "refuse", tools: bool = False) -> Continuations:
    tokenizer = make_tokenizer(template)
    schemas, end = described(f"{USERS}:Talk", {}).schemas if tools else (), tokenizer.convert_tokens_to_ids(END)
    return Continuations.from_template(ChatTemplate(tokenizer), schemas, end, earlier_turns=earlier_turns)


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation: user, assistant, and so on."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


FORGETS = TEMPLATE.replace(
    "message.content }}", "(message.content if message.role != 'assistant' or loop.last else 'forgotten') }}"
)
THINKS = TEMPLATE.replace(
    "message.content }}", "(message.content.split('</think>')[-1] if not loop.last else message.content) }}"
)
SHOWS = TEMPLATE.replace("<|assistant|>{%- endif", "<|assistant|>now {%- endif")


def test_what_follows_a_turn_is_the_templates_text() -> None:
    its = continuations(TEMPLATE)
    for ended in (END_ID, None):
        ids = its.tokens(said("1+1", "3"), said("no"), {}, ended=ended)
        text = its.template.tokenizer.decode(ids)
        assert text == (END if ended is None else "") + f"<|user|>no{END}<|assistant|>"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (FORGETS, "an earlier turn of the assistant in another way once more messages follow"),
        (THINKS, "an earlier turn of the assistant in another way once more messages follow"),
        (SHOWS, "a turn of the assistant in another way than it lets a run begin one"),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused_or_kept(template: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"renders {what}")) as refusal:
        continuations(template)
    assert "data.environment.earlier_turns: keep" in str(refusal.value)
    its = continuations(template, earlier_turns="keep")
    ids = its.tokens(said("1+1", "<think>two</think>3", "no", "2"), said("yes"), {}, ended=END_ID)
    assert its.template.tokenizer.decode(ids).startswith(f"<|user|>yes{END}<|assistant|>")


@pytest.mark.parametrize("template", [THINKS, SHOWS])
def test_a_turn_that_a_template_rewrites_begins_another_sequence(template: str) -> None:
    its = continuations(template, earlier_turns="branch")
    conversation = said("1+1", "<think>two</think>3")
    with pytest.raises(OtherConversation):
        its.tokens(conversation, said("no"), {}, ended=END_ID)
    ids = its.first_tokens([*conversation, *said("no")], {})
    shown = {THINKS: "3", SHOWS: "<think>two</think>3"}[template]
    now = "now" if template == SHOWS else ""
    expected = f"<|user|>1+1{END}<|assistant|>{shown}{END}<|user|>no{END}<|assistant|>{now}"
    assert ids == its.template.tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_a_template_that_keeps_earlier_turns_begins_no_other_sequence() -> None:
    its = continuations(TEMPLATE, earlier_turns="branch")
    ids = its.tokens(said("1+1", "3"), said("no"), {}, ended=END_ID)
    assert its.template.tokenizer.decode(ids) == f"<|user|>no{END}<|assistant|>"


def test_a_template_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="by no special token"):
        Continuations.from_template(ChatTemplate(make_tokenizer()), (), None)


def test_a_template_that_reads_no_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="has tools, which the tokenizer's chat template does not read"):
        continuations(TEMPLATE.replace("tools", "nothing"), tools=True)
