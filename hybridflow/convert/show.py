"""What a model directory holds: architecture, parameters, files, what maps to what, and what is wrong with it."""

import json
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.architecture.parts import whole_shape
from hybridflow.architecture.weight import Shape
from hybridflow.architecture.weights import model_weights, stored_at
from hybridflow.convert.progress import say, size_text
from hybridflow.convert.survey import Survey, fold, kind_of, open_survey
from hybridflow.formats.safetensors_files import TensorInfo

SUFFIXES = (".safetensors", ".distcp")
MAX_SHOWN = 20


def show(path: Path, console: Console) -> bool:
    """Print it; whether the directory is complete and holds nothing unknown.

    Errors: CheckpointError where it cannot be read at all.
    """
    survey = open_survey(path)
    architecture = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    say(console, f"{path}: {architecture} in {_format(path)}")
    say(console, "")
    for table in (_model_table(survey), _file_table(path)):
        console.print(table)
        say(console, "")
    say(
        console, "Weights in torch_dist checkpoints, and below each those of HuggingFace that it holds; * is any number"
    )
    for line in _weight_lines(survey):
        say(console, line)
    say(console, "")
    for line in survey.dropped_lines():
        say(console, f"not needed: {line}")
    missing = [f"missing: {name} {shape}" for name, shape in survey.missing.items()]
    _list(console, missing)
    _list(console, [f"wrong: {problem}" for problem in survey.problems])
    complete = not missing and not survey.problems
    say(console, "complete: every tensor is known, none is missing" if complete else "not complete")
    return complete


def _format(path: Path) -> str:
    return "megatron-core's torch_dist" if kind_of(path) == "megatron" else "HuggingFace safetensors"


def _model_table(survey: Survey) -> Table:
    spec = survey.spec
    table = _table("", "", title="Model", num_left=2)
    rows = {
        "family": spec.family,
        "head": {"lm": "language model", "score": "value (one score)"}[spec.head] + (", tied" if spec.tied else ""),
        "parameters": f"{sum(prod(info.shape) for info in survey.weights.values()):,}",
        "dtype": _dtypes(survey.weights.values()),
        "layers": str(spec.num_layers),
        "hidden size": str(spec.hidden_size),
        "embeddings": f"of {spec.projected_size}, projected in and out" if spec.projected_size else "",
        "norms": "after the residual sums" if spec.post_norm else "",
        "heads": f"{spec.num_heads}, each of {spec.head_dim} dimensions; {spec.num_kv_heads} of keys and values",
        "experts": f"{spec.num_experts}, {spec.experts_per_token} a token" if spec.num_experts else "",
        "vocabulary": f"{spec.vocab_size:,}",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    table.show_header = False
    return table


def _dtypes(infos: Iterable[TensorInfo]) -> str:
    counts = Counter[str]()
    for info in infos:
        counts[str(info.dtype).removeprefix("torch.")] += prod(info.shape)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{dtype} ({count:,})" for dtype, count in counts.most_common())


def _file_table(path: Path) -> Table:
    table = _table("file", "size", title="Files", num_left=1)
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        table.add_row(Text(file.name), size_text(size))
    if len(files) > 1:
        table.add_section()
        table.add_row(f"{len(files)} files", size_text(sum(sizes)))
    return table


def _weight_lines(survey: Survey) -> list[str]:
    """Each tensor of a torch_dist checkpoint, and below it those of HuggingFace that it holds.

    The tensors of all layers and experts are one kind.
    """
    spec = survey.spec
    kinds: dict[str, list[tuple[str, Shape]]] = {}
    for weight in model_weights(spec, spec.head):
        key, layer = stored_at(weight)
        whole = whole_shape(weight, spec)
        rows = [(key, whole if layer is None else (spec.num_layers, *whole))]
        parts = {fold(name): shape for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)}
        kinds.setdefault(key, rows + [(f"  {name}", shape) for name, shape in parts.items()])
    width = max(len(name) for rows in kinds.values() for name, _ in rows)
    return [f"{name:{width}}  {' x '.join(map(str, shape))}" for rows in kinds.values() for name, shape in rows]


def _table(*columns: str, title: str, num_left: int) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_left else "right", overflow="fold")
    return table


def _list(console: Console, lines: list[str]) -> None:
    for line in lines[:MAX_SHOWN]:
        say(console, line)
    if len(lines) > MAX_SHOWN:
        say(console, f"... and {len(lines) - MAX_SHOWN} more like these")
