"""What a plan counts of adapters: elements by hand, memory, checkpoints, what travels; what fits 80 GB."""

import json
import shutil
from pathlib import Path

import pytest

from hybridflow.architecture.weights import num_parameters, num_trained
from hybridflow.cli.plan import main
from hybridflow.config import ExperimentConfig
from hybridflow.placement.adapter_lines import adapter_lines
from hybridflow.placement.forecast import forecast
from hybridflow.placement.placed import PlacedRun, place
from tests.distributed.lora_cases import adapted
from tests.distributed.tiny_experiment import write_config
from tests.launch import ROOT
from tests.tiny_models import make_checkpoints

HIDDEN, FFN, HEADS, VOCAB, LAYERS = 64, 96, 8, 100, 2
PADDED = 128  # rows of the embedding
RANK = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("inputs"), family="llama", tied=False, num_kv_heads=HEADS)


def placed(inputs: Path, tmp_path: Path, ranks: int, **sections: object) -> PlacedRun:
    tree = json.loads(write_config(tmp_path / "config.yaml", inputs).read_text())
    tree["actor"] |= {"tensor_parallel_size": 1, "lora": {"rank": RANK}} | sections.pop("actor", {})
    tree["critic"] |= sections.pop("critic", {})
    return place(ExperimentConfig.model_validate(tree | {"reference": None} | sections), ranks, cuda=True)


def adapter_elements() -> int:
    """Of a layer: A of q, k, v, gate and up read the hidden size; each B has as many rows as the layer gives."""
    attention = 3 * (RANK * HIDDEN + HIDDEN * RANK) + RANK * HIDDEN + HIDDEN * RANK
    mlp = 2 * (RANK * HIDDEN + FFN * RANK) + RANK * FFN + HIDDEN * RANK
    return LAYERS * (attention + mlp)


def base_elements(*, vocab: int = PADDED) -> int:
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
    return LAYERS * layer + 2 * vocab * HIDDEN + HIDDEN


def test_adapters_alone_have_gradients_and_states(inputs: Path, tmp_path: Path) -> None:
    run = placed(inputs, tmp_path, 1)
    own = adapter_elements()
    assert num_trained(run.actor.spec, "lm") == own
    assert num_parameters(run.actor.spec.base, "lm") == base_elements(vocab=VOCAB)
    found = forecast(run)
    held = found["memory"]["training"]["roles"]["actor"]
    assert held["weights"] == 4 * (base_elements() + own)
    assert (held["gradients"], held["optimizer"]) == (4 * own, 2 * 4 * own)
    assert found["roles"][0]["trained_parameters"] == own
    actors = 3 * 4 * own + 8  # weights and two moments, the number of steps
    critics = found["checkpoint"]["rank_bytes"]["total"] - actors
    assert critics == 3 * 4 * (base_elements() - PADDED * HIDDEN + HIDDEN) + 8, "all of a critic without adapters"


def test_a_critic_on_the_actors_base_has_adapters_and_a_head_alone(inputs: Path, tmp_path: Path) -> None:
    """Of another directory, dtype or layout it has a base of its own."""
    shared = {"model": str(inputs / "policy"), "lora": {"rank": RANK}}
    own = adapter_elements() + HIDDEN

    def weights(ranks: int = 1, **critic: object) -> int:
        run = placed(inputs, tmp_path, ranks, critic=shared | critic)
        return forecast(run)["memory"]["training"]["roles"]["critic"]["weights"]

    alone = 4 * (base_elements() - PADDED * HIDDEN + own)
    assert weights() == 4 * own
    assert weights(model=str(inputs / "critic")) == alone
    assert weights(dtype="bfloat16") == alone // 2
    assert weights(2, tensor_parallel_size=2) != weights(2) == 4 * own


def test_what_travels_of_frozen_weights(inputs: Path, tmp_path: Path) -> None:
    alike = forecast(placed(inputs, tmp_path, 2, actor={"tensor_parallel_size": 2}))["reshard"]
    assert alike["received_bytes"]["max"] == 0 and alike["frozen"]["received_bytes"] == 0
    gathered = placed(inputs, tmp_path, 2, actor={"tensor_parallel_size": 2}, rollout={"tensor_parallel_size": 1})
    found = forecast(gathered)["reshard"]
    frozen = found["frozen"]
    assert not frozen["once"] and frozen["received_bytes"] > 4 * base_elements() // 3
    assert found["received_bytes"]["max"] == frozen["received_bytes"] + frozen["adapter_bytes"]
    critic = {"ranks": "0"}
    reward = {"models": [{"model": str(inputs / "reward"), "dtype": "float32", "ranks": "0"}]}
    apart = placed(inputs, tmp_path, 2, actor={"ranks": "0"}, critic=critic, reward=reward, rollout={"ranks": "1"})
    found = forecast(apart)["reshard"]["frozen"]
    assert found == {"received_bytes": 4 * base_elements(), "adapter_bytes": 4 * adapter_elements(), "once": True}


@pytest.mark.parametrize(("name", "ranks"), [("qwen3_8b_lora_1gpu", 1), ("llama3_70b_lora_4gpus", 4)])
def test_an_8b_fits_one_gpu_and_a_70b_four(name: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "configs" / f"{name}.yaml"), "--memory-gib", "80"]) == 0
    said = capsys.readouterr().out
    assert "Fits:" in said and "trained" in said
    full = ["actor.lora=null", "algorithm.kl.use=none"]
    assert main([str(ROOT / "configs" / f"{name}.yaml"), "--memory-gib", "80", "--world-size", str(ranks), *full]) == 3


def test_what_a_plan_says_of_adapters(inputs: Path, tmp_path: Path) -> None:
    shared = {"model": str(inputs / "policy"), "lora": {"rank": RANK}}
    own, base = adapter_elements(), base_elements(vocab=VOCAB)
    assert adapter_lines(placed(inputs, tmp_path, 1, critic=shared)) == [
        f"actor.lora: trains {own:,} elements beside {base:,} frozen ones (rank 4, scale 8); the reference is the base "
        "model without adapters, and takes no memory of its own",
        f"critic.lora: trains {own + HIDDEN:,} elements beside {base - VOCAB * HIDDEN:,} frozen ones (rank 4, "
        "scale 8); the frozen ones are the actor's",
    ]
    slow = {"optimizer": {"lr": 1e-6}}
    [_, rate, again] = adapter_lines(
        placed(inputs, tmp_path, 1, actor=slow, reference={"model": str(inputs / "policy"), "dtype": "float32"})
    )
    assert rate.startswith("actor.optimizer.lr = 1e-06 is low for adapters")
    assert again.startswith("reference.model is the actor's base model, a second time in memory")


def test_adapters_of_other_weights_are_told(inputs: Path, tmp_path: Path) -> None:
    """As those of a run over the model that they were merged into already."""
    adapted(inputs / "policy", "llama", seed=1).save_pretrained(tmp_path / "adapter")
    lora = {"lora": {"adapter_path": str(tmp_path / "adapter")}}
    assert len(adapter_lines(placed(inputs, tmp_path, 1, actor=lora))) == 1
    shutil.copytree(inputs / "policy", tmp_path / "elsewhere")
    assert len(adapter_lines(placed(inputs, tmp_path, 1, actor=lora | {"model": str(tmp_path / "elsewhere")}))) == 1
    [_, said] = adapter_lines(placed(inputs, tmp_path, 1, actor=lora | {"model": str(inputs / "reference")}))
    assert said == (
        f"warning: actor.lora.adapter_path = {tmp_path / 'adapter'}: these adapters were trained beside "
        f"{inputs / 'policy'}, and actor.model = {inputs / 'reference'} has other weights"
    )
