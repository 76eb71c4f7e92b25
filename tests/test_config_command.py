"""`hybridflow config`: what each subcommand prints, what a wrong one is told, and that nothing heavy is loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.config import main
from hybridflow.config.json_schema import config_schema
from hybridflow.config.kinds import load_config
from hybridflow.config.starters import starters
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import place

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
GRPO = str(CONFIGS / "quickstart_grpo.yaml")
HEAVY = {"torch", "transformers", "vllm", "megatron", "rich"}
SUBCOMMANDS = (
    ["init"],
    ["init", "grpo"],
    ["show", GRPO, "seed=2"],
    ["keys", "reward"],
    ["schema"],
    ["diff", GRPO, str(CONFIGS / "quickstart.yaml")],
)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """What a subcommand prints, for those that hold."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """The lines on stderr, for those that do not hold."""

    def run(*arguments: str) -> list[str]:
        assert main(list(arguments)) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert all(line.startswith("hybridflow config: error: ") for line in lines)
        return lines

    return run


def test_no_subcommand_loads_a_heavy_package() -> None:
    code = f"""
import sys
from hybridflow.cli.config import main
for arguments in {list(SUBCOMMANDS)!r}:
    assert main(arguments) == 0
    loaded = {HEAVY} & set(sys.modules)
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hybridflow.cli.config", "keys", "seed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("seed  integer >= 0  0\n    "), done.stderr


# ------------------------------------------------------------------------------------------------ init


@pytest.mark.parametrize(("name", "path"), starters().items(), ids=starters())
def test_a_starter_is_the_quickstart_without_a_base(tmp_path: Path, printed, name: str, path: Path) -> None:
    text = printed("init", name)
    (tmp_path / "mine.yaml").write_text(text)
    assert load_config(tmp_path / "mine.yaml") == load_config(path)
    assert "base" not in yaml.safe_load(text)
    for key in ("train", "model"):
        [line, *_] = [line for line in text.splitlines() if line.strip(" -").startswith(f"{key}:")]
        assert "# CHANGE" in line


@pytest.mark.parametrize("name", starters())
def test_what_must_be_decided_is_marked(printed, name: str) -> None:
    """The quickstarts are float32 with a cache for a tiny model: neither is for a GPU."""
    lines = [line for line in printed("init", name).splitlines() if re.search(r"\b(dtype|kv_cache_gib): ", line)]
    assert lines and all("# CHANGE: " in line for line in lines)


def test_editing_the_marked_lines_alone_plans_no_float32(tmp_path: Path, printed) -> None:
    edits = {
        "model": f"model: {ROOT / 'configs' / 'shapes' / 'llama-3-8b'}",
        "dtype": "dtype: bfloat16",
        "kv_cache_gib": "kv_cache_gib: null",
        "max_prompt_length": "max_prompt_length: 1024",
        "max_response_length": "max_response_length: 1024",
        "tensor_parallel_size": "tensor_parallel_size: 2",
    }
    edited = []
    for line in printed("init", "grpo").splitlines():
        key = line.split(":")[0].strip(" -")
        value = edits.get(key) if "# CHANGE" in line else None
        edited.append(line if value is None else f"{line[: len(line) - len(line.lstrip())]}{value}")
    file = tmp_path / "mine.yaml"
    file.write_text("\n".join(edited))
    config = load_config(file)
    assert {role.dtype for role in config.roles().values()} == {"bfloat16"}
    assert config.rollout.kv_cache_gib is None
    # 8 billion parameters in 2 bytes on two ranks: 7.5 GiB each
    found = fullest(place(config, 2, cuda=True))
    assert 7.4 * 2**30 < found.roles["actor"].weights < 7.6 * 2**30


def test_without_a_name_the_starters_are_listed(printed) -> None:
    names = [line.split()[0] for line in printed("init").splitlines()]
    assert {"ppo", "grpo", "dr_grpo", "dapo", "sft", "dpo", "kto", "reward_model", "rule"} <= set(names)
    assert "DAPO on two CPU cores (Yu et al. 2025, arXiv 2503.14476)\n" in printed("init")


def test_an_unknown_starter_is_told_the_nearest(refused) -> None:
    [line] = refused("init", "grop")
    assert "grop" in line and "grpo" in line


# ------------------------------------------------------------------------------------------------ show


def test_show_has_base_defaults_and_overrides(printed) -> None:
    tree = yaml.safe_load(printed("show", str(CONFIGS / "quickstart_rloo.yaml"), "actor.optimizer.lr=0.5"))
    assert tree["algorithm"]["name"] == "rloo" and tree["algorithm"]["policy"]["kind"] == "reinforce"
    assert tree["data"]["prompts_per_iteration"] == 32, "of the base"
    assert tree["actor"]["optimizer"]["lr"] == 0.5
    assert "base" not in tree


def test_what_show_prints_loads_as_the_same(tmp_path: Path, printed) -> None:
    for path in (CONFIGS / "quickstart_gspo.yaml", CONFIGS / "quickstart_kto.yaml"):
        (tmp_path / "resolved.yaml").write_text(printed("show", str(path)))
        assert load_config(tmp_path / "resolved.yaml") == load_config(path)


def test_auto_stays_auto(printed) -> None:
    tree = yaml.safe_load(printed("show", GRPO, "actor.recompute=auto", "rollout.kv_cache_gib=auto"))
    assert (tree["actor"]["recompute"], tree["rollout"]["kv_cache_gib"]) == ("auto", "auto")


def test_each_reason_is_a_line(refused) -> None:
    lines = refused("show", GRPO, "sampling.top_p=2", "seed=-1")
    assert len(lines) == 2 and "sampling.top_p = 2" in lines[1] + lines[0]
    [line] = refused("show", "nowhere.yaml")
    assert "nowhere.yaml" in line


# ------------------------------------------------------------------------------------------------ keys


def test_keys_have_type_default_and_description(printed) -> None:
    text = printed("keys", "actor.optimizer")
    assert "actor.optimizer.lr  number >= 0  required\n    The learning rate after the warm-up.\n" in text
    assert "actor.optimizer.betas  list of 2: number >= 0, < 1  [0.9, 0.95]\n" in text


@pytest.mark.parametrize("prefix", ["reward.models", "reward.models.0", "reward.models.3", "reward.models.0.weight"])
def test_a_prefix_chooses(printed, prefix: str) -> None:
    keys = [line.split()[0] for line in printed("keys", prefix).splitlines() if not line.startswith(" ")]
    assert "reward.models.0.weight" in keys
    assert all(key.startswith("reward.models") for key in keys)


def test_keys_of_algorithms_are_told_once(printed) -> None:
    text = printed("keys", "algorithm.policy.kind")
    assert text.count("algorithm.policy.kind") == 1
    assert "  clip; reinforce for rloo, remax, opo, maxrl, distill\n" in text
    assert "Only with ppo." in printed("keys", "algorithm.gae_lambda")
    assert "Only on fixed data." in printed("keys", "data.batch_size")
    assert "Only" not in printed("keys", "data.train")


def test_every_key_is_there(printed) -> None:
    keys = {line.split()[0] for line in printed("keys").splitlines() if not line.startswith(" ")}
    assert {"name", "num_epochs", "sampling.by_prompt_length.0.up_to", "algorithm.label_smoothing"} <= keys
    assert len(keys) > 200


def test_an_unknown_key_is_told_the_nearest(refused) -> None:
    [line] = refused("keys", "actor.optimiser")
    assert "actor.optimizer" in line


# ------------------------------------------------------------------------------------------------ schema and diff


def test_schema_prints_the_schema(printed) -> None:
    assert json.loads(printed("schema")) == config_schema()


def write(path: Path, **tree: Any) -> str:
    path.write_text(yaml.safe_dump({"base": GRPO, **tree}))
    return str(path)


def test_diff_shows_keys_that_differ(tmp_path: Path, printed) -> None:
    one = write(tmp_path / "a.yaml", seed=0, reference={"micro_batch_tokens": "auto"})
    other = write(tmp_path / "b.yaml", actor={"optimizer": {"lr": 0.1}}, rollout={"max_num_seqs": 8})
    assert printed("diff", one, other).splitlines() == [
        "seed: 0 (default) -> 1",
        "actor.optimizer.lr: 0.0003 -> 0.1",
        "reference.micro_batch_tokens: auto -> 16384 (default)",
        "rollout.max_num_seqs: null (default) -> 8",
    ]


def test_diff_of_sections_that_one_has(tmp_path: Path, printed) -> None:
    other = write(tmp_path / "b.yaml", reference=None, algorithm={"name": "opo"})
    lines = printed("diff", GRPO, other).splitlines()
    assert "reference.model: data/tiny/policy -> absent" in lines
    assert "algorithm.name: grpo -> opo" in lines
    assert not any(line.startswith("reference.recompute") for line in lines), "a default that one alone has"


def test_diff_of_a_file_with_itself(printed, refused) -> None:
    assert printed("diff", GRPO, GRPO) == "no key differs\n"
    [line] = refused("diff", GRPO, "nowhere.yaml")
    assert "nowhere.yaml" in line
