"""The section `data` of a config: which files, which of their columns, and what becomes of rows that do not fit."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from hybridflow.config.section import PathText, Section


class SourceConfig(Section):
    """One of several files."""

    path: PathText  # a file or a directory of files
    weight: PositiveFloat | None = None  # rows of it among all, in proportion; given for all sources or for none


def _sources(given: Any) -> Any:
    """A list of paths, or of sections with path and weight. Errors: ValueError that names the place in the list."""
    if not isinstance(given, list | tuple):
        if not isinstance(given, str):
            raise ValueError(f"{given!r} is neither a path nor a list of files, such as [{{path: a.jsonl, weight: 2}}]")
        return given
    sources = tuple(_source(item, i) for i, item in enumerate(given))
    if not sources:
        raise ValueError("[] names no file")
    without = [i for i, source in enumerate(sources) if source.weight is None]
    if 0 < len(without) < len(sources):
        raise ValueError(f"{without[0]}.weight: is missing, others are given: give all files a weight, or none")
    return sources


def _source(given: Any, i: int) -> SourceConfig:
    if isinstance(given, SourceConfig):
        return given
    if isinstance(given, str):
        return SourceConfig(path=given)
    if not isinstance(given, dict):
        raise ValueError(f"{i} = {given!r}: is neither a path nor a section with path and weight")
    unknown = [key for key in given if key not in SourceConfig.model_fields]
    if unknown:
        raise ValueError(f"{i}.{unknown[0]}: unknown key; known are {', '.join(SourceConfig.model_fields)}")
    path, weight = given.get("path"), given.get("weight")
    if not isinstance(path, str):
        raise ValueError(f"{i}.path = {path!r}: a path is required")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9):
        raise ValueError(f"{i}.weight = {weight!r}: a weight is a number above 0")
    return SourceConfig(path=path, weight=weight)


DataFiles = str | tuple[SourceConfig, ...]
DataFilesKey = Annotated[PathText | tuple[SourceConfig, ...], BeforeValidator(_sources)]


class FilesConfig(Section):
    """Which files are read, JSON, Parquet or Arrow, and how; common to prompts and to examples of fixed data."""

    train: DataFilesKey  # a file, a directory of files, or several, [{path: a.jsonl, weight: 2}, ...]
    heldout: DataFilesKey | None = None
    columns: dict[str, str] = {}  # our name: the files' one, such as {prompt: question, answer: reward.truth}
    bad_rows: Literal["drop", "error"] = "error"  # rows that cannot be used, for other reasons than their length
    # files of up to so many MiB together are checked as a whole at the start; rows of larger ones when their turn comes
    checked_mib: NonNegativeFloat = 256.0
    shuffle: bool = True
    chat_template_kwargs: dict[str, JsonValue] = {}  # what the chat template is given beside messages and tools
    message_format: Literal["openai", "sharegpt"] = "openai"  # messages have role and content, or from and value

    @property
    def checked_bytes(self) -> int:
        return int(self.checked_mib * (1 << 20))

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if isinstance(self.heldout, tuple) and any(source.weight is not None for source in self.heldout):
            raise ValueError("heldout: weights say how often a row is trained on, held-out rows are all used once")
        for name, path in self.columns.items():
            if not name or not path or not all(path.split(".")):
                raise ValueError(f"columns: {name!r}: {path!r} names no column, such as prompt: question")
        return self


class DataConfig(FilesConfig):
    """Where prompts come from. Every other column of a row travels to the reward functions."""

    prompt_key: str = "prompt"
    chat_template: bool = False  # the prompt column holds a list of messages
    prompts_per_iteration: PositiveInt
    max_prompt_length: PositiveInt  # tokens
    overlong_prompts: Literal["drop", "error"] = "error"

    @model_validator(mode="after")
    def _check_prompt_key(self) -> Self:
        if "prompt" in self.columns and self.prompt_key != "prompt":
            raise ValueError(
                f"prompt_key = {self.prompt_key} and columns.prompt = {self.columns['prompt']} both name the prompt's "
                f"column: leave one out"
            )
        return self
