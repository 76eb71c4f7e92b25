"""Directories that hold an adapter (such as LoRA) alone, which is no model until it is merged into the base model."""

from pathlib import Path

from hybridflow.errors import CheckpointError
from hybridflow.formats.json_text import parse_json

CONFIG = "adapter_config.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", ".metadata")  # of a whole model
CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification"}  # by peft's task_type
DEFAULT_CLASS = "AutoPeftModelForCausalLM"


def check_no_adapter(path: Path) -> None:
    """Raise CheckpointError for an adapter without a whole model beside it, with how to merge it."""
    file = path / CONFIG
    if not file.is_file() or ((path / "config.json").exists() and any(any(path.glob(name)) for name in WEIGHTS)):
        return
    try:
        said = parse_json(file.read_bytes(), "")
    except (CheckpointError, OSError):  # that it is an adapter is what counts
        said = {}
    base, peft_class = said.get("base_model_name_or_path"), CLASSES.get(str(said.get("task_type")), DEFAULT_CLASS)
    raise CheckpointError(
        f"{file}: this directory holds an adapter (peft_type = {said.get('peft_type')!r}) of base_model_name_or_path = "
        f"{base!r} and no whole model; merge it first, copy the tokenizer's files beside what is written, and name "
        f"that directory:\n"
        f"    from peft import {peft_class}\n"
        f"    {peft_class}.from_pretrained({str(path)!r}).merge_and_unload().save_pretrained({f'{path}-merged'!r})"
    )
