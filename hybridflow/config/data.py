"""The section `data` of a config: which files, which of their columns, and what becomes of rows that do not fit."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, JsonValue, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from hybridflow.config.section import PathText, Section


class SourceConfig(Section):
    """One of several files."""

    path: PathText
    """A file, or a directory of files."""
    weight: PositiveFloat | None = None
    """The share of this source among all rows, in proportion to the others. null: by its number of rows."""


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
DataFilesKey = Annotated[
    PathText | tuple[SourceConfig, ...],
    BeforeValidator(_sources, json_schema_input_type=str | list[str | SourceConfig]),
]


class FilesConfig(Section):
    """Which files are read, JSON, Parquet or Arrow, and how; common to prompts and to examples of fixed data."""

    train: DataFilesKey
    """Rows to train on: a file, a directory, or a list such as [{path: a.jsonl, weight: 2}]. Formats are JSON, JSON
    lines, Parquet and Arrow."""
    heldout: DataFilesKey | None = None
    """Rows for evaluations, in the same forms as train, but without weights. null: no evaluation."""
    columns: dict[str, str] = {}
    """Columns by another name in the files, such as {prompt: question}. Dots lead into nested columns."""
    bad_rows: Literal["drop", "error"] = "error"
    """What happens to a row that cannot be used: the row is dropped, or the run ends with an error."""
    checked_mib: NonNegativeFloat = 256.0
    """MiB of files that are checked as a whole at the start. Rows of larger files are checked on use."""
    shuffle: bool = True
    """Whether rows are drawn in random order. false: in the order of the files."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    message_format: Literal["openai", "sharegpt"] = "openai"
    """The keys of a message: openai has role and content, sharegpt has from and value."""

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
    """The column that holds the prompt."""
    chat_template: bool = False
    """Whether the prompt is a list of messages, rendered by the tokenizer's chat template."""
    prompts_per_iteration: PositiveInt
    """Prompts of an iteration, over all ranks."""
    max_prompt_length: PositiveInt
    """Tokens of the longest prompt."""
    overlong_prompts: Literal["drop", "error"] = "error"
    """What happens to a prompt longer than max_prompt_length: the row is dropped, or the run ends with an error."""

    @model_validator(mode="after")
    def _check_prompt_key(self) -> Self:
        if "prompt" in self.columns and self.prompt_key != "prompt":
            raise ValueError(
                f"prompt_key = {self.prompt_key} and columns.prompt = {self.columns['prompt']} both name the prompt's "
                f"column: leave one out"
            )
        return self
