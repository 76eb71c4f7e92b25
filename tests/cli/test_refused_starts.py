"""What the ranks of a run refuse as they read tokenizer, rows and weights, `hybridflow plan` refuses too."""

import ast
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import hybridflow.cli.refusals as refusals
import hybridflow.data.inputs as of_inputs
from hybridflow.architecture.spec import read_spec
from hybridflow.cli import plan
from hybridflow.cli.files_of_tree import read_config
from hybridflow.cli.refusals import check_for_hosts, check_here
from hybridflow.config import ExperimentConfig, read_value, set_key
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.data.fixed_inputs import load_fixed_inputs
from hybridflow.data.inputs import load_inputs
from hybridflow.errors import ConfigError, Reasons, UserError
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT
from tests.remedies import keys_of, refusal_of, told

CHAT = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.role[0] }}{{ m.content }}{% endif %}{% endfor %}="
USER, TOOL = ({"role": role, "content": "1"} for role in ("user", "tool"))
ASKED = {"prompt": "1+2=", "answer": "3"}


@dataclass(frozen=True)
class Start:
    """rows: of the file of data.train, as text or to be written as JSON. data: more of the section. kind: algorithm."""

    rows: tuple[Any, ...] = (ASKED,)
    kind: str = "ppo"
    data: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None  # of the tokenizer
    breaks: Callable[[Path], object] = lambda model: None  # is given the actor's directory


def _without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def _with_ends(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": "no"}')


def _without_weights(model: Path) -> None:
    tree = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**tree, "num_hidden_layers": tree["num_hidden_layers"] + 1}))


# by the reason under which a row is counted, and whatever else there is
STARTS = {
    "no object": Start(("[1]",)),
    "not UTF-8": Start((b'{"prompt": "\xff"}',)),
    "not JSON": Start(('{"prompt": ',)),
    "no prompt": Start(({"question": "1"},)),
    "empty": Start(({"prompt": ""},)),
    "wrong type": Start(({"prompt": 3},)),
    "too long": Start(({"prompt": "1" * 13},), data={"overlong_prompts": "error"}),
    "unknown token": Start(({"prompt": [100_000]},)),
    "no character": Start(('{"prompt": [{"role": "user", "content": "\\ud800"}]}',), template=CHAT),
    "two of a name": Start(({"prompt": "1", "question": "2"},), data={"columns": {"prompt": "question"}}),
    "other columns": Start((ASKED, {"prompt": "1"})),
    "nothing to score by": Start(
        ({"prompt": "1", "answer": None},),
        more={"reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]}, "critic": None}
        | {"algorithm": {"name": "rloo", "kl": {"use": "none"}, "update": {"mini_batch_size": 4}}, "reference": None}
        | {"sampling": {"max_response_length": 8, "samples_per_prompt": 2}},
    ),
    "rendered already": Start(({"prompt": "</s>1"},), data={"chat_template": True}, template=CHAT),
    "no template": Start(({"prompt": [USER]},)),
    "not rendered": Start(({"prompt": [USER, TOOL]},), template=CHAT),
    "tools": Start(({"prompt": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},), template=CHAT),
    "no template of pairs": Start(({"chosen": [USER], "rejected": [USER], "prompt": [USER]},), kind="dpo"),
    "no assistant": Start(({"messages": [USER]},), kind="sft", template=CHAT),
    "no chosen": Start(({"prompt": "1"},), kind="dpo"),
    "no prompt of pairs": Start(({"chosen": "1", "rejected": "2"},), kind="dpo"),
    "empty answer": Start(({"prompt": "1", "completion": ""},), kind="sft"),
    "long example": Start(({"prompt": "1", "completion": "2" * 40},), kind="sft"),
    "a label that is none": Start(2 * ({"prompt": "1", "completion": "2", "label": "yes"},), kind="kto"),
    "one row of kto": Start(({"prompt": "1", "completion": "2", "label": True},), kind="kto"),
    "stop token": Start(more={"sampling": {"max_response_length": 8, "stop_token_ids": [100_000]}}),
    "no tokenizer": Start(breaks=_without_tokenizer),
    "end token": Start(breaks=_with_ends),
}
# of turns, agents and tools, which come up as rows begin and go on; or of two runs of a template
LATER = {"request", "window", "not started", "no column", "no tokens"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("starts") / "inputs")


def config_of(start: Start, inputs: Path, tmp_path: Path) -> AnyConfig:
    shutil.copytree(inputs, tmp_path / "inputs")
    policy, rows = tmp_path / "inputs" / "policy", tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in start.rows]
    rows.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    if start.template is not None:
        (policy / "chat_template.jinja").write_text(start.template)
    start.breaks(policy)
    tree = json.loads(write_config(tmp_path / "config.yaml", tmp_path / "inputs").read_text())
    tree["data"] |= {"train": str(rows), **start.data}
    if start.kind != "ppo":
        tree["data"] = {"train": str(rows), "batch_size": 2, "max_length": 24, **start.data}
        tree = {key: tree[key] for key in ("name", "output_dir", "num_iterations", "data", "actor", "reference")}
        tree |= {"algorithm": {"name": start.kind}}
        del tree["actor"]["tensor_parallel_size"]
        if start.kind == "sft":
            del tree["reference"]
    tree |= start.more
    tree = {key: value for key, value in tree.items() if value is not None}
    return config_class(tree).from_tree(tree, "config.yaml")


def load(config: AnyConfig) -> None:
    """As the ranks of a run."""
    vocab_size = read_spec(config.trained.model).vocab_size
    if isinstance(config, ExperimentConfig):
        load_inputs(config, vocab_size)
    else:
        load_fixed_inputs(config, vocab_size)


@pytest.mark.parametrize("name", STARTS)
def test_what_the_ranks_refuse_is_refused_before(name: str, inputs: Path, tmp_path: Path) -> None:
    config = config_of(STARTS[name], inputs, tmp_path)
    with pytest.raises(UserError) as of_ranks:
        load(config)
    with pytest.raises(ConfigError) as of_plan:
        check_here(config, 2)
    where = str(of_ranks.value).partition(": ")[0]  # the file and the line, or the key
    assert where in str(of_plan.value) and len(str(of_plan.value).splitlines()) == 1, (of_ranks.value, of_plan.value)


# whose remedy is no value of a key -> what it is
OTHERWISE = {
    **dict.fromkeys(("no object", "not UTF-8", "not JSON", "empty", "wrong type", "no character"), "another row"),
    **dict.fromkeys(("unknown token", "no assistant", "empty answer", "a label that is none"), "another row"),
    **dict.fromkeys(("other columns", "no chosen", "no prompt of pairs", "nothing to score by"), "other rows"),
    "one row of kto": "more rows",
    **dict.fromkeys(("no template", "no template of pairs", "not rendered", "tools"), "another chat template"),
    "no tokenizer": "the tokenizer's files",
    "end token": "another generation_config.json",
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_refusal_tells_to_set_gets_past_it(name: str, inputs: Path, tmp_path: Path) -> None:
    config = config_of(STARTS[name], inputs, tmp_path)
    with pytest.raises(ConfigError) as raised:
        check_here(config, 2)
    ways = list(told(str(raised.value)))
    assert bool(ways) != (name in OTHERWISE), raised.value
    for settings in ways:
        tree = config.model_dump(mode="json")
        for key, setting in zip(keys_of(settings), settings, strict=True):
            set_key(tree, key.split("."), read_value(setting.partition("=")[2], key), key)
        after = Reasons()
        after.collect(check_here, config_class(tree).from_tree(tree, "config.yaml"), 2)
        assert refusal_of(str(raised.value)) not in map(refusal_of, after.lines), (settings, after.lines)


def test_rows_of_which_some_can_be_used_may_be_left_out(inputs: Path, tmp_path: Path) -> None:
    config = config_of(Start((ASKED, {"question": "1"})), inputs, tmp_path)
    with pytest.raises(ConfigError, match=r"line 2: .*data\.bad_rows=drop$"):
        check_here(config, 2)
    tree = config.model_dump(mode="json")
    tree["data"]["bad_rows"] = "drop"
    check_here(config_class(tree).from_tree(tree, "config.yaml"), 2)


def test_every_reason_against_a_row_has_a_start() -> None:
    calls = [
        node
        for file in sorted((ROOT / "hybridflow" / "data").glob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RowError"
    ]
    reasons = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert reasons - LATER <= STARTS.keys() and "not rendered" in reasons


def test_a_tensor_that_is_missing_is_told_by_its_name(inputs: Path, tmp_path: Path) -> None:
    """The ranks find it as they load the model, half a minute later."""
    config = config_of(Start(breaks=_without_weights), inputs, tmp_path)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.\d+\.\S+, and \d+ more"):
        check_here(config, 2)


@pytest.mark.parametrize("missing", ["score.weight", "lm_head.weight", "snapshot"])
def test_what_a_run_makes_or_fetches_is_not_missed(missing: str, inputs: Path, tmp_path: Path) -> None:
    """A critic's value head; the output layer that a critic does not have; weights of the Hub that are not here yet."""
    start = config_of(Start(), inputs, tmp_path)
    critic = tmp_path / "snapshots" / "abc" if missing == "snapshot" else tmp_path / "inputs" / "critic"
    if missing != "score.weight":
        shutil.copytree(tmp_path / "inputs" / "policy", critic, dirs_exist_ok=True)
    file = critic / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    if missing != "snapshot":
        save_file({name: tensor for name, tensor in tensors.items() if name != missing}, file)
        assert missing in tensors
    tree = start.model_dump(mode="json")
    tree["critic"]["model"] = str(critic)
    check_here(config_class(tree).from_tree(tree, "config.yaml"), 2)


def test_a_reward_model_without_its_head_is_refused(inputs: Path, tmp_path: Path) -> None:
    config = config_of(Start(), inputs, tmp_path)
    file = tmp_path / "inputs" / "reward" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "score.weight"}, file)
    with pytest.raises(ConfigError, match=r"reward\.models\.0\.model = .* has no score\.weight: each score would be 0"):
        check_here(config, 2)


def test_a_large_train_file_is_not_opened_for_each_held_out_set(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(Start(data={"checked_mib": 0, "heldout": str(inputs / "heldout.jsonl")}), inputs, tmp_path)
    opened: list[str] = []
    for module in (refusals, of_inputs):
        opens = module.open_files
        monkeypatch.setattr(module, "open_files", partial(_noted, opened, opens))
    check_here(config, 2)
    assert opened == ["data.train", "data.heldout"]  # for their columns


def _noted(opened: list[str], opens: Callable[..., Any], files: Any, key: str) -> Any:
    opened.append(key)
    return opens(files, key)


def test_positions_are_told_with_the_budget_that_is_too_small(inputs: Path, tmp_path: Path) -> None:
    tree = config_of(Start(), inputs, tmp_path).model_dump(mode="json")
    tree["sampling"]["max_response_length"] = 200
    tree["critic"]["micro_batch_tokens"] = 100
    with pytest.raises(ConfigError) as raised:
        read_config(tree, "config.yaml")
    budget, *lengths = str(raised.value).splitlines()
    assert budget.startswith("config.yaml: actor.micro_batch_tokens = ") or "critic.micro_batch_tokens = 100" in budget
    keys = "data.max_prompt_length + sampling.max_response_length = 212 exceeds max_position_embeddings = 128 of "
    models = [tmp_path / "inputs" / name for name in ("policy", "critic", "reference", "reward")]
    assert [line.partition(". Set ")[0] for line in lengths] == [f"{keys}{model}" for model in models]


# ------------------------------------------------------------------------------------------------ plan --hosts


@pytest.mark.parametrize("name", STARTS)
def test_a_plan_of_hosts_reads_what_is_on_this_machine(name: str, inputs: Path, tmp_path: Path) -> None:
    """It refuses what the plan without hosts refuses; a tokenizer that is not here may be on the hosts."""
    config = config_of(STARTS[name], inputs, tmp_path)
    if name == "no tokenizer":
        assert check_for_hosts(config) == [
            f"not on this machine, and not read: the tokenizer of actor.model = {config.trained.model}; the hosts must "
            "have it"
        ]
        return
    with pytest.raises(ConfigError) as of_plan:
        check_here(config, 2)
    with pytest.raises(ConfigError) as of_hosts:
        check_for_hosts(config)
    assert str(of_hosts.value) == str(of_plan.value)


def test_what_only_the_hosts_have_is_no_error(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(Start(({"prompt": ""},), data={"heldout": "elsewhere/held.jsonl"}), inputs, tmp_path)
    arguments = [str(tmp_path / "config.yaml"), "--hosts", "a=2,b=2"]
    tree = config.model_dump(mode="json")
    tree["algorithm"]["update"]["mini_batch_size"] = 4

    def planned(**sections: Any) -> tuple[int, str, str]:
        (tmp_path / "config.yaml").write_text(json.dumps({**tree, **sections}))
        return plan.main(arguments), *capsys.readouterr()

    status, _, refused = planned()
    assert status == 1 and "rows.jsonl, line 1: prompt = '' is empty" in refused
    status, text, _ = planned(data={**tree["data"], "train": "elsewhere/*.jsonl"})
    for key in ("data.train = elsewhere/*.jsonl", "data.heldout = elsewhere/held.jsonl"):
        assert f"\nnot on this machine, and not read: {key}; the hosts must have it\n" in text
    assert status == 0
    (Path(config.trained.model) / "model.safetensors").unlink()
    code = {"functions": [{"function": "no_such_package.of_hosts:score"}]}
    status, text, _ = planned(reward={**tree["reward"], **code})
    lack = "\nnot on this machine, and not read"
    assert status == 0 and f"{lack}: the weights of actor.model = {config.trained.model}; the hosts" in text
    rows = "nor were the rows of data.train, data.heldout, which it reads"
    assert f"{lack}, {rows}: reward.functions.0.function = no_such_package.of_hosts:score; the hosts must" in text
