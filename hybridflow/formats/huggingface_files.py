"""Write a HuggingFace directory: safetensors files tensor by tensor, their index, config.json and what lies beside."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.file_bytes import file_size, memory_of, opened, read_bytes, start_writing
from hybridflow.formats.json_text import parse_json
from hybridflow.formats.safetensors_files import INDEX, MAX_JSON_BYTES, NAMES, SINGLE, TensorInfo

COMPANIONS = (
    "*.json",
    "*.model",
    "*.model.v*",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
    "vocab.*",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TEMPLATES = "additional_chat_templates"  # a directory of them, as transformers writes where there are several
CODE = "*.py"
WRITTEN_HERE = (
    "config.json",
    "adapter_config.json",
    "metadata.json",
    "rendering.json",  # see `data.rendering`: the record of the run that wrote the source
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.safetensors",
    "*.distcp",
)


def num_bytes(info: TensorInfo) -> int:
    return prod(info.shape) * info.dtype.itemsize


def plan_files(tensors: Mapping[str, TensorInfo], max_file_bytes: int) -> dict[str, str]:
    """File of each tensor, filled in order. A tensor larger than `max_file_bytes` is alone in a file."""
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, info in tensors.items():
        size = num_bytes(info)
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i, group in enumerate(groups, 1) for name in group
    }


def files_of_plan(plan: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of each file of the plan, in order."""
    files: dict[str, dict[str, TensorInfo]] = {}
    for name, file in plan.items():
        files.setdefault(file, {})[name] = tensors[name]
    return files


def write_safetensors(
    file: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    *,
    written: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the tensors in their order: `read` gives a tensor, which is written and freed before the next `read`.

    What is written is on the disk when this returns. `written` gets the bytes of each tensor. Errors: CheckpointError
    where the file cannot be written.
    """
    with _writable(file) as out:
        _write_all(out.fileno(), memoryview(_header(tensors)))
        for name, info in tensors.items():
            tensor = read(name).detach().cpu().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == info, (
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, planned {info.dtype} {info.shape}"
            )
            start = out.tell()
            _write_all(out.fileno(), memory_of(tensor))
            start_writing(out.fileno(), start, out.tell())
            written(tensor.nbytes)
            del tensor
        os.fsync(out.fileno())


@contextmanager
def _writable(file: Path) -> Iterator[FileIO]:
    try:
        with file.open("wb", buffering=0) as out:
            yield out
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from error


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Length and JSON, filled with spaces so that the tensors start at a multiple of 8 bytes."""
    tree: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, info in tensors.items():
        end = position + num_bytes(info)
        tree[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += os.write(fd, buffer[done:])


def write_index(directory: Path, plan: Mapping[str, str], total_bytes: int) -> None:
    """model.safetensors.index.json; none where there is but model.safetensors."""
    if set(plan.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(plan)}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_config(
    source: Path,
    target: Path,
    changes: Mapping[str, Any],
    *,
    section: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> None:
    """TARGET/config.json: that of the directory `source` with `changes` and, where it is given, the weights' dtype.

    section: the part of the file that describes the model; None: all of it. A change to None takes the field out.

    auto_map, which names the code that `copy_companions` copies only where it is trusted, goes with that code.
    """
    file = source / "config.json"
    with opened(file) as fd:
        config = parse_json(read_bytes(fd, file, 0, min(file_size(fd), MAX_JSON_BYTES)), f"{file}: is not JSON: ")
    if section is not None:
        config = dict(config[section])
    if not trust_remote_code:
        config.pop("auto_map", None)
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name
        config["dtype"] = str(dtype).removeprefix("torch.")
    changed = {key: value for key, value in (config | dict(changes)).items() if key not in changes or value is not None}
    (target / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def add_end_tokens(directory: Path, ids: Sequence[int]) -> None:
    """Have generation_config.json name these end tokens, beside those that it names."""
    file = directory / "generation_config.json"
    tree = parse_json(file.read_bytes(), f"{file}: is not JSON: ") if file.exists() else {}
    named = tree.get("eos_token_id")
    known: list[int] = named if isinstance(named, list) else [] if named is None else [named]
    missing = [token_id for token_id in ids if token_id not in known]
    if missing:
        together = [*known, *missing]
        tree["eos_token_id"] = together[0] if len(together) == 1 else together
        file.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path, *, trust_remote_code: bool = False) -> list[str]:
    """Copy what makes weights a model to use: tokenizer, generation config, chat templates. The names copied.

    Neither weights nor what describes them are copied, nor code unless it is trusted.
    """
    patterns = (*COMPANIONS, CODE) if trust_remote_code else COMPANIONS
    copied = []
    for file in sorted([*source.iterdir(), *_templates(source)]):
        name = file.name
        wanted = any(fnmatch(name, pattern) for pattern in patterns) and not name.startswith(".")
        if file.is_file() and wanted and not any(fnmatch(name, pattern) for pattern in WRITTEN_HERE):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            try:
                shutil.copyfile(file, copy)
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be copied: {error}") from error
            copied.append(str(file.relative_to(source)))
    return copied


def _templates(source: Path) -> list[Path]:
    directory = source / TEMPLATES
    return list(directory.iterdir()) if directory.is_dir() else []
