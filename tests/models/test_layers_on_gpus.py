"""The layers that a GPU would choose, of every family and head, with a simulated Transformer Engine and without one.

Their classes, that the weight table knows each of their parameters, and their logits beside those of transformers.
"""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.forks import ROOT
from tests.tiny_models import FAMILIES, SCORES, make_checkpoints

SIMULATED = ROOT / "tests" / "models" / "simulated"
FUSED = ["TELayerNormColumnParallelLinear", "TERowParallelLinear"]
LOCAL = ["ColumnParallelLinear", "RMSNorm", "RowParallelLinear"]
WITH_EXPERTS = ["ExpertLinear", "RMSNorm", "Router"]
OF_GLM = ["ExpertLinear", "Linear", "RMSNorm", "SigmoidRouter"]  # its shared expert is of plain linear layers
OF_DEEPSEEK = ["ExpertLinear", "Linear", "NarrowSigmoidRouter", "RMSNorm"]
LATENT = ["ReplicatedLinear", "TEColumnParallelLinear", *FUSED]  # a dense layer's norm is in the MLP's first matrix
NEW = {"moonlight": 2e-5}  # whose logits are larger
OF_ATTENTION = {
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v3"), ("kv_b", "proj", "q_b")),
    "moonlight": ("kv_b", "proj", "q"),
}
OF_DELTA_NETS = ["Convolution", "DeltaNet", "HeadNorm", "ZeroCenteredHeadNorm", "ZeroCenteredRMSNorm"]
OF_GEMMA = ["ZeroCenteredHeadNorm", "ZeroCenteredRMSNorm"]
OF_QWEN = ["ExpertLinear", "Linear", "Router"]
LAYERS = {"opt_350m": "PostNormLayer", "gemma3": "NormsBehindLayer", "olmo3": "NormsBehindLayer"}
# those with Transformer Engine, and without; an OPT-350m has its norms after the sums, where no linear layer holds them
HOLDERS: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "glm"), (FUSED, LOCAL)),
    "qwen3": (["RMSNorm", *FUSED], LOCAL),
    "opt": (FUSED, ["ColumnParallelLinear", "LayerNorm", "RowParallelLinear"]),
    "opt_350m": (["ColumnParallelLinear", "LayerNorm", "RowParallelLinear"],) * 2,
    **dict.fromkeys(("mixtral", "qwen3_moe"), (sorted(WITH_EXPERTS + FUSED), sorted({*WITH_EXPERTS, *LOCAL}))),
    "qwen3_5": (
        sorted([*OF_DELTA_NETS, *FUSED, "TEColumnParallelLinear"]),
        sorted([*OF_DELTA_NETS, "ColumnParallelLinear", "RowParallelLinear"]),
    ),
    "qwen3_5_moe": (
        sorted([*OF_DELTA_NETS, *OF_QWEN, *FUSED, "RMSNorm", "TEColumnParallelLinear"]),
        sorted([*OF_DELTA_NETS, *OF_QWEN, "ColumnParallelLinear", "RowParallelLinear"]),
    ),
    **dict.fromkeys(("phi3", "ministral3", "smollm3"), (FUSED, LOCAL)),
    "gemma3": (sorted([*OF_GEMMA, *FUSED]), sorted([*OF_GEMMA, "ColumnParallelLinear", "RowParallelLinear"])),
    "olmo3": (sorted([*LOCAL, "WideHeadNorm"]),) * 2,
    "glm4_moe": (sorted(OF_GLM + FUSED), sorted({*OF_GLM, *LOCAL})),
    "glm4_moe_lite": (sorted(OF_GLM + LATENT), sorted({*OF_GLM, *LOCAL, "ReplicatedLinear"})),
    **dict.fromkeys(
        ("deepseek_v3", "moonlight"), (sorted(OF_DEEPSEEK + LATENT), sorted({*OF_DEEPSEEK, *LOCAL, "ReplicatedLinear"}))
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("engine")
    for family in FAMILIES:
        made = make_checkpoints(root / "models" / family, family=family, tied=False)
        for other in ("reference", "critic"):
            shutil.rmtree(made / other)
    path = os.pathsep.join((str(SIMULATED), str(ROOT)))
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.engine_worker", root / "models", root / "out.json"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((root / "out.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("engine", [True, False], ids=["with Transformer Engine", "without it"])
@pytest.mark.parametrize("head", ["policy", "reward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_family_and_compute(found: dict, family: str, head: str, engine: bool) -> None:
    of_model = found[f"{family} {head} {engine}"]
    assert of_model["layer"] == LAYERS.get(family, "TransformerLayer")
    held = family if head == "policy" else SCORES.get(family, family)
    assert of_model["holds parameters"] == HOLDERS[held][not engine]
    assert of_model["not in the model"] == of_model["without gradient"] == []
    assert of_model["difference"] < (1e-4 if held.startswith("qwen3_5") else 1e-5)  # see `test_parity.TOLERANCES`
    # Transformer Engine's layers add their weights' gradients to the buffers themselves: without apex nobody else does
    attention, mlp = OF_ATTENTION.get(held, ("proj", "qkv")), ["fc1", "fc2"]
    has_engine = engine and "TERowParallelLinear" in HOLDERS[held][0]
    whole = [f"self_attention.linear_{name}.weight" for name in attention]
    dense = [] if held in ("mixtral", "qwen3_moe", "qwen3_5_moe") else [f"mlp.linear_{name}.weight" for name in mlp]
    nets = [f"self_attention.{name}.weight" for name in ("in_proj_ba", "in_proj_qkvz", "out_proj")]
    linear = whole + dense + (nets if held.startswith("qwen3_5") else [])
    assert of_model["fused"]["weights"] == (sorted(linear) if has_engine else [])
    assert of_model["fused"]["without"] == [] and of_model["fused"]["difference"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("head", ["policy", "reward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_read_what_norms_give_in_either_kind_of_layers(found: dict, family: str, head: str) -> None:
    """Transformer Engine's layers with a norm in them would give adapters the norm's input."""
    of_model, held = found[f"{family} {head} adapters"], family if head == "policy" else SCORES.get(family, family)
    close = 1e-4 if held.startswith("qwen3_5") else NEW.get(held, 1e-5)  # see `test_parity.TOLERANCES`
    assert of_model["new True"] < close and of_model["new False"] < close
    assert of_model["apart"] < 5e-5 and of_model["gradients apart"] < 2e-5  # a norm's input would be off by units
    assert of_model["without gradient"] == []
    trained = {name.rpartition(".")[2] for name in of_model["trained"]} - {"weight"}
    assert trained == {"lora_a", "lora_b"}
    assert [name for name in of_model["trained"] if "lora" not in name] == (
        ["output_layer.weight"] if head == "reward" else []
    )
    with_engine = "TERowParallelLinear" in HOLDERS[held][0]
    assert ("TEColumnParallelLinear" in of_model["classes True"]) == with_engine
    assert "TELayerNormColumnParallelLinear" not in of_model["classes True"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_are_computed_again_in_transformer_engines_layers(found: dict, family: str) -> None:
    """Norms are then layers of their own, where they stand in front of attention and MLP."""
    of_model = found[f"{family} policy again"]
    assert of_model["apart"] < 2e-5
    if "layernorm" in of_model["modules"]:
        assert "TELayerNormColumnParallelLinear" not in of_model["classes"]
        assert set(of_model["elsewhere"]) <= {"layer_norm_weight", "layer_norm_bias"}
