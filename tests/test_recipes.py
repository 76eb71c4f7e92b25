"""Every recipe loads, has its place and fits its GPUs; what it says of itself; and what its data look like."""

import json
from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.cli.plan import main
from hybridflow.config.kinds import load_config
from hybridflow.data.chat import render_chats
from hybridflow.data.templates import ChatTemplate
from tests.data.test_prompts import word_tokenizer
from tests.test_shipped_configs import GPU_BYTES, SPARE_BYTES

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
WORLD_SIZES = {
    "gsm8k_qwen2.5_0.5b_grpo": 1,
    "gsm8k_qwen2.5_0.5b_ppo": 2,
    "gsm8k_qwen2.5_7b_grpo": 8,
    "gsm8k_qwen2.5_7b_ppo": 8,
    "ultrachat_mistral_7b_sft": 8,
    "ultrafeedback_mistral_7b_dpo": 8,
}


def test_there_are_these() -> None:
    assert {path.stem for path in RECIPES} == set(WORLD_SIZES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_has_its_place_and_fits(path, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    assert load_config(path).name == path.stem
    assert main([f"configs/recipes/{path.name}", "--json"]) == 0, capsys.readouterr().err
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == WORLD_SIZES[path.stem]
    for moment, memory in plan["memory"].items():
        assert memory["worst_rank"]["total"] + SPARE_BYTES <= GPU_BYTES, moment


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it_what_it_reaches_and_that_it_was_not_run(path) -> None:
    said = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(line.removeprefix("#").strip() for line in said)
    for part in ("not run here", "To reach" if "dpo" not in path.stem else "MT-Bench", "DIRECTORY"):
        assert part in text
    assert f"--nproc-per-node {WORLD_SIZES[path.stem]} -m hybridflow.train configs/recipes/{path.name}" in text


def test_the_critics_of_ppo_have_ranks_of_their_own() -> None:
    for path in RECIPES:
        if path.stem.endswith("_ppo"):
            config = load_config(path)
            assert not set(config.critic.ranks) & set(config.actor.ranks)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("mistral-7b", 7_241_732_096)],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters) -> None:
    assert num_parameters(read_spec(ROOT / "configs" / "shapes" / name), "lm") == parameters


def test_the_template_of_zephyr_marks_what_the_assistant_says() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (ROOT / "configs" / "recipes" / "zephyr_chat_template.jinja").read_text()
    talk = [
        {"role": role, "content": f" {role} says\n"} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    (found,) = render_chats(talk, ChatTemplate(tokenizer), "a")
    turns = [f"<|{message['role']}|>\n{message['content']}<eos>\n" for message in talk]
    assert found.text == "".join(turns).removesuffix("\n")  # up to the end token
    assert [found.text[start:end] for start, end in found.spans] == [" assistant says\n<eos>"] * 2
    prompt = tokenizer.apply_chat_template(talk[:2], add_generation_prompt=True, tokenize=False)
    assert prompt == "".join(turns[:2]) + "<|assistant|>\n"
