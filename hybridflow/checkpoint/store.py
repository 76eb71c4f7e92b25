"""The checkpoints of a run on the disk: complete and durable, or not there.

    checkpoints/latest                   the name of the newest
    checkpoints/step_000012/             after iteration 12
        manifest.json                    size and CRC-32 of every other file; written last
        state.json                       what decides the next step beside the weights, and what the run was
        config.yaml                      resolved
        actor/ critic/                   torch_dist checkpoints (`sharded`) with config.json and tokenizer
    checkpoints/.step_000013.partial/    being written, or left by a run that ended there

One rename names a directory after all files of the directory are on the disk; then `latest` is replaced. A crash
between any two steps leaves the checkpoint before, or the new one.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hybridflow.errors import CheckpointError
from hybridflow.formats.directories import FileSum, Read, file_sum, replace_directory, sync
from hybridflow.formats.json_text import parse_json

CHECKPOINTS, LATEST, MANIFEST, STATE, CONFIG = "checkpoints", "latest", "manifest.json", "state.json", "config.yaml"
FORMAT = STATE_FORMAT = 1  # of manifest.json and of state.json
STEP = re.compile(r"step_(\d{6,})")
LEFTOVER = re.compile(r"\.step_\d{6,}\.(partial|old)")


@dataclass(frozen=True)
class Manifest:
    iteration: int
    files: Mapping[str, FileSum]  # by path below the checkpoint

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def step_name(iteration: int) -> str:
    return f"step_{iteration:06d}"


def steps(root: Path) -> list[int]:
    """The iterations of which there are checkpoints, ascending; intact or not."""
    found = [STEP.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def begin(root: Path, iteration: int, roles: Iterable[str]) -> Path:
    """An empty directory to write a checkpoint into. What was left of others that never became one is removed."""
    if not root.is_dir():
        root.mkdir(parents=True)
        sync(root.parent)
    for path in root.iterdir():
        if LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)
    partial = root / f".{step_name(iteration)}.partial"
    for role in roles:
        (partial / role).mkdir(parents=True)
    return partial


def publish(root: Path, iteration: int, partial: Path, sums: Mapping[str, FileSum]) -> Path:
    """Rename the complete directory of `begin` to step_NNNNNN, the checkpoint of `iteration`, and point `latest` at it.

    sums: of files, by path below `partial`, that are on the disk already; the others are read and synced here.
    Errors: CheckpointError where a file differs from the sum that the writer, perhaps another host, has reported.
    """
    lacking = damage(partial, sums, thorough=False)
    if lacking:
        raise CheckpointError("; ".join(lacking))
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        if str(path.relative_to(partial)) not in sums:
            sync(path)
    names = [str(path.relative_to(partial)) for path in files]
    known = {name: sums[name] if name in sums else file_sum(partial / name) for name in names}
    _write_manifest(partial, iteration, known)
    for directory in sorted({path.parent for path in files} | {partial}):
        sync(directory)
    target = root / step_name(iteration)
    replace_directory(partial, target)
    sync(root)
    point_to(root, target.name)
    return target


def point_to(root: Path, name: str) -> None:
    """`latest` is replaced as a whole."""
    temporary = root / f".{LATEST}"
    temporary.write_text(name + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, root / LATEST)
    sync(root)


def remove(root: Path, iteration: int) -> None:
    """Rename the checkpoint first: one that is half removed has no name of a checkpoint any more."""
    old = root / f".{step_name(iteration)}.old"
    (root / step_name(iteration)).rename(old)
    shutil.rmtree(old)


def superfluous(
    metrics: Mapping[int, Mapping[str, float]],
    *,
    keep_last: int,
    keep_every: int | None,
    keep_best: int,
    best: str,
    best_is: Literal["highest", "lowest"] = "highest",
) -> list[int]:
    """The iterations of the checkpoints that no rule keeps, ascending: the caller removes them. Pure.

    metrics: of the iterations of all checkpoints. Those without the metric `best` are worse than any with it; of equals
    the later one is kept.
    """
    ascending, sign = sorted(metrics), 1 if best_is == "highest" else -1
    ranked = sorted((i for i in ascending if best in metrics[i]), key=lambda i: (sign * metrics[i][best], i))
    kept = {*ascending[-keep_last:], *(ranked[-keep_best:] if keep_best else ())}
    if keep_every:
        kept |= {i for i in ascending if i % keep_every == 0}
    return [i for i in ascending if i not in kept]


# ------------------------------------------------------------------------------------------------- reading


def read_manifest(step: Path) -> Manifest:
    """Errors: CheckpointError where it is missing or damaged."""
    file = step / MANIFEST
    tree = _read_json(file)
    written = tree.pop("crc32", None)
    if written != zlib.crc32(_canonical(tree)):
        raise CheckpointError(f"{file}: is damaged: its own checksum is not {written}")
    if tree["format"] != FORMAT:
        raise CheckpointError(f"{file}: format = {tree['format']} is not supported, must be {FORMAT}")
    return Manifest(tree["iteration"], {name: FileSum(**fields) for name, fields in tree["files"].items()})


def read_state(step: Path) -> dict[str, Any]:
    """Errors: CheckpointError where it is missing, damaged, or of another format."""
    tree, file = _read_json(step / STATE), step / STATE
    if tree.get("format") != STATE_FORMAT:
        raise CheckpointError(f"{file}: format = {tree.get('format')} is not supported, must be {STATE_FORMAT}")
    return tree


def damage(
    step: Path, files: Mapping[str, FileSum], *, thorough: bool = True, read: Read = lambda num_bytes: None
) -> list[str]:
    """What is wrong with these files, a line each; thorough: every byte is read, else the sizes are compared.

    read: called with the number of bytes of each block that was read.
    """
    lines = []
    for name, expected in files.items():
        path = step / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                lines.append(f"{path}: has {size} bytes, was written with {expected.size}")
            elif thorough and (found := file_sum(path, read)) != expected:
                crcs = f"its CRC-32 is {found.crc32:08x}, {MANIFEST} says {expected.crc32:08x}"
                lines.append(f"{path}: is damaged: {crcs}")
        except OSError as error:
            lines.append(f"{path}: cannot be read: {error.strerror}")
    return lines


def _write_manifest(directory: Path, iteration: int, files: Mapping[str, FileSum]) -> None:
    tree = {"format": FORMAT, "iteration": iteration, "files": {name: asdict(sums) for name, sums in files.items()}}
    file = directory / MANIFEST
    file.write_text(json.dumps(tree | {"crc32": zlib.crc32(_canonical(tree))}, indent=1) + "\n", encoding="utf-8")
    sync(file)


def _canonical(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree, sort_keys=True).encode()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return parse_json(file.read_bytes(), f"{file}: is damaged: ")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
