"""What the worker of adapters runs, and what PEFT makes of the same: one description for both."""

from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.cases import CONTEXT_IN_STAGES, EXPERT_CASES, MIXED, SPLIT, STAGED

RANK, ALPHA = 4, 12
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_ATTENTION = NAMES[:4]
OF_DELTA_NETS = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")] + ["out_proj"]
TARGETS = {
    "glm": [*OF_ATTENTION, "gate_up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "mixtral": OF_ATTENTION,
    "qwen3_moe": OF_ATTENTION,
    "qwen3_5": [*NAMES, *OF_DELTA_NETS],
    "qwen3_5_moe": [*NAMES, *OF_DELTA_NETS],
    # all but kv_b_proj, which the engine multiplies into queries and outputs
    "deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", *NAMES[4:]],
    "moonlight": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
}
# PEFT 0.21.2 takes gate_proj, up_proj and down_proj for the fused matrices of routed experts, never for a shared expert
FOR_EXPERTS = "peft.utils.transformers_weight_conversion._convert_peft_config_moe"
SOME = ["q_proj", "v_proj", "down_proj"]  # of weights that are of several linear layers
WITHOUT_CRITIC = ("glm4_moe", "qwen3_5_moe")  # of which transformers has no model that scores
FULL_RECOMPUTATION = "tp1pp1dp1vpp1-full"
FEW_KV = "tp4pp1dp1vpp1-none"
CASES_OF = {
    "llama": None,  # all of them
    "qwen2": (SPLIT, STAGED, "tp2pp2dp1vpp2sp-selective"),
    "qwen3": (SPLIT, STAGED, FEW_KV),
    "glm": (SPLIT, STAGED, FEW_KV),
    "opt": (SPLIT, STAGED, MIXED),
    "mixtral": (SPLIT, STAGED),
    "qwen3_moe": (SPLIT, "tp2pp1dp1vpp1ep2etpNone-none"),
    "qwen3_5": (SPLIT, STAGED, MIXED, CONTEXT_IN_STAGES),
    "gemma3": (SPLIT, STAGED, CONTEXT_IN_STAGES),
    "phi3": (SPLIT, STAGED, FEW_KV),
    "olmo3": (SPLIT, MIXED),
    "qwen3_5_moe": (SPLIT, "tp2pp1dp1vpp1ep2etpNone-none"),
    "deepseek_v3": ("tp2pp1dp1vpp1-none", MIXED, CONTEXT_IN_STAGES, "tp1pp1dp1vpp1cp2-none"),
    "moonlight": (SPLIT,),
    "glm4_moe": (SPLIT, STAGED, MIXED, *(case.name for case in EXPERT_CASES)),
}
DEFAULT = {
    ("tp1pp1dp1vpp1-none", "llama"),
    ("tp2pp1dp1vpp1-none", "llama"),
    ("tp1pp1dp2vpp1-none", "llama"),
    (FULL_RECOMPUTATION, "llama"),
    (SPLIT, "llama"),
    ("tp2pp2dp1vpp2sp-selective", "qwen2"),
    (STAGED, "qwen3"),
    (SPLIT, "glm"),
    (SPLIT, "glm4_moe"),
}


def targets(family: str) -> list[str]:
    return TARGETS.get(family, NAMES)


def adapted(path: Path, family: str, *, seed: int, score: bool = False) -> nn.Module:
    """A model of transformers with PEFT's adapters, whose B are not zero; score: with a new head that scores."""
    torch.manual_seed(seed)
    kind, more = AutoModelForCausalLM, {}
    if score:
        kind, more = AutoModelForSequenceClassification, {"num_labels": 1}
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=targets(family),
        task_type="SEQ_CLS" if score else "CAUSAL_LM",
        modules_to_save=["score"] if score else None,
    )
    model = kind.from_pretrained(path, dtype=torch.float32, **more)
    with mock.patch(FOR_EXPERTS):
        model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            if "score.modules_to_save" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of what PEFT trains, by the names in PEFT's files without the prefix."""
    shortened = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("base_model.model.")
        shortened[name.replace(".default.weight", ".weight").replace(".modules_to_save", "")] = tensor
    return shortened


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
