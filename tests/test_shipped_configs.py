"""Every config under configs/ plans; those for real machines fit them. That they load is tested in test_config.py."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.cli.plan import main
from hybridflow.config.kinds import load_config
from hybridflow.examples.tiny.models import Settings

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))  # those of configs/recipes: test_recipes.py
FIXED = ("sft", "reward_model", "dpo", "kto")  # on given rows: nothing is generated
WORLD_SIZES = {
    "best_of_n": 2,
    "llama3_8b_8gpus": 8,
    "qwen3_8b_one_step_off_8gpus": 8,
    "qwen3_8b_one_step_off_32gpus": 32,
    "qwen3_30b_a3b_8gpus": 8,
    "qwen3_235b_a22b_64gpus": 64,
    "glm_45_air_32gpus": 32,
    "qwen2_72b_64gpus": 64,
    "qwen2_72b_256gpus": 256,
    "qwen2_72b_1024gpus": 1024,
    "qwen3_8b_lora_1gpu": 1,
    "llama3_70b_lora_4gpus": 4,
    "quickstart": 2,
    "quickstart_lora": 2,
    "quickstart_3d": 8,
    "quickstart_agent": 2,
    "quickstart_dapo": 2,
    "quickstart_experts": 2,
    "quickstart_grpo": 2,
    "quickstart_one_step_off": 3,
    "quickstart_rule": 2,
    "quickstart_tools": 2,
    **{f"quickstart_{name}": 2 for name in FIXED},
    **{
        f"quickstart_{name}": 2
        for name in ("distill", "dr_grpo", "grpo", "gspo", "maxrl", "opo", "reinforce", "remax", "rloo", "rule")
    },
    "split_placement": 2,
    **{f"smollm2_{name}": 2 for name in ("sums", "lora", "tool", "gym", "sft")},
    **{f"sums_{name}": 2 for name in ("qwen2.5_0.5b", "qwen3_0.6b", "gemma3_270m")},
}
OF_THE_HUB = {  # whose models are names on the Hub: their shapes here
    "sums_qwen2.5_0.5b": "qwen2.5-0.5b",
    "sums_qwen3_0.6b": "qwen3-0.6b",
    "sums_gemma3_270m": "gemma-3-270m",
}
GPU_BYTES = 80 * 10**9
SPARE_BYTES = 10 * 10**9  # what the estimate does not count
NORM_SHARE = 0.01  # of a tiny model: its norms are whole on every rank, which no formula counts


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """configs/, and the config.json of the quickstart's models as tools.make_tiny and quickstart_sft make them."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    settings = Settings()
    for name, architecture in (
        ("data/tiny/policy", "LlamaForCausalLM"),
        ("data/tiny/reward", "LlamaForSequenceClassification"),
        ("runs/quickstart_sft/hf", "LlamaForCausalLM"),
        ("data/tiny_experts/policy", "Qwen3MoeForCausalLM"),
        ("data/tiny_tools/policy", "LlamaForCausalLM"),
        ("data/sums/policy", "LlamaForCausalLM"),
        ("runs/smollm2_sums/hf", "LlamaForCausalLM"),
    ):
        (tmp_path / name).mkdir(parents=True)
        shape = {
            "architectures": [architecture],
            "model_type": "llama",
            "hidden_size": settings.hidden_size,
            "intermediate_size": settings.intermediate_size,
            "num_hidden_layers": settings.num_layers,
            "num_attention_heads": settings.num_heads,
            "num_key_value_heads": settings.num_key_value_heads,
            "vocab_size": 20,
            "rms_norm_eps": 1e-5,
        }
        if "Moe" in architecture:
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
            shape |= {"model_type": "qwen3_moe", **experts}
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(name: str, *options: str) -> dict[str, Any]:
        model = [f"actor.model=configs/shapes/{OF_THE_HUB[name]}"] if name in OF_THE_HUB else []
        assert main([f"configs/{name}.yaml", "--json", *model, *options]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.thorough
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_plans(plan, path: Path) -> None:
    found = plan(path.stem)
    assert found["world_size"] == WORLD_SIZES[path.stem]
    assert ("reshard" in found) == (
        path.stem.rpartition("_")[2] not in FIXED and path.stem != "quickstart_reward_model"
    )
    if "reshard" not in found:
        assert list(found["memory"]) == ["training"] and found["memory"]["training"]["worst_rank"]["total"] > 0
        return
    reshard = found["reshard"]
    assert reshard["received_bytes"] == reshard["lower_bound_bytes"]
    assert reshard["received_bytes"]["total"] == reshard["sent_bytes"]["total"]


REAL = (
    *("llama3_8b_8gpus", "qwen2_72b_64gpus", "qwen2_72b_256gpus", "qwen2_72b_1024gpus"),
    *("qwen3_235b_a22b_64gpus", "glm_45_air_32gpus"),
    *("qwen3_8b_one_step_off_8gpus", "qwen3_8b_one_step_off_32gpus"),
)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.thorough
def test_real_models_fit_80_gb(plan, name: str) -> None:
    memory, extra = plan(name)["memory"], plan(name)["reshard"]["peak_extra_bytes"]["max"]
    for moment in ("training", "generation"):
        assert memory[moment]["worst_rank"]["total"] + SPARE_BYTES <= GPU_BYTES, moment
    assert memory["generation"]["worst_rank"]["total"] + extra + SPARE_BYTES <= GPU_BYTES, "on the way to the engine"


def test_a_mixture_of_30b_trains_on_8_gpus_of_80_gib(capsys, plan) -> None:
    """On sequences of 4096 tokens, four in a micro-batch: 80 - 45.24 - 5.27 for libraries = 29.49 GiB are left.

    With the optimizer's state on the device while models train it was two, and layers computed again: 8.04 GiB.
    """
    name = "configs/qwen3_30b_a3b_8gpus.yaml"
    config = load_config(name)
    assert (config.max_sequence_length, config.actor.micro_batch_tokens) == (4096, 16384)
    before = ("actor.offload_optimizer=true", "actor.micro_batch_tokens=8192", "actor.recompute=full")
    for changes, left in (((), "29.49"), (before, "8.04")):
        assert main([name, "--json", "--memory-gib", "80", *changes]) == 0
        assert f"; {left} GiB are left." in json.loads(capsys.readouterr().out)["verdict"]["line"]
    for changes in (before[:1], ("actor.offload_optimizer=false",)):
        assert main([name, "--json", "--memory-gib", "80", *changes]) == 3  # 87.45 of 74.73 GiB
        capsys.readouterr()
    extra = plan("qwen3_30b_a3b_8gpus")["reshard"]["peak_extra_bytes"]["max"]
    generation = plan("qwen3_30b_a3b_8gpus")["memory"]["generation"]["worst_rank"]["total"]
    assert generation + extra + SPARE_BYTES <= GPU_BYTES, "on the way to the engine"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "before", "seconds", "host_gib"),
    [
        ("qwen3_30b_a3b_8gpus", ("recompute=full", "micro_batch_tokens=8192"), (126.6, 112.1), 342 + 8),
        ("qwen3_235b_a22b_64gpus", ("recompute=full", "micro_batch_tokens=6144"), (419.9, 356.4), 336 + 8),
    ],
)
def test_a_state_in_host_memory_saves_seconds(
    capsys, name: str, before: tuple[str, ...], seconds: tuple[float, float], host_gib: int
) -> None:
    """What each config says of itself: against what fits with the state on the device while models train."""
    for changes, expected in zip((("offload_optimizer=true", *before), ()), seconds, strict=True):
        arguments = [f"actor.{change}" for change in changes]
        assert main([f"configs/{name}.yaml", "--json", "--time", "--profile", "h100-sxm", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["time"]["seconds"] == pytest.approx(expected, abs=0.05)
    assert found["host_memory"]["bytes"] == host_gib << 30


@pytest.mark.thorough
def test_70b_with_a_critic_fits_on_half_the_nodes_with_states_in_host_memory(capsys) -> None:
    sizes = [f"{role}.data_parallel_size=2" for role in ("actor", "critic")]
    always = [f"{role}.offload_optimizer=always" for role in ("actor", "critic")]
    for changes, status in ((sizes, 3), (sizes + always, 0)):
        arguments = ("--json", "--world-size", "64", "--memory-gib", "80")
        assert main(["configs/recipes/llama3_70b_ppo_128gpus.yaml", *arguments, *changes]) == status
        found = json.loads(capsys.readouterr().out)
    assert "; 20.83 GiB are left." in found["verdict"]["line"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.thorough
def test_no_more_is_received_than_by_the_papers(plan, path: Path) -> None:
    found = plan(path.stem)
    if "reshard" not in found:
        pytest.skip("nothing is generated")
    reshard = found["reshard"]
    if reshard["hybridflow_bytes"] is None:
        pytest.skip("the engine's groups do not lie within the training groups: the formula does not hold")
    mean, ours = reshard["received_bytes"]["mean"], reshard["hybridflow_bytes"]
    # no formula counts that the engine repeats key/value heads where ranks outnumber them
    repeated = NORM_SHARE * reshard["deepspeed_chat_bytes"] if path.stem.startswith("qwen3_30b") else 0
    assert mean <= ours * (1 + NORM_SHARE) + repeated
    assert ours <= reshard["deepspeed_chat_bytes"]


PARAMETERS = {  # as their publishers count them; those of OPT, which has no such count, are what its sizes give
    "deepseek-v3": 671_026_419_200,  # but for the layer that guesses a further token, and with the routers' biases
    "glm-4-9b": 9_399_951_360,
    "glm-4.5-air": 106_852_251_264,
    "glm-4.7-flash": 29_943_393_920,
    "kimi-k2": 1_026_408_232_448,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_110_208,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "gemma-3-27b": 27_009_346_304,  # without what reads images
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-270m": 268_098_176,
    "ministral-3-8b": 8_489_553_920,
    "olmo-3-7b": 7_298_011_136,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "opt-66b": 65_719_701_504,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    # the language model alone, as its sizes give: publishers count what reads images too
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
}
REWARD = "-reward"  # a shape with a head of one score


def test_shapes_have_the_published_number_of_parameters() -> None:
    specs = {path.name: read_spec(path) for path in (ROOT / "configs/shapes").iterdir()}
    models = {name: spec for name, spec in specs.items() if not name.endswith(REWARD)}
    assert {name: num_parameters(spec, "lm") for name, spec in models.items()} == PARAMETERS
    for name in specs.keys() - models.keys():
        spec, reward = models[name.removesuffix(REWARD)], specs[name]
        head = math.prod((spec.vocab_size, spec.hidden_size))
        assert num_parameters(reward, "score") == PARAMETERS[name.removesuffix(REWARD)] - head + spec.hidden_size
        assert (spec.head, reward.head) == ("lm", "score")
