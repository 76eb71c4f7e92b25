"""A directory of PEFT with adapters of LoRA: adapter_config.json, adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    (rank, inputs)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    (outputs, rank)

Behind PEFT's prefix names are those of the base model, which the table of weights has.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.architecture.adapter_weights import HF, A, B
from hybridflow.architecture.lora import Lora, initial_a
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.weight import Shape
from hybridflow.architecture.weights import model_weights
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.directories import replace_directory, sync
from hybridflow.formats.file_bytes import opened, read_box
from hybridflow.formats.huggingface_files import write_safetensors
from hybridflow.formats.json_text import parse_json
from hybridflow.formats.safetensors_files import ALL, HeaderEntry, TensorInfo, box_of, check_readable, read_header

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYERS = ("model.layers.", "model.decoder.layers.")
# What a config may say beside rank, alpha and names; everything else changes what the adapters compute.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (),
    "use_qalora": (False,),
    "trainable_token_indices": (),
    "target_parameters": ((), []),
    "megatron_config": (),
}

HEADS = frozenset({"score", "classifier"})  # what PEFT names where a model scores, of which score is there


class AdapterFile:
    """The tensors of a directory by their HuggingFace names, without PEFT's prefix.

    Errors: CheckpointError naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path / WEIGHTS
        if not self.path.exists():
            other = path / "adapter_model.bin"
            hint = (
                f"; {other.name} is a pickle: save the adapter with safe_serialization=True" if other.exists() else ""
            )
            raise CheckpointError(f"{self.path}: no such file{hint}")
        found = read_header(self.path)
        strange = next((name for name in found if not name.startswith(PREFIX)), None)
        if strange is not None:
            raise CheckpointError(f"{self.path}: {strange} does not begin with {PREFIX}: PEFT would not read it either")
        self._entries: dict[str, HeaderEntry] = {name.removeprefix(PREFIX): entry for name, entry in found.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def modules(self) -> list[str]:
        """Names of linear layers with an adapter. Errors: CheckpointError where A or B is missing, or more is there."""
        ends = tuple(HF.values())
        modules = {name.removesuffix(end) for name in self._entries for end in ends if name.endswith(end)}
        for module in sorted(modules):
            for end in ends:
                if module + end not in self._entries:
                    raise CheckpointError(f"{self.path}: {module} has no {end[1:]}")
        known = {module + end for module in modules for end in ends} | {"score.weight"}
        unknown = sorted(self._entries.keys() - known)
        if unknown:
            raise CheckpointError(f"{self.path}: {unknown[0]} is no matrix of LoRA")
        return sorted(modules)

    def read(self, name: str, shape: Shape, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Rows and columns of a tensor, whose whole shape must be `shape`."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: no tensor {PREFIX}{name}")
        file, start, info = self._entries[name]
        check_readable(file, name, info, shape)
        offset, size = box_of(shape, rows, columns)
        out = torch.empty(size, dtype=info.dtype)
        with opened(file) as fd:
            read_box(fd, file, start, shape, offset, out=out)
        return out


class Adapters:
    """The matrices that a model's adapters begin with, as `architecture.parts.TensorFiles`: of a directory, or new."""

    def __init__(self, lora: Lora) -> None:
        self._lora, self._file = lora, None if lora.path is None else AdapterFile(lora.path)

    def __contains__(self, name: str) -> bool:
        """Whether it is in the directory."""
        return self._file is not None and name in self._file

    def read(self, name: str, shape: Shape, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        if self._file is not None and name in self._file:
            return self._file.read(name, shape, rows, columns)
        end = next(end for end in HF.values() if name.endswith(end))
        module = name.removesuffix(end)
        if end == HF[B] or not self._lora.adapts(module):  # one that has none lies beside one that has
            return torch.zeros(shape)[rows, columns]
        rank, inputs = shape
        return initial_a(module, rank, inputs, self._lora.seed)[rows, columns]


def read_adapter_config(path: Path, key: str) -> dict[str, Any]:
    """What adapter_config.json says. Errors: ConfigError, naming key, file and field, for what is not supported."""
    file = path / CONFIG
    try:
        said: dict[str, Any] = parse_json(file.read_bytes(), f"{key} = {path}: {file.name} is not JSON: ")
    except FileNotFoundError as error:
        raise ConfigError(f"{key} = {path}: no {CONFIG} there; it is what PEFT's save_pretrained writes") from error
    except (OSError, CheckpointError) as error:
        raise ConfigError(f"{key} = {path}: {file} cannot be read: {error}") from error
    for field, allowed in NEUTRAL.items():
        value = said.get(field)
        if value is not None and value not in allowed:
            raise ConfigError(f"{key} = {path}: {CONFIG} has {field} = {value!r}, which is not supported")
    whole = said.get("modules_to_save") or []
    if not HEADS.issuperset(whole):
        raise ConfigError(f"{key} = {path}: {CONFIG} has modules_to_save = {whole!r}; a head that scores alone may be")
    for field in ("r", "lora_alpha"):
        value = said.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{key} = {path}: {CONFIG} has {field} = {value!r}, which must be a positive number")
    return said


def targets_of(file: AdapterFile, spec: ModelSpec, key: str) -> tuple[str, ...]:
    """The names within a layer of the linear layers that have adapters. Errors: ConfigError unless layers are alike."""
    inside: dict[str, set[int]] = {}
    for module in file.modules():
        prefix = next((prefix for prefix in LAYERS if module.startswith(prefix)), None)
        number, _, name = module.removeprefix(prefix or "").partition(".")
        if prefix is None or not number.isdigit() or not name:
            raise ConfigError(f"{key}: {file.path} has an adapter of {module}; those of layers alone are supported")
        inside.setdefault(name, set()).add(int(number))
    for name, numbers in inside.items():
        if len(numbers) < spec.num_layers and spec.num_dense_layers == 0:
            missing = next(i for i in range(spec.num_layers) if i not in numbers)
            raise ConfigError(
                f"{key}: {file.path} has adapters of {name} in {len(numbers)} of {spec.num_layers} layers, and not in "
                f"layer {missing}: all layers must be alike"
            )
    return tuple(sorted(inside))


# ------------------------------------------------------------------------------------------------ writing

TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS"}


def write_adapter(target: Path, tensors: Mapping[str, Tensor], spec: ModelSpec, head: Head) -> None:
    """Write a directory that PEFT and vLLM read, in place of an earlier one. tensors: by HuggingFace names.

    Errors: CheckpointError, OSError, where the files cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    planned = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    write_safetensors(partial / WEIGHTS, planned, named.__getitem__)
    text = json.dumps(adapter_config(tensors, spec, head), indent=2) + "\n"
    (partial / CONFIG).write_text(text)
    sync(partial / CONFIG)
    replace_directory(partial, target)


def adapter_config(tensors: Collection[str], spec: ModelSpec, head: Head) -> dict[str, Any]:
    """What PEFT has to know of adapters with these tensors."""
    assert spec.lora is not None, "the model has adapters"
    return {
        "peft_type": "LORA",
        "task_type": TASKS[head],
        "base_model_name_or_path": str(spec.path),
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "use_rslora": spec.lora.use_rslora,
        "target_modules": _short_names(tensors, spec),
        "modules_to_save": ["score"] if "score.weight" in tensors else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _short_names(tensors: Collection[str], spec: ModelSpec) -> list[str]:
    """The ends of the adapted modules' names that no other linear layer of the base model has."""
    adapted = {name.removesuffix(HF[A]) for name in tensors if name.endswith(HF[A])}
    named = (name for weight in model_weights(spec.base, spec.head) for name in weight.hf)
    others = {name.removesuffix(".weight") for name in named if name.endswith(".weight")} - adapted
    of_others = {end for other in others for end in _ends(other)}
    return sorted({next(end for end in _ends(module) if end not in of_others) for module in adapted})


def _ends(module: str) -> Iterator[str]:
    """Of a name with dots: the last part, the last two, and so on."""
    parts = module.split(".")
    return (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
