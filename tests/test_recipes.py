"""Every recipe loads, has its place and fits its GPUs; what it says of itself; and what its data look like."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.cli.plan import main
from hybridflow.config.kinds import load_config
from hybridflow.data.chat import render_chats
from hybridflow.data.templates import ChatTemplate
from tests.covering import params
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
    "qwen3_8b_lora_grpo": 1,
    "qwen3.5_35b_a3b_async_grpo": 8,
    "glm_4.7_flash_dpo": 8,
    "glm_4.7_flash_dpo_grpo": 8,
    "qwen3_30b_a3b_131k_sft": 8,
    "llama3_70b_ppo_128gpus": 128,
}
GIB_LEFT = {  # of 80, where the verdict of the plan counts libraries by the layout
    "qwen3_8b_lora_grpo": 11.05,
    "qwen3.5_35b_a3b_async_grpo": 10.17,
    "glm_4.7_flash_dpo": 2.46,
    "glm_4.7_flash_dpo_grpo": 7.84,
    "qwen3_30b_a3b_131k_sft": 2.14,
    "llama3_70b_ppo_128gpus": 9.14,
}
ON_NODES = "sbatch --nodes {} launch/slurm.sbatch"
SLOWEST = ("qwen3.5_35b_a3b_async_grpo", "llama3_70b_ppo_128gpus")


def test_there_are_these() -> None:
    assert {path.stem for path in RECIPES} == set(WORLD_SIZES)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)

    def run(name: str, *options: str, status: int = 0) -> dict[str, Any]:
        assert main([f"configs/recipes/{name}.yaml", "--json", *options]) == status, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", sorted(WORLD_SIZES.keys() - GIB_LEFT.keys()))
def test_a_recipe_of_published_data_loads_has_its_place_and_fits(name, plan) -> None:
    assert load_config(f"configs/recipes/{name}.yaml").name == name
    found = plan(name)
    assert found["world_size"] == WORLD_SIZES[name]
    for moment, memory in found["memory"].items():
        assert memory["worst_rank"]["total"] + SPARE_BYTES <= GPU_BYTES, moment


@pytest.mark.parametrize("name", params([name for name in GIB_LEFT if name not in SLOWEST], weekly=SLOWEST))
def test_a_recipe_of_a_job_loads_has_its_place_and_fits(name, plan) -> None:
    assert load_config(f"configs/recipes/{name}.yaml").name == name
    found = plan(name, "--profile", "h100", *re.findall(r"--profile h100 (\S+)", said_by(name)))
    assert found["world_size"] == WORLD_SIZES[name]
    assert found["verdict"]["fits"]
    assert found["verdict"]["left_bytes"] / 2**30 == pytest.approx(GIB_LEFT[name], abs=0.05)


def test_the_page_says_how_many_gib_are_left() -> None:
    rows = re.findall(r"\| (\d+) \| `([\w.]+)` \| ([\d.]+) \|", (ROOT / "docs" / "guides" / "data.md").read_text())
    assert {name: int(ranks) for ranks, name, _ in rows} == {name: WORLD_SIZES[name] for name in GIB_LEFT}
    for _, name, gib in rows:
        assert float(gib) == pytest.approx(GIB_LEFT[name], abs=0.06)


def said_by(name: str) -> str:
    """What stands above a recipe, in one line."""
    lines = (ROOT / "configs" / "recipes" / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def test_the_grpo_of_two_halves_begins_with_what_the_dpo_writes() -> None:
    first, second = (
        load_config(ROOT / "configs/recipes" / f"glm_4.7_flash_{name}.yaml") for name in ("dpo", "dpo_grpo")
    )
    assert second.actor.model == f"{first.output_dir}/{first.name}/hf"


def test_a_row_of_131072_tokens_needs_the_overrides_and_both_kinds_of_parallelism(plan) -> None:
    name = "qwen3_30b_a3b_131k_sft"
    config = load_config(f"configs/recipes/{name}.yaml")
    assert config.data.max_length == config.actor.hf_overrides.max_position_embeddings == 131_072
    alone = ("actor.context_parallel_size=1", "actor.tensor_parallel_size=8")
    assert plan(name, "--profile", "h100", *alone, status=3)["verdict"]["left_bytes"] / 2**30 == pytest.approx(
        -7.44, abs=0.05
    )


@pytest.mark.weekly
def test_all_weights_of_the_mixture_fit_as_many_gpus_as_its_recipe_says(plan) -> None:
    name = "qwen3.5_35b_a3b_async_grpo"
    given = re.search(r"16 \+ 8 GPUs, with (.*?) To reach", said_by(name))[1].split()
    found = plan(name, "--profile", "h100", *given)
    assert (found["world_size"], found["verdict"]["fits"]) == (24, True)
    half = ("actor.ranks=0-3", "actor.expert_parallel_size=4", "rollout.ranks=4-7", "actor.recompute=full")
    lacks = plan(name, "--profile", "h100", *given, *half, status=3)["verdict"]["left_bytes"]
    assert lacks / 2**30 == pytest.approx(-71.45, abs=0.05)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_to_run_it_what_it_reaches_and_that_it_was_not_run(path) -> None:
    text = said_by(path.stem)
    for part in ("not run here", "To reach" if "mistral_7b_dpo" not in path.stem else "MT-Bench", "DIRECTORY"):
        assert part in text
    ranks = WORLD_SIZES[path.stem]
    started = f"torchrun --nproc-per-node {ranks} -m hybridflow.train" if ranks <= 8 else ON_NODES.format(ranks // 8)
    assert f"{started} configs/recipes/{path.name}" in text


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
