"""Rows of reasoning-gym's tasks as JSON lines in the user's cache, made by a process where they are missing.

    rows_of_task(task, "default", "data.train.reasoning_gym.0")     # ~/.cache/hybridflow/reasoning_gym/NAME-X.jsonl

A row has the columns prompt (the question as a text, behind the system prompt), messages (the same as a conversation),
question, answer, entry (the task's own entry as a Python literal: JSON has no tuples, which two scorers compare) and
task (name, config, execute), which the scorer takes.

The trainer does not import the package. The process has a fixed seed of hashes, on which the rows of some tasks depend.
"""

import ast
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.reasoning_gym import RELEASE, SYSTEM_PROMPTS, TaskConfig
from hybridflow.data.files import locked
from hybridflow.errors import DataError, RewardError
from hybridflow.rewards.probe import asked, serve

PACKAGE = "reasoning-gym"
FORM = 1  # of the rows; another form has other files


def rows_of_task(task: TaskConfig, system_prompt: str | None, key: str) -> Path:
    """The file. key: of the task in the config. Errors: DataError that names key and rule."""
    check_package(f"{key}.name = {task.name}")
    made_from = {**task.model_dump(exclude={"weight"}), "system_prompt": system_prompt}
    digest = hashlib.blake2b(json.dumps([RELEASE, FORM, made_from], sort_keys=True).encode(), digest_size=8)
    directory = Path.home() / ".cache" / "hybridflow" / "reasoning_gym"
    file = directory / f"{task.name}-{digest.hexdigest()}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f"{file.stem}.lock"):
            if not file.exists():
                _make(made_from, file, key)
    except OSError as error:
        raise DataError(f"{key}: the rows of {task.name} cannot be written to {directory}: {error.strerror}") from error
    return file


def check_package(where: str) -> None:
    """Errors: DataError where the package is missing, or of another release than the one that was looked at."""
    hint = "pip install 'hybridflow[gym]'"
    try:
        release = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"{where}: the package {PACKAGE} makes and scores its rows: {hint}") from error
    if release != RELEASE:
        raise DataError(
            f"{where}: {PACKAGE} {release} is installed, but {RELEASE} is needed: which scorers execute answers is "
            f"known of that release alone. {hint}"
        )


def _make(made_from: Mapping[str, Any], file: Path, key: str) -> None:
    """Errors: DataError, OSError."""
    handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
    os.close(handle)
    try:
        wanted = [made_from["name"], {**made_from, "file": part}]
        [answer] = asked("hybridflow.data.gym_files", [wanted], "reasoning-gym task", seconds=None)
        if answer["problem"]:
            raise DataError(f"{key}.{answer['problem']}")
        Path(part).replace(file)
    except RewardError as error:
        raise DataError(f"{key}: {error}") from error
    finally:
        Path(part).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ the process


def main(parent: int) -> None:
    """The process. See `rewards.probe`."""
    serve(parent, _written)


def _written(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with open(given["file"], "w", encoding="utf-8") as file:
            for row in _rows(name, given):
                file.write(json.dumps(row) + "\n")
    except DataError as error:
        return {"problem": str(error)}
    return {"problem": ""}


def _rows(name: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Errors: DataError that begins with the key below the task's."""
    import reasoning_gym.utils as utils

    entries = _entries(name, given)
    system = given["system_prompt"]
    text = utils.SYSTEM_PROMPTS[system] if system in SYSTEM_PROMPTS else system
    task = {key: given[key] for key in ("name", "config", "execute")}
    for i in range(given["size"]):
        try:
            entry = entries[i]
        except Exception as error:  # the package's: a config that no row can be made from, among others
            raise DataError(f"seed = {given['seed']}: row {i} cannot be made: {_error_text(error)}") from error
        yield row_of(entry, task, text)


def row_of(entry: Mapping[str, Any], task: Mapping[str, Any], system: str | None) -> dict[str, Any]:
    """A row of the file. Errors: DataError where the entry is no Python literal."""
    literal = repr(_plain(entry))
    try:
        same = ast.literal_eval(literal) == entry
    except ValueError:
        same = False
    if not same:
        raise DataError(f"name = {task['name']}: an entry of the task is no Python literal: {literal[:200]}")
    question = str(entry["question"])
    before = [] if system is None else [{"role": "system", "content": system.strip()}]
    return {
        "prompt": "\n\n".join([*(message["content"] for message in before), question]),
        "messages": [*before, {"role": "user", "content": question}],
        "question": question,
        "answer": entry["answer"],
        "entry": literal,
        "task": dict(task),
    }


def _plain(value: Any) -> Any:
    """Of numpy's numbers and texts those of Python."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


def _entries(name: str, given: Mapping[str, Any]) -> Any:
    """The task's data set. Errors: DataError where there is no such task, or the task does not take the config."""
    import dataclasses
    import difflib

    import reasoning_gym.factory as factory

    if name not in factory.DATASETS:
        close = difflib.get_close_matches(name, factory.DATASETS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "see reasoning_gym.factory.DATASETS"
        raise DataError(f"name = {name}: is no task of {PACKAGE} {RELEASE}; {hint}")
    _, config_class = factory.DATASETS[name]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")]
    unknown = [key for key in given["config"] if key not in known]
    if unknown:
        raise DataError(f"config.{unknown[0]}: is no key of {name}; known are {', '.join(known)}")
    try:
        return factory.create_dataset(name, seed=given["seed"], size=given["size"], **given["config"])
    except Exception as error:  # the package's own checks are assertions and more
        raise DataError(f"config = {given['config']}: {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
