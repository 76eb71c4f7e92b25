"""Adapters as PEFT makes and writes them, and as a checkpoint of a run holds them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.architecture.peft_directory import Adapters, lora_of_directory, write_adapter_config
from hybridflow.architecture.spec import Head, config_changes, read_spec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.weight_files import write_distributed
from hybridflow.architecture.weights import model_weights
from hybridflow.convert.to_megatron import make_chunks
from hybridflow.formats.huggingface_files import copy_companions, write_config
from hybridflow.formats.safetensors_files import TensorInfo

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "llama": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "qwen3": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
    "glm": (*ATTENTION, "gate_up_proj", "down_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "glm4_moe": ATTENTION,  # PEFT 0.21 takes gate_proj of a mixture for that of the experts, also with more before it
}


def model_of(path: Path, *, head: Head = "lm", dtype: torch.dtype = torch.float32) -> Any:
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    return auto.from_pretrained(path, dtype=dtype).eval()


def save_adapter(
    base: Path, target: Path, targets: Iterable[str] | str, *, head: Head = "lm", seed: int = 0, **config: Any
) -> PeftModel:
    """TARGET, with random A and B as training leaves them. The model that PEFT has, in float32."""
    task = "CAUSAL_LM" if head == "lm" else "SEQ_CLS"
    given = {"r": 4, "lora_alpha": 6, "task_type": task, **config}
    named = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(model_of(base, head=head), LoraConfig(target_modules=named, **given)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0, 0.1, generator=generator)
    model.save_pretrained(str(target))
    assert isinstance(model, PeftModel)
    return model


def write_by_hand(base: Path, target: Path, modules: Mapping[str, tuple[int, int]], *, alpha: float = 6) -> Path:
    """TARGET with random adapters of rank 4. modules: (outputs, inputs) of linear layers, by their names."""
    target.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        for name, shape in (("lora_A", (4, inputs)), ("lora_B", (outputs, 4))):
            matrix = torch.empty(shape).normal_(0, 0.1, generator=generator)
            tensors[f"base_model.model.{module}.{name}.weight"] = matrix
    save_file(tensors, target / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": alpha}
    said |= {"task_type": "CAUSAL_LM", "target_modules": sorted({module.rpartition(".")[2] for module in modules})}
    (target / "adapter_config.json").write_text(json.dumps(said))
    return target


def change(path: Path, **fields: Any) -> None:
    """Fields of adapter_config.json."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(path: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Of adapter_model.safetensors, by the names without PEFT's prefix; None removes one."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file) | {
        f"base_model.model.{name}": tensor for name, tensor in changes.items() if tensor is None
    }
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def save_as_run(adapter: Path, base: Path, target: Path, *, head: Head = "lm") -> Path:
    """TARGET as a role of a run's checkpoint that holds the adapters of a directory of PEFT."""
    spec = read_spec(base)
    spec = replace(spec, lora=lora_of_directory(adapter, spec, "adapter"))
    assert spec.lora is not None
    source: Any = Adapters(spec.lora)
    weights = [weight for weight in model_weights(spec, head) if weight.adapter or weight == VALUE_HEAD]
    infos = {
        name: TensorInfo(shape, torch.float32)
        for weight in weights
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    }
    write_distributed(target, make_chunks(weights, spec, source, infos))
    write_config(base, target, config_changes(spec, head), dtype=torch.float32)
    copy_companions(base, target)
    write_adapter_config(target, spec, head)
    return target
