"""Config files: keys that stand twice, pipes, and `base:`, what merges, what replaces, what a wrong base is told."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.data import main as data
from hybridflow.cli.piped_config import check_one_reader, file_for_ranks
from hybridflow.cli.plan import main as plan
from hybridflow.config import read_tree
from hybridflow.errors import ConfigError

BASE: dict[str, Any] = {
    "name": "base",
    "actor": {"model": "a", "optimizer": {"lr": 1.0, "betas": [0.9, 0.95]}},
    "critic": {"model": "c"},
    "reward": {"functions": [{"function": "a:b", "weight": 2}]},
    "algorithm": {"name": "grpo", "std": "batch", "kl": {"coef": 0.1}},
}


@pytest.fixture
def merged(tmp_path: Path):
    """The tree of a config on BASE."""

    def read(tree: dict[str, Any], *overrides: str, base: dict[str, Any] = BASE) -> dict[str, Any]:
        (tmp_path / "bases").mkdir(exist_ok=True)
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "bases" / "base.yaml").write_text(yaml.safe_dump(base))
        (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump({"base": "../bases/base.yaml", **tree}))
        return read_tree(tmp_path / "mine" / "config.yaml", overrides)

    return read


def test_mappings_merge_by_key_and_overrides_come_last(merged) -> None:
    found = merged({"name": "mine", "actor": {"optimizer": {"lr": 2.0}}}, "actor.optimizer.lr=3.0", "seed=1")
    expected = {"name": "mine", "seed": 1, "actor": {"model": "a", "optimizer": {"lr": 3.0, "betas": [0.9, 0.95]}}}
    assert found == BASE | expected


def test_an_empty_mapping_clears_that_of_the_base(merged) -> None:
    assert merged({"actor": {}})["actor"] == {} and merged({"actor": {"model": "b"}})["actor"]["model"] == "b"


def test_lists_scalars_and_null_replace(merged) -> None:
    functions = [{"function": "c:d"}]
    change = {"actor": {"optimizer": {"betas": [0.5, 0.6]}}, "critic": None, "reward": {"functions": functions}}
    found = merged(change)
    assert found["critic"] is None
    assert found["reward"] == {"functions": functions}
    assert found["actor"]["optimizer"] == {"lr": 1.0, "betas": [0.5, 0.6]}


def test_an_algorithm_of_another_name_replaces_the_section(merged) -> None:
    assert merged({"algorithm": {"name": "opo"}})["algorithm"] == {"name": "opo"}
    assert merged({"algorithm": {"name": "grpo", "kl": {"use": "none"}}})["algorithm"] == {
        "name": "grpo",
        "std": "batch",
        "kl": {"coef": 0.1, "use": "none"},
    }
    assert merged({"algorithm": {"std": "group"}})["algorithm"]["std"] == "group"
    nameless = {"algorithm": {"gamma": 0.9}}
    assert merged({"algorithm": {"name": "ppo"}}, base=nameless)["algorithm"] == {"gamma": 0.9, "name": "ppo"}
    assert merged({"algorithm": {"name": "rloo"}}, base=nameless)["algorithm"] == {"name": "rloo"}


def test_a_null_base_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("base: null\nname: mine\n")
    assert read_tree(tmp_path / "config.yaml") == {"name": "mine"}


def test_a_home_directory_and_an_absolute_path_are_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("seed: 3\n")
    (tmp_path / "mine").mkdir()
    for base in ("~/base.yaml", tmp_path / "base.yaml"):
        (tmp_path / "mine" / "config.yaml").write_text(f"base: {base}\n")
        assert read_tree(tmp_path / "mine" / "config.yaml") == {"seed": 3}


TWICE = {
    "in a section": ("actor:\n  lr: 1\n  model: m\n  lr: 2\n", "actor.lr stands twice, in lines 2 and 4"),
    "a section": ("actor: {lr: 1}\nseed: 1\n'actor': {lr: 2}\n", "actor stands twice, in lines 1 and 3"),
    "in a list of one line": ("a: [{b: 1}, {b: 1, b: 1}]\n", "a.1.b stands twice, in line 1"),
    "numbers": ("a: {16: x,\n 0x10: y}\n", "a.0x10 stands twice, in lines 1 and 2"),
    "under an anchor": ("a: &a {b: 1}\nc: {<<: *a, d: &d {e: 1, e: 1}}\n", "c.d.e stands twice"),
}


@pytest.mark.parametrize(("text", "said"), TWICE.values(), ids=TWICE)
def test_a_key_stands_once(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "mine.yaml").write_text("base: base.yaml\n")
    for file in ("base.yaml", "mine.yaml"):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_tree(tmp_path / file)
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"override 'x=\{a: 1, a: 2\}': a stands twice, in line 1"):
        read_tree(tmp_path / "mine.yaml", ["x={a: 1, a: 2}"])


def test_merge_keys_and_aliases_are_no_equal_keys(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {z: 3}\nc: {<<: *a, <<: *b, y: 2}\nd: [*a, *a]\n1: x\n'1': y\n"
    (tmp_path / "config.yaml").write_text(text)
    tree = read_tree(tmp_path / "config.yaml")
    assert tree["c"] == {"x": 1, "y": 2, "z": 3} and tree["d"] == [tree["a"]] * 2 and (tree[1], tree["1"]) == ("x", "y")


def test_a_pipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base counts from the working directory; ranks get a file. Several that begin by themselves are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("seed: 3\nactor: {lr: 1}\n")
    read, write = os.pipe()
    os.write(write, b"base: base.yaml\nname: piped\n")
    os.close(write)
    pipe, merged = f"/dev/fd/{read}", {"seed": 3, "actor": {"lr": 1}, "name": "piped"}
    assert [read_tree(pipe), read_tree(pipe, ["seed=4"])] == [merged, merged | {"seed": 4}]
    with file_for_ranks(pipe) as file:
        assert yaml.safe_load(Path(file).read_text()) == merged
    assert not Path(file).exists()
    with file_for_ranks("base.yaml") as file:
        assert file == "base.yaml"
    check_one_reader(pipe)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_one_reader("base.yaml")
    with pytest.raises(ConfigError, match=f"{pipe}: is no file, and each of 2 ranks"):
        check_one_reader(pipe)
    os.close(read)


WRONG = {
    "a base of a base": ("base: other.yaml\n", "base.yaml", "other.yaml"),
    "a base that is no mapping": ("[1, 2]\n", "base.yaml", "list"),
    "a base that is no YAML": ("a: [\n", "base.yaml", "not YAML"),
    "no file": (None, "base.yaml", "No such file"),
}


@pytest.mark.parametrize(("text", "base", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_base_names_both_files(tmp_path: Path, text: str | None, base: str, said: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("base: base.yaml\nname: mine\n")
    if text is not None:
        (tmp_path / "base.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_tree(config)
    message = str(raised.value)
    assert str(config) in message and str(tmp_path / base) in message and said in message


def test_a_base_is_one_path_in_the_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("base: [a.yaml, b.yaml]\n")
    with pytest.raises(ConfigError, match="base = "):
        read_tree(config)
    config.write_text("name: mine\n")
    with pytest.raises(ConfigError, match=r"base=other\.yaml"):
        read_tree(config, ["base=other.yaml"])


def test_commands_see_the_merged_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base.yaml").write_text("name: base\nnum_iterations: 0\n")
    (tmp_path / "config.yaml").write_text("base: base.yaml\nactor: {model: a}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for command in (plan, lambda arguments: data([str(tmp_path / "rows.jsonl"), *arguments])):
        assert command([str(tmp_path / "config.yaml")]) == 1
        assert "num_iterations = 0" in capsys.readouterr().err
