"""A base model and an adapter: the two as one model, W + scale B A, read tensor by tensor; and an adapter alone.

An adapter is a directory of PEFT, or a role in a checkpoint of a run with actor.lora or critic.lora.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from torch import Tensor

from hybridflow.architecture.adapter import is_adapter
from hybridflow.architecture.adapter_weights import HF, WEIGHT, A, B
from hybridflow.architecture.lora import Lora
from hybridflow.architecture.merge import merged_weight
from hybridflow.architecture.peft_directory import (
    BASE,
    CONFIG,
    TASKS,
    AdapterFile,
    adapter_names,
    is_other_base,
    left_out_by_peft,
    lora_of_directory,
    open_adapter,
    read_adapter_config,
    recorded_overrides,
    write_adapter_weights,
)
from hybridflow.architecture.spec import Head, ModelSpec, read_spec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.weight_files import MegatronDirectory
from hybridflow.architecture.weights import model_weights
from hybridflow.config.hub import fetched
from hybridflow.convert.compare import CheckpointFiles, read_cast, rounded
from hybridflow.convert.output import check_target, new_directory
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import say, size_text
from hybridflow.convert.survey import Survey, open_survey
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.distributed_directory import is_distributed
from hybridflow.formats.huggingface_files import num_bytes
from hybridflow.formats.safetensors_files import TensorInfo


@dataclass(frozen=True)
class AdaptedModel:
    """A base model with the adapters of a directory.

    spec: with the adapters. head: of the two together. infos: the merged model's tensors, in the base's dtypes.
    """

    path: Path
    spec: ModelSpec
    lora: Lora
    head: Head
    base: CheckpointFiles
    adapter: AdapterFile | MegatronDirectory
    infos: Mapping[str, TensorInfo]
    notes: tuple[str, ...]

    def read(self, name: str, *, infos: Mapping[str, TensorInfo]) -> Tensor:
        """A tensor of the merged model: summed in float32, and rounded once to the dtype that `infos` says.

        Errors: CheckpointError where a number is too large for the dtype.
        """
        shape, dtype = infos[name]
        if name == VALUE_HEAD.hf[0] and name in self.adapter:
            return rounded(self.adapter.read(name, shape), dtype, self.adapter.file_of(name), name)
        module = name.removesuffix(WEIGHT)
        if module + HF[A] not in self.adapter or not self.lora.adapts(module):
            return read_cast(self.base, name, infos=infos)
        inputs, outputs, rank = shape[1], shape[0], self.lora.rank
        a = self.adapter.read(module + HF[A], (rank, inputs))
        b = self.adapter.read(module + HF[B], (outputs, rank))
        found = merged_weight(self.base.read(name, shape).float(), a, b, self.lora.scale)
        return rounded(found, dtype, self.base.file_of(name), name)


def open_adapted(path: Path, base: str | None = None, *, key: str = "SRC") -> AdaptedModel:
    """base: of a directory or a model in the Hub's cache, in place of that which adapter_config.json names.

    key: what a user calls the directory. Errors: ConfigError, CheckpointError, naming file and field.
    """
    said = read_adapter_config(path, key)
    survey = open_survey(base_directory(path, base, key=key))
    survey.check()
    lora = lora_of_directory(path, survey.spec, key)
    spec = replace(read_spec(survey.spec.path, overrides=recorded_overrides(path)), lora=lora)
    adapter = open_adapter(path, lora)
    head = _head(survey, adapter, said, path)
    named = said.get("base_model_name_or_path")
    notes = [f"base: {spec.path}; {CONFIG} names {named}"] if base is not None and base != named else []
    if base is not None and is_other_base(path, spec.path):
        notes.append(f"warning: {spec.path} has other weights than those that the adapters were trained beside")
    dtype = next(iter(survey.weights.values())).dtype
    infos = {
        name: survey.weights.get(name, TensorInfo(shape, dtype))
        for weight in model_weights(spec.base, head)
        for name, shape in zip(weight.hf, weight.shapes(spec.base), strict=True)
    }
    return AdaptedModel(
        path=path,
        spec=spec,
        lora=lora,
        head=head,
        base=survey.files,
        adapter=adapter,
        infos=infos,
        notes=tuple(notes),
    )


def base_directory(path: Path, given: str | None, *, key: str) -> Path:
    """The base model of an adapter, fetched where the Hub has it. given: in place of what its config names.

    Errors: ConfigError.
    """
    field, base = "--base", given
    if base is None:
        field, base = f"{path / CONFIG}: base_model_name_or_path", base_named(path, key=key)
    found = Path(fetched(base, field))
    if given is None and found.is_dir() and is_other_base(path, found):
        raise ConfigError(
            f"{field} = {base}: has other weights than those that the adapters of {path} were trained beside "
            f"({path / BASE}). --base DIR names the base model, and --base {base} takes this one all the same"
        )
    if not found.is_dir():
        where = "it is relative to where you are; --base DIR names the base model"
        raise ConfigError(f"{field} = {base}: no such directory here; {where}")
    return found


def base_named(path: Path, *, key: str) -> str:
    """What adapter_config.json says of the base model. Errors: ConfigError."""
    base = read_adapter_config(path, key).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{key} = {path}: {CONFIG} has base_model_name_or_path = {base!r}, which must name the base model: give "
            "--base DIR"
        )
    return base


def _head(survey: Survey, adapter: AdapterFile | MegatronDirectory, said: Mapping[str, object], path: Path) -> Head:
    if VALUE_HEAD.hf[0] in adapter:
        return "score"
    if said.get("task_type") == TASKS["score"] and survey.spec.head != "score":
        raise CheckpointError(
            f"{path / CONFIG}: task_type = {TASKS['score']!r}, but neither the adapter nor the base model "
            f"{survey.spec.path} has {VALUE_HEAD.hf[0]}: name a base model with a value head"
        )
    return survey.spec.head


# ------------------------------------------------------------------------------------------------ an adapter alone


def to_peft(
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    processes: Processes = ALONE,
    console: Console | None = None,
) -> None:
    """Write the adapter in a run's checkpoint as a directory that PEFT and vLLM read.

    Collective over `processes`. Errors: CheckpointError, ConfigError; `target` is then as it was before.
    """
    check_target(target, source, overwrite=overwrite)
    if not is_adapter(source):
        raise CheckpointError(f"{source}: holds no adapter alone: a role of a run with actor.lora or critic.lora does")
    if not is_distributed(source):
        raise CheckpointError(f"{source}: is a directory of PEFT already; peft-to-hf merges it into the base model")
    base = read_spec(source, adapters=True)
    spec = replace(base, lora=lora_of_directory(source, base, "SRC"))
    files = MegatronDirectory(source, spec)
    names = adapter_names(spec, base.head)
    total = sum(num_bytes(files.tensors[name]) for name in names)
    with new_directory(target, num_bytes=total, processes=processes) as directory:
        if processes.first:
            write_adapter_weights(directory, {name: files.read(name, files.tensors[name].shape) for name in names})
            for file in (CONFIG, BASE):
                if (source / file).is_file():
                    (directory / file).write_bytes((source / file).read_bytes())
    say(console, f"{target}: {len(names)} tensors, {size_text(total)}")
    if (line := left_out_by_peft(spec, base.head)) is not None:
        say(console, f"{target}: {line}")
