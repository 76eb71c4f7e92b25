"""A directory of PEFT with adapters of LoRA: adapter_config.json, adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    (rank, inputs)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    (outputs, rank)

Behind PEFT's prefix names are those of the base model, which the table of weights has. A role in a checkpoint of a run
with adapters is such a directory too: adapter_config.json beside tensors in megatron's format, without the base model.
"""

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.architecture.adapter_weights import HF, A, B, is_linear, modules_of
from hybridflow.architecture.lora import Lora, initial_a, names
from hybridflow.architecture.spec import Head, ModelSpec, read_spec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.weight import Shape
from hybridflow.architecture.weight_files import MegatronDirectory
from hybridflow.architecture.weights import model_weights
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.directories import replace_directory, sync
from hybridflow.formats.distributed_directory import is_distributed
from hybridflow.formats.huggingface_files import write_safetensors
from hybridflow.formats.json_text import parse_json
from hybridflow.formats.safetensors_files import ALL, HeaderEntry, TensorInfo, read_entry, read_header
from hybridflow.formats.weights_digest import weights_digest

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_weights.json"  # of hybridflow alone: what the adapters were trained beside
DIGEST, OVERRIDES = "base_weights", "hf_overrides"  # fields of this file: of the weights; of the role
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
    "use_bdlora": (False,),
    "trainable_token_indices": (),
    "target_parameters": ((), []),
    "megatron_config": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "velora_config": (),
    "monteclora_config": (),
    # other ways to begin change the base's weights
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}

EXPERT_NAMES = (".gate_proj", ".up_proj", ".down_proj")
EXPERTS_BY_NAME = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")  # families of which PEFT takes these for experts' alone
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
        self.tensors: Mapping[str, TensorInfo] = {name: entry.info for name, entry in self._entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def file_of(self, name: str) -> Path:
        """For messages."""
        return self.path

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
        return read_entry(self._entries[name], name, shape, rows, columns)


def open_adapter(path: Path, lora: Lora) -> AdapterFile | MegatronDirectory:
    """The tensors of a directory by their HuggingFace names. lora: what its config says."""
    if is_distributed(path):
        return MegatronDirectory(path, replace(read_spec(path, adapters=True), lora=lora))
    return AdapterFile(path)


class Adapters:
    """The matrices that a model's adapters begin with, as `architecture.parts.TensorFiles`: of a directory, or new."""

    def __init__(self, lora: Lora) -> None:
        self._lora, self._file = lora, None if lora.path is None else open_adapter(lora.path, lora)

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
        own = f"; this run's is {path / 'adapter'}" if (path / "adapter" / CONFIG).is_file() else ""
        told = f"{key} = {path}: no {CONFIG} there; it is what PEFT's save_pretrained writes{own}"
        raise ConfigError(told) from error
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


def check_no_score(path: Path, lora: Lora, key: str) -> None:
    """Errors: ConfigError where the adapters are those of a model that scores."""
    said = read_adapter_config(path, key)
    task, whole = said.get("task_type"), said.get("modules_to_save")
    if task in CLASSIFIERS or whole or VALUE_HEAD.hf[0] in open_adapter(path, lora):
        raise ConfigError(
            f"{key} = {path}: {CONFIG} has task_type = {task!r} and modules_to_save = {whole!r}: these are adapters of "
            "a model that scores, trained with the head of it, and not of a language model"
        )


def lora_of_directory(path: Path, spec: ModelSpec, key: str) -> Lora:
    """The adapters of a directory, for the base model of a spec. Errors: ConfigError, naming the key and the file."""
    said = read_adapter_config(path, key)
    named = said.get("target_modules")
    try:
        if is_distributed(path) and isinstance(named, list):
            targets = tuple(named)
        else:
            targets = targets_of(AdapterFile(path), spec, key)
    except CheckpointError as error:
        raise ConfigError(f"{key} = {path}: {error}") from error
    lora = Lora(int(said["r"]), float(said["lora_alpha"]), targets, use_rslora=bool(said.get("use_rslora")), path=path)
    try:
        _check_shapes(open_adapter(path, lora), replace(spec, lora=lora))
    except CheckpointError as error:
        raise ConfigError(f"{key} = {path}: {error}") from error
    return lora


def _check_shapes(files: AdapterFile | MegatronDirectory, spec: ModelSpec) -> None:
    """Every matrix is there and fits the base model. Errors: CheckpointError."""
    assert spec.lora is not None, "the model has adapters"
    wanted = {
        name: shape
        for weight in model_weights(spec, spec.head)
        if weight.adapter
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    }
    strange = next((name for name in files.tensors if name.endswith(tuple(HF.values())) and name not in wanted), None)
    if strange is not None:
        raise CheckpointError(f"{files.file_of(strange)}: {strange} belongs to no layer of the base model {spec.path}")
    for name in adapter_names(spec, "lm"):
        if name not in files:
            raise CheckpointError(f"{files.path}: no tensor {name}")
        if files.tensors[name].shape != wanted[name]:
            raise CheckpointError(
                f"{files.file_of(name)}: {name} has shape {files.tensors[name].shape}, not {wanted[name]}: r = "
                f"{spec.lora.rank}, and the rest follows from the base model {spec.path}"
            )


def targets_of(file: AdapterFile, spec: ModelSpec, key: str) -> tuple[str, ...]:
    """The names within a layer of the linear layers that have adapters. Errors: ConfigError unless layers are alike."""
    modules, targets = file.modules(), set[str]()
    linear = [
        name for weight in model_weights(spec.base, spec.head) if is_linear(weight) for name in modules_of(weight)
    ]
    possible = set(linear)
    for module in modules:
        if module not in possible:
            raise ConfigError(
                f"{key}: {file.path} has an adapter of {module}, which is no linear layer of {spec.path} that can have "
                "one: is that the base model?"
            )
        prefix = next(prefix for prefix in LAYERS if module.startswith(prefix))
        targets.add(module.removeprefix(prefix).partition(".")[2])
    adapted = set(modules)
    for module in linear:
        alike = next((target for target in sorted(targets) if names(target, module)), None)
        if alike is not None and module not in adapted:
            raise ConfigError(
                f"{key}: {file.path} has adapters of {alike}, and none of {module}: all layers must be alike"
            )
    return tuple(sorted(targets))


# ------------------------------------------------------------------------------------------------ writing

TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS"}
CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")


def write_adapter(
    target: Path, tensors: Mapping[str, Tensor], spec: ModelSpec, head: Head, base_digest: str | None = None
) -> None:
    """Write a directory that PEFT and vLLM read, in place of an earlier one. tensors: by HuggingFace names.

    base_digest: of the weights that the adapters were trained beside, as hex.

    Errors: CheckpointError, OSError, where the files cannot be written.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_adapter_weights(partial, tensors)
    write_adapter_config(partial, spec, head, base_digest)
    sync(partial / CONFIG)
    replace_directory(partial, target)


def write_adapter_weights(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """tensors: by HuggingFace names."""
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    planned = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    write_safetensors(directory / WEIGHTS, planned, named.__getitem__)


def write_adapter_config(directory: Path, spec: ModelSpec, head: Head, base_digest: str | None = None) -> None:
    (directory / CONFIG).write_text(json.dumps(adapter_config(spec, head), indent=2) + "\n", encoding="utf-8")
    beside = {DIGEST: base_digest, OVERRIDES: spec.overrides}
    if known := {name: value for name, value in beside.items() if value}:
        (directory / BASE).write_text(json.dumps(known) + "\n", encoding="utf-8")


def is_other_base(adapter: Path, base: Path) -> bool:
    """Whether the adapters were trained beside other weights than these; not where nothing says it."""
    named = _trained_beside(adapter).get(DIGEST)
    return named is not None and bool(named != weights_digest(base).hex())


def recorded_overrides(adapter: Path) -> dict[str, Any]:
    """The `hf_overrides` that the adapters were trained with; {} where nothing says it. Errors: CheckpointError."""
    found = _trained_beside(adapter).get(OVERRIDES, {})
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{adapter / BASE}: {OVERRIDES} = {found!r} must be an object: copy the file from the run again"
        )
    return found


def _trained_beside(adapter: Path) -> dict[str, Any]:
    file = adapter / BASE
    wrong = f"{file}: is not JSON, copy the file from the run again: "
    return parse_json(file.read_bytes(), wrong) if file.is_file() else {}


def adapter_names(spec: ModelSpec, head: Head) -> list[str]:
    """HuggingFace's names of what a model with adapters trains: A and B of each linear layer, and a value head."""
    assert spec.lora is not None, "the model has adapters"
    found = []
    for weight in model_weights(spec.base, head):
        if is_linear(weight):
            found += [module + end for module in modules_of(weight) if spec.lora.adapts(module) for end in HF.values()]
    return [*found, *(VALUE_HEAD.hf if head == "score" else ())]


def left_out_by_peft(spec: ModelSpec, head: Head) -> str | None:
    """What PEFT does not read of a model's adapters, as a line for people; None: it reads all.

    PEFT 0.21 takes three names, whatever is in front of them, for those of the routed experts.
    """
    modules = [name.removesuffix(HF[A]) for name in adapter_names(spec, head) if name.endswith(HF[A])]
    lost = [module for module in modules if module.endswith(EXPERT_NAMES)]
    if spec.family not in EXPERTS_BY_NAME or not lost:
        return None
    return (
        f"PEFT leaves out {len(lost)} of the {len(modules)} adapters, such as that of {lost[0]}: it takes the name for "
        "that of routed experts. vLLM, hybridflow and the merged model have them"
    )


def adapter_config(spec: ModelSpec, head: Head) -> dict[str, Any]:
    """What PEFT has to know of a model's adapters."""
    assert spec.lora is not None, "the model has adapters"
    tensors = adapter_names(spec, head)
    return {
        "peft_type": "LORA",
        "task_type": TASKS[head],
        "base_model_name_or_path": str(spec.path),
        "r": spec.lora.rank,
        "lora_alpha": spec.lora.alpha,
        "use_rslora": spec.lora.use_rslora,
        "target_modules": _short_names(tensors, spec),
        "modules_to_save": ["score"] if head == "score" else None,
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
