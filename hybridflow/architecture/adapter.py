"""Directories that hold an adapter (such as LoRA) alone, which is no model until it is merged into the base model."""

from pathlib import Path
from typing import Any

from hybridflow.architecture.tied_head import EMBEDDING
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import DistributedDirectory, is_distributed
from hybridflow.formats.json_text import parse_json

CONFIG = "adapter_config.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # of a whole model
CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification"}  # by peft's task_type
DEFAULT_CLASS = "AutoPeftModelForCausalLM"


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter without a whole model: one of PEFT, or a role of a run's checkpoint."""
    if not (path / CONFIG).is_file():
        return False
    if is_distributed(path):
        return EMBEDDING not in DistributedDirectory(path)
    return not ((path / "config.json").exists() and any(any(path.glob(name)) for name in WEIGHTS))


def check_no_adapter(path: Path) -> None:
    """Raise CheckpointError for an adapter without a whole model beside it, with what to do instead."""
    if not is_adapter(path):
        return
    file = path / CONFIG
    try:
        said: dict[str, Any] = parse_json(file.read_bytes(), "")
    except (CheckpointError, OSError):  # that it is an adapter is what counts
        said = {}
    kind, base, task = said.get("peft_type"), said.get("base_model_name_or_path"), str(said.get("task_type"))
    raise CheckpointError(
        f"{file}: this directory holds an adapter (peft_type = {kind!r}) of base_model_name_or_path = {base!r} and no "
        f"whole model; {_what_to_do(path, kind, base, task)}"
    )


def _what_to_do(path: Path, kind: object, base: object, task: str) -> str:
    if kind not in ("LORA", None):
        peft_class = CLASSES.get(task, DEFAULT_CLASS)
        return (
            "merge it first, copy the tokenizer's files beside what is written, and name that directory:\n"
            f"    from peft import {peft_class}\n"
            f"    {peft_class}.from_pretrained({str(path)!r}).merge_and_unload().save_pretrained({f'{path}-merged'!r})"
        )
    role, model = "critic" if task in CLASSES else "actor", base if isinstance(base, str) and base else "BASE_MODEL"
    command = "megatron-to-hf" if is_distributed(path) else "peft-to-hf"
    base_option = "" if model == base else " --base BASE_MODEL"
    return (
        f"train it further with {role}.model: {model} and {role}.lora.adapter_path: {path}, or merge it first and name "
        f"the merged directory:\n    hybridflow convert {command} {path} DST{base_option}"
    )
