"""What is checked when a run starts: token ids against the vocabulary, end tokens."""

import json
import re
import shutil
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.checkpoint.changes import changes
from hybridflow.config import ExperimentConfig
from hybridflow.data.inputs import Inputs, load_inputs
from hybridflow.errors import CheckpointError, ConfigError, DataError, UserError
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.messages import like
from tests.tiny_models import VOCAB_SIZE, make_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Nothing here reads weights."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def read_config(inputs: Path, directory: Path, *overrides: str) -> ExperimentConfig:
    return ExperimentConfig.from_yaml(write_config(directory / "config.yaml", inputs), overrides)


def load(inputs: Path, directory: Path, *overrides: str) -> Inputs:
    config = read_config(inputs, directory, *overrides)
    return load_inputs(config, read_spec(config.actor.model).vocab_size)


def problem(inputs: Path, directory: Path, *overrides: str, kind: type[UserError] = ConfigError) -> str:
    with pytest.raises(kind) as raised:
        load(inputs, directory, *overrides)
    return str(raised.value)


# ------------------------------------------------------------------------------------------------ token ids


@pytest.fixture
def policy(inputs, tmp_path) -> Path:
    """A copy of the actor's model, for a test to change."""
    return shutil.copytree(inputs / "policy", tmp_path / "policy")


@pytest.mark.parametrize("key", ["train", "heldout"])
def test_prompts_of_a_tokenizer_with_more_tokens_than_the_model(inputs, policy, tmp_path, key):
    """The padding of the vocabulary, up to the next 64, has room for them and no meaning."""
    tokenizer = make_tokenizer()
    added = [f"<{i}>" for i in range(VOCAB_SIZE - len(tokenizer) + 2)]
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(policy)
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "1+2={added[-3]}"}}\n{{"prompt": "1+2={added[-1]}"}}\n')
    keys = [f"actor.model={policy}", f"data.{key}={file}", f"reference.model={policy}"]
    for name, model in (("critic", "critic"), ("reward.models.0", "reward")):
        tokenizer.save_pretrained(shutil.copytree(inputs / model, tmp_path / model))
        keys.append(f"{name}.model={tmp_path / model}")
    assert problem(inputs, tmp_path, *keys, kind=DataError) == (
        like(
            f"{file}, line 2: the prompt has the token id 101 ('{added[-1]}'), the actor's model knows those below its "
            "vocab_size = 100"
        )
    )
    file.write_text(f'{{"prompt": "1+2={added[-3]}"}}\n')
    assert len(load(inputs, tmp_path, *keys).train)


@pytest.mark.parametrize(
    ("override", "token_id"),
    [
        ("stop_token_ids=[2, 100]", 100),
        ("allowed_token_ids=[0, 99, 1000]", 1000),
        ("logit_bias={4: 1.0, 100: 2.0}", 100),
        ("logit_bias={-1: 1.0}", -1),
    ],
)
def test_token_ids_of_the_sampling_section(inputs, tmp_path, override, token_id):
    key = override.partition("=")[0]
    assert problem(inputs, tmp_path, f"sampling.{override}") == (
        like(
            f"sampling.{key} names the token id {token_id}, {inputs / 'policy'} has those from 0 to vocab_size - 1 = 99"
        )
    )
    load(inputs, tmp_path, f"sampling.{override.replace('1000', '98').replace('100', '99').replace('-1', '0')}")


# ------------------------------------------------------------------------------------------------ end tokens


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("{}", (2,)),
        ('{"eos_token_id": null}', (2,)),
        ('{"eos_token_id": 7}', (2, 7)),
        ('{"eos_token_id": [99, 2, 5]}', (2, 5, 99)),
    ],
)
def test_end_tokens(inputs, policy, tmp_path, text, ends):
    (policy / "generation_config.json").write_text(text)
    assert load(inputs, tmp_path, f"actor.model={policy}").ends.ids == ends


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[2]", "is not JSON: it holds list, not an object"),
        ("2", "is not JSON: it holds int, not an object"),
        ("{", "is not JSON: Expecting property name"),
        ('{"eos_token_id": "2"}', "eos_token_id = '2' is neither a token id nor a list of token ids"),
        ('{"eos_token_id": [2, null]}', "eos_token_id = [2, None] is neither a token id nor a list of token ids"),
        ('{"eos_token_id": 2.0}', "eos_token_id = 2.0 is neither"),
        ('{"eos_token_id": true}', "eos_token_id = True is neither"),
        ('{"eos_token_id": {"a": 2}}', "eos_token_id = {'a': 2} is neither"),
        ('{"eos_token_id": [2, 100]}', "eos_token_id = 100 is no token of the model: its vocab_size is 100"),
        ('{"eos_token_id": -1}', "eos_token_id = -1 is no token of the model"),
    ],
)
def test_a_generation_config_that_is_none(inputs, policy, tmp_path, text, expected):
    file = policy / "generation_config.json"
    file.write_text(text)
    message = problem(inputs, tmp_path, f"actor.model={policy}", kind=CheckpointError)
    assert message.startswith(f"{file}: {expected}")


def test_an_end_token_of_the_tokenizer_that_the_model_does_not_know(inputs, policy, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(VOCAB_SIZE - len(tokenizer))])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(policy)
    assert problem(inputs, tmp_path, f"actor.model={policy}", kind=CheckpointError) == (
        like(f"{policy}: eos_token_id of the tokenizer = 100 is no token of the model: its vocab_size is 100")
    )


def test_a_model_without_an_end_token_is_noted(inputs, policy, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(policy)
    (policy / "generation_config.json").unlink(missing_ok=True)
    tree = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(tree | {"eos_token_id": None}))
    key = f"actor.model={policy}"
    assert load(inputs, tmp_path, key).notes() == [
        like(
            f"no end token: tokenizer, generation_config.json and config.json of {policy} name none, "
            "and sampling.stop and sampling.stop_token_ids are empty. "
            "Every response will have sampling.max_response_length = 8 tokens"
        )
    ]
    for ends in ("sampling.ignore_eos=true", "sampling.stop=['=']", "sampling.stop_token_ids=[3]"):
        assert load(inputs, tmp_path, key, ends).notes() == []
    (policy / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert load(inputs, tmp_path, key).notes() == []


def test_prompts_that_were_left_out_are_noted(inputs, tmp_path):
    keys = ("data.max_prompt_length=6", "data.overlong_prompts=drop", f"data.heldout={inputs / 'heldout.jsonl'}")
    found = load(inputs, tmp_path, *keys)
    rows = {key: (inputs / f"{key}.jsonl").read_text().splitlines() for key in ("train", "heldout")}
    dropped = {key: sum(len(json.loads(row)["prompt"]) > 6 for row in its) for key, its in rows.items()}
    assert found.notes() == [
        f"data.{key}: left out {dropped[key]} of {len(rows[key])} prompts longer than data.max_prompt_length"
        for key in rows
    ]


# ------------------------------------------------------------------------------------------------ the chat template


def test_null_is_what_the_rows_are_and_a_checkpoint_compares_that(inputs, tmp_path):
    """An earlier version saved `false`, its default; null on texts is the same."""
    config = read_config(inputs, tmp_path)
    found = load(inputs, tmp_path)
    assert (config.data.chat_template, found.chat_template) == (None, False)
    now = config.with_chat_template(found.chat_template).model_dump(mode="json")
    saved = read_config(inputs, tmp_path, "data.chat_template=false").model_dump(mode="json")
    other = read_config(inputs, tmp_path, "data.chat_template=true").model_dump(mode="json")
    assert changes(saved, now, next_iteration=2).found == ()
    assert [change.key for change in changes(other, now, next_iteration=2).found] == ["data.chat_template"]


def test_messages_are_rendered_without_a_key_and_the_first_lines_say_so(inputs, policy, tmp_path):
    (policy / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}=")
    rows = tmp_path / "messages.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "12"}], "answer": "3"}) + "\n")
    given = (f"actor.model={policy}", f"data.train={rows}")
    found = load(inputs, tmp_path, *given)
    assert found.chat_template and found.train.batch([0]).texts == ("12=",)
    config = read_config(inputs, tmp_path, *given)
    assert found.understood(config)[0] == f"prompts are rendered by the chat template of {policy}/chat_template.jinja"
    texts = load(inputs, tmp_path, f"actor.model={policy}")
    assert texts.understood(config)[0] == (
        "prompts are texts as they are; data.chat_template: true makes each the user's message"
    )
    rows.write_text(rows.read_text() + json.dumps({"prompt": "12=", "answer": "3"}) + "\n")
    assert "line 2: prompt = '12=' is a text, but the first row has messages" in problem(
        inputs, tmp_path, *given, kind=DataError
    )


# ------------------------------------------------------------------------------------------------ answers and tests

NUMERIC, PASSES = "hybridflow.rewards:numeric_match", "hybridflow.rewards:passes_tests"


@pytest.mark.parametrize(
    ("key", "function", "answer", "expected"),
    [
        ("train", NUMERIC, None, "column 'answer': None is no answer"),
        ("train", NUMERIC, "n/a", "column 'answer': 'n/a' holds no number"),
        ("train", "hybridflow.rewards:math_equal", "", "column 'answer': '' is no formula"),
        ("train", "hybridflow.rewards:exact_match", {"other": "3"}, "column 'answer': {'other': '3'} is no answer"),
        ("train", PASSES, "def check(candidate):\n    assert candidate(1) == 2", "column 'answer': .*entry_point"),
        ("heldout", NUMERIC, [], r"column 'answer': \[\] is no answer"),
    ],
)
def test_what_nothing_can_score_is_told_before_the_run(inputs, tmp_path, key, function, answer, expected):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "1+2=", "answer": given} for given in ("assert f(1) == 3", answer)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = "{tests: answer}" if function == PASSES else "{}"
    judge = (
        f"reward.functions=[{{function: '{function}', arguments: {arguments}}}]"
        if key == "train"
        else f"metrics.eval_reward={function}"
    )
    told = problem(inputs, tmp_path, f"data.{key}={file}", judge, kind=DataError)
    assert re.search(f"prompts.jsonl, line 2: {expected}", told), told
    if key == "train":
        assert len(load(inputs, tmp_path, f"data.{key}={file}", judge, "data.bad_rows=drop").train) == 1
        scored = ("reward.on_error=score", "reward.error_score=-1.0")
        assert len(load(inputs, tmp_path, f"data.{key}={file}", judge, *scored).train) == 2
