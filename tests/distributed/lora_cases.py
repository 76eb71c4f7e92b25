"""What the worker of adapters runs, and what PEFT makes of the same: one description for both."""

from pathlib import Path
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.cases import AXES, CONTEXT_IN_STAGES, SPLIT, STAGED, Case, elsewhere, listed

RANK, ALPHA = 4, 12
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OF_ATTENTION = NAMES[:4]
OF_DELTA_NETS = [f"in_proj_{part}" for part in ("qkv", "z", "b", "a")] + ["out_proj"]
TARGETS = {
    "glm": [*OF_ATTENTION, "gate_up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "qwen3_5": [*NAMES, *OF_DELTA_NETS],
    # all but kv_b_proj, which the engine multiplies into queries and outputs
    "deepseek_v3": ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", *NAMES[4:]],
    "moonlight": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
}
# PEFT 0.21.2 takes gate_proj, up_proj and down_proj for the fused matrices of routed experts, never for a shared expert
FOR_EXPERTS = "peft.utils.transformers_weight_conversion._convert_peft_config_moe"
SOME = ["q_proj", "v_proj", "down_proj"]  # of weights that are of several linear layers
WITHOUT_CRITIC = ("glm4_moe",)  # of which transformers has no model that scores
LORA_AXES = {
    **AXES,
    "kind": ("llama", "glm", "opt", "qwen3_5", "glm4_moe", "deepseek_v3"),  # of the linear layers
    "pp": (1, 2),  # stages in the middle have nothing of their own
}
DEFAULT: dict[str, tuple[Case, ...]] = {
    "llama": (Case(tp=2), Case(dp=2), Case(recompute="full")),
    "glm": (SPLIT,),
    "opt": (STAGED,),
    "glm4_moe": (SPLIT,),
}
REST: dict[str, tuple[Case, ...]] = {
    "llama": (Case(pp=2, vpp=2, recompute="selective"), Case(tp=4, cp=2, sequence_parallel=True, recompute="full")),
    "glm": (Case(pp=2, vpp=2), Case(cp=2, recompute="full"), Case(tp=4, dp=2, recompute="full")),
    "opt": (
        Case(tp=2, cp=2, sequence_parallel=True),
        Case(pp=2, vpp=2, dp=2, recompute="selective"),
        Case(tp=4, sequence_parallel=True, recompute="selective"),
    ),
    "qwen3_5": (
        Case(pp=2, vpp=2),
        CONTEXT_IN_STAGES,
        Case(tp=2, dp=2, sequence_parallel=True, recompute="full"),
        Case(tp=4, sequence_parallel=True),
    ),
    "glm4_moe": (
        Case(cp=2, ep=2),
        Case(tp=2, cp=2, ep=4, sequence_parallel=True, recompute="full"),
        Case(tp=4, ep=2, sequence_parallel=True),
        Case(pp=2, vpp=2, dp=2, cp=2, ep=4, recompute="selective"),
        Case(tp=4, pp=2, vpp=2, ep=2, etp=2, recompute="selective"),
    ),
    "deepseek_v3": (
        Case(tp=2),
        Case(dp=2, ep=2, recompute="selective"),
        Case(tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True, recompute="full"),
        Case(tp=4, ep=4, sequence_parallel=True),
        Case(dp=2, cp=2, ep=2, etp=2, recompute="full"),
        Case(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
    ),
    "qwen3": (STAGED,),  # the tied weight lies in both stages
    "phi3": (SPLIT,),  # one adapter for queries, keys and values
    "moonlight": (SPLIT,),  # queries of the hidden state itself
}
SHOWN = [*listed(DEFAULT), *listed(REST)]
WEEKLY = elsewhere("llama", SHOWN)
CASES = [*SHOWN, *WEEKLY]


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
