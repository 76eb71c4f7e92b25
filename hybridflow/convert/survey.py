"""Is every tensor of a checkpoint accounted for?

The table of weights says which tensors the model of config.json has. Each must be there once, in the right shape. Any
other tensor must be known to be no weight. Otherwise a conversion stops before it writes anything.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.tables import LM_HEAD
from hybridflow.architecture.weight import Shape
from hybridflow.architecture.weight_files import MegatronDirectory, open_checkpoint
from hybridflow.architecture.weights import embedding, model_weights
from hybridflow.architecture.wrapper import VISION
from hybridflow.convert.compare import CheckpointFiles, first_difference
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import is_distributed
from hybridflow.formats.gguf_files import gguf_hint
from hybridflow.formats.safetensors_files import TensorInfo, check_readable

MAX_LISTED = 20

# Buffers that older versions of transformers saved although config.json says all that they hold.
DERIVED = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached", "*.masked_bias")


@dataclass(frozen=True)
class Survey:
    """What a checkpoint holds, by HuggingFace names, against what config.json asks for."""

    files: CheckpointFiles
    spec: ModelSpec
    weights: dict[str, TensorInfo]  # of the model, in the table's order: those that are there as they must be
    dropped: dict[str, str]  # what else is there, and why nothing is lost without it
    missing: dict[str, Shape]
    problems: tuple[str, ...]  # whatever else is wrong

    def check(self, *, may_lack: Collection[str] = ()) -> None:
        """Errors: CheckpointError that lists what is missing, unknown, or of a wrong shape or dtype."""
        missing = [
            f"{self.files.path}: no tensor {name}, which config.json asks for with shape {shape}"
            for name, shape in self.missing.items()
            if name not in may_lack
        ]
        lines = [*missing, *self.problems]
        if lines:
            more = [f"... and {len(lines) - MAX_LISTED} more like these"] if len(lines) > MAX_LISTED else []
            raise CheckpointError("\n".join([*lines[:MAX_LISTED], *more]))

    def dropped_lines(self) -> list[str]:
        """`NAME (32 tensors): why`, one line a kind of tensor."""
        at = (*VISION, *filter(None, [self.spec.traits.prediction.at]))
        kinds = Counter(
            (next((f"{each}*" for each in at if name.startswith(each)), fold(name)), why)
            for name, why in self.dropped.items()
        )
        return [f"{name}{f' ({count} tensors)' if count > 1 else ''}: {why}" for (name, why), count in kinds.items()]


def fold(name: str) -> str:
    """The numbers of layers and experts become *."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def open_survey(path: Path) -> Survey:
    """Of either kind of directory. Errors: CheckpointError where it cannot be read at all."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory{gguf_hint(path)}")
    spec = read_spec(path)
    return survey(open_checkpoint(path, spec), spec)


def kind_of(path: Path) -> str:
    return "megatron" if is_distributed(path) else "HuggingFace"


def survey(files: CheckpointFiles, spec: ModelSpec) -> Survey:
    _check_num_layers(files, spec)
    wanted = {
        name: shape
        for weight in model_weights(spec, spec.head)
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    }
    problems: list[str] = []
    weights, dropped = {}, {}
    for name, shape in wanted.items():
        with _collect_problem(problems):
            if name in files:
                check_readable(files.file_of(name), name, files.tensors[name], shape)
                weights[name] = files.tensors[name]
    for name in files.tensors:
        with _collect_problem(problems):
            if name not in wanted:
                dropped[name] = _why_not_needed(files, spec, weights, name)
    unknown = files.unknown if isinstance(files, MegatronDirectory) else ()
    problems += [f"{files.path}: {key} is no weight of the model" for key in unknown]
    missing = {name: shape for name, shape in wanted.items() if name not in files}
    return Survey(files, spec, weights, dropped, missing, problems=tuple(problems))


def _check_num_layers(files: CheckpointFiles, spec: ModelSpec) -> None:
    """A damaged config.json must not have us list a thousand million layers."""
    if spec.num_layers > len(files.tensors):
        raise CheckpointError(
            f"{spec.path / 'config.json'}: num_hidden_layers = {spec.num_layers}, but the files of {files.path} hold "
            f"only {len(files.tensors)} tensors"
        )


@contextmanager
def _collect_problem(problems: list[str]) -> Iterator[None]:
    """Go on after an error: a user mends all of them at once."""
    try:
        yield
    except CheckpointError as error:
        problems.append(str(error))


def _why_not_needed(files: CheckpointFiles, spec: ModelSpec, weights: dict[str, TensorInfo], name: str) -> str:
    """Why a tensor that is not in the table may be left out. Errors: CheckpointError where it may not."""
    if any(fnmatchcase(name, pattern) for pattern in DERIVED):
        return "follows from config.json"
    behind = range(spec.num_layers, spec.num_layers + spec.num_prediction_layers)
    at = [spec.traits.prediction.at] if spec.traits.prediction.at else []
    if name.startswith((*at, *(f"model.layers.{layer}." for layer in behind))):
        return f"of a layer that guesses further tokens ({spec.traits.prediction.key}), which is not trained"
    if spec.wrapped and name.startswith(VISION):
        return "of what reads images, which is left out"
    if name != LM_HEAD.hf[0] or not spec.tied:
        raise CheckpointError(f"{files.file_of(name)}: {name} is no weight of the model that config.json describes")
    original = embedding(spec).hf[0]
    says = f"{files.file_of(name)}: config.json ties {name} to {original} (tie_word_embeddings), but"
    if original not in weights:
        raise CheckpointError(f"{says} only the former is there and as it must be")
    if files.tensors[name] != weights[original]:
        raise CheckpointError(f"{says} shapes or dtypes are {files.tensors[name]} and {weights[original]}")
    difference = first_difference((files, original), (files, name), weights[original])
    if difference is not None:
        raise CheckpointError(f"{says} {difference}")
    return f"a copy of {original}, to which config.json ties it"
