"""Are two checkpoints, of whatever kind, the same model? Key sets, shapes, dtypes and every bit of every tensor."""

from dataclasses import fields
from pathlib import Path

from rich.console import Console

from hybridflow.architecture.spec import ModelSpec
from hybridflow.convert.compare import first_difference
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import ByteProgress, say, size_text
from hybridflow.convert.survey import Survey, kind_of, open_survey
from hybridflow.errors import CheckpointError
from hybridflow.formats.huggingface_files import num_bytes
from hybridflow.formats.safetensors_files import TensorInfo

MAX_SHOWN = 20


def verify(one: Path, other: Path, *, processes: Processes = ALONE, console: Console | None = None) -> list[str]:
    """The differences, a line each; none where the two are the same. Collective over `processes`.

    Errors: CheckpointError where a directory cannot be read.
    """
    surveys = first, second = open_survey(one), open_survey(other)
    differences = [*_of_specs(*surveys), *_of_keys(*surveys)]
    a, b = first.weights, second.weights
    common = [name for name in a if a[name] == b.get(name)]
    differences += [
        f"{name}: {_shown(a[name])} and {_shown(b[name])}" for name in a if name in b and a[name] != b[name]
    ]
    total = sum(num_bytes(a[name]) for name in common)
    own = common[processes.rank :: processes.count]
    own_bytes = sum(num_bytes(a[name]) for name in own)
    unequal = []
    with ByteProgress("verify", total, own=own_bytes, console=console) as progress:
        for name in own:
            places = (first.files, name), (second.files, name)
            if found := first_difference(*places, a[name], compared=progress.advance):
                unequal.append(f"{name}: {found}")
        differences += processes.gather(unequal)
    _report(surveys, len(common), total, differences, console)
    return differences


def huggingface_first(one: Path, other: Path) -> tuple[Path, Path]:
    """The two, that which transformers can load first. Errors: CheckpointError where it can load neither."""
    if kind_of(one) == kind_of(other) == "megatron":
        raise CheckpointError(f"{one}: --forward needs a HuggingFace directory, as {other} is none either")
    return (one, other) if kind_of(one) == "HuggingFace" else (other, one)


def _of_specs(one: Survey, other: Survey) -> list[str]:
    """What config.json says of the model; not what it says of generation, or of the software that wrote it."""
    compared = [
        field for field in fields(ModelSpec) if field.name not in ("path", "num_prediction_layers", "block_fp8")
    ]
    return [
        f"config.json: {field.name} is {a!r} and {b!r}"
        for field in compared
        if (a := getattr(one.spec, field.name)) != (b := getattr(other.spec, field.name))
    ]


def _of_keys(one: Survey, other: Survey) -> list[str]:
    lines = [problem for survey in (one, other) for problem in survey.problems]
    for survey, twin in ((one, other), (other, one)):
        lines += [f"{name}: only in {survey.files.path}" for name in survey.weights if name not in twin.files]
        lines += [f"{name}: missing in both" for name in survey.missing if survey is one and name in twin.missing]
    return lines


def _shown(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {info.shape}"


def _report(
    surveys: tuple[Survey, Survey], num_common: int, total: int, differences: list[str], console: Console | None
) -> None:
    for survey in surveys:
        path = survey.files.path
        say(console, f"{path}: {kind_of(path)}, {len(survey.weights)} tensors")
        for line in survey.dropped_lines():
            say(console, f"  not compared: {line}")
    say(console, f"compared: {num_common} tensors, {size_text(total)}, bit by bit")
    for line in differences[:MAX_SHOWN]:
        say(console, f"  {line}")
    if len(differences) > MAX_SHOWN:
        say(console, f"  ... and {len(differences) - MAX_SHOWN} more")
    say(console, f"different: {len(differences)} differences" if differences else "equal")
