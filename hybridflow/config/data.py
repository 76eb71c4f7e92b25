"""The section `data` of a config: which files, which of their columns, and what becomes of rows that do not fit."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from hybridflow.config.environment import EnvironmentKey
from hybridflow.config.reasoning_gym import KEY, ReasoningGymConfig, TaskConfig, check_apart, parse_tasks
from hybridflow.config.sampling import LEAST_TEMPERATURE
from hybridflow.config.section import MOST_BYTES, PathText, Section, check_length
from hybridflow.errors import Mendable


class SourceConfig(Section):
    """One of several files."""

    path: PathText
    """A file, or a directory of files."""
    weight: PositiveFloat | None = None
    """The share of this source among all rows, in proportion to the others. null: the number of rows."""

    @property
    def title(self) -> str:
        return self.path


class HubSourceConfig(Section):
    """A split of a data set on the HuggingFace Hub, such as {hub: openai/gsm8k, name: main, split: train}."""

    hub: str
    """The data set's name on the Hub."""
    name: str | None = None
    """The data set's configuration, which the Hub calls a subset. null: the default one."""
    split: str
    """The split, such as train or test."""
    revision: str | None = None
    """A branch, tag or commit of the data set. null: the newest."""
    weight: PositiveFloat | None = None
    """The share of this source among all rows, in proportion to the others. null: the number of rows."""

    @property
    def title(self) -> str:
        return ":".join(part for part in (self.hub, self.name, self.split) if part)


DATA_SET = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
SPLIT = re.compile(r"\w+(\.\w+)*")  # as `datasets` names them; slices and sums of splits are not read
Source = SourceConfig | HubSourceConfig


def parse_prompts(given: Any) -> Any:
    """As `parse_sources`, or tasks of reasoning-gym. Errors: ValueError that names the place."""
    if isinstance(given, dict) and KEY in given:
        return parse_tasks(given)
    return given if isinstance(given, ReasoningGymConfig) else parse_sources(given)


def parse_sources(given: Any) -> Any:
    """A path, a data set of the Hub, or a list of either. Errors: ValueError that names the place in the list."""
    if isinstance(given, str):
        return check_length(given, MOST_BYTES)  # not in the union, which would tell of every kind
    if isinstance(given, ReasoningGymConfig) or (isinstance(given, dict) and KEY in given):
        raise ValueError(f"{KEY}: its rows are prompts alone. Algorithms that generate responses train on them")
    if isinstance(given, dict):
        return (_source(given, ""),)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{given!r} is neither a path nor a list of files, such as [{{path: a.jsonl, weight: 2}}]")
    sources = tuple(_source(item, str(i)) for i, item in enumerate(given))
    if not sources:
        raise ValueError("[] names no file")
    without = [i for i, source in enumerate(sources) if source.weight is None]
    if 0 < len(without) < len(sources):
        raise ValueError(
            f"{without[0]}.weight: is missing, but other files have a weight. Give all files a weight, or none"
        )
    return sources


def _source(given: Any, place: str) -> Source:
    """place: in the list, empty for what stands alone."""
    if isinstance(given, SourceConfig | HubSourceConfig):
        return given
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict):
        raise ValueError(f"{place} = {given!r}: is neither a path nor a section with path and weight")
    prefix = f"{place}." if place else ""
    kind = HubSourceConfig if "hub" in given else SourceConfig
    unknown = [key for key in given if key not in kind.model_fields]
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]}: unknown key; known are {', '.join(kind.model_fields)}")
    weight = given.get("weight")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9):
        raise ValueError(f"{prefix}weight = {weight!r}: a weight is a number above 0")
    if kind is SourceConfig:
        if not isinstance(given.get("path"), str):
            raise ValueError(f"{prefix}path = {given.get('path')!r}: a path is required")
        check_length(given["path"], MOST_BYTES)
        return SourceConfig(**given)
    hub, split = given["hub"], given.get("split")
    if not isinstance(hub, str) or not DATA_SET.fullmatch(hub):
        raise ValueError(f"{prefix}hub = {hub!r}: is no name of a data set, such as openai/gsm8k")
    if not isinstance(split, str) or not SPLIT.fullmatch(split):
        raise ValueError(f"{prefix}split = {split!r}: the name of one split is required, such as train")
    for key in ("name", "revision"):
        if not isinstance(given.get(key), str | None):
            raise ValueError(f"{prefix}{key} = {given[key]!r}: is no text")
    return HubSourceConfig(**given)


DataFiles = str | ReasoningGymConfig | tuple[Source, ...]
DataFilesKey = Annotated[
    PathText | ReasoningGymConfig | tuple[Source, ...],
    BeforeValidator(parse_sources, json_schema_input_type=str | HubSourceConfig | list[str | Source]),
]
PromptFilesKey = Annotated[
    PathText | ReasoningGymConfig | tuple[Source, ...],
    BeforeValidator(
        parse_prompts, json_schema_input_type=str | HubSourceConfig | ReasoningGymConfig | list[str | Source]
    ),
]


def sources_of(files: DataFiles) -> tuple[Source | TaskConfig, ...]:
    """Each file or directory, data set of the Hub, or task."""
    if isinstance(files, str):
        return (SourceConfig(path=files),)
    return files.reasoning_gym if isinstance(files, ReasoningGymConfig) else files


def is_tasks(files: Any) -> bool:
    """Whether files of prompts, parsed or not, are tasks of reasoning-gym."""
    return isinstance(files, ReasoningGymConfig) or (isinstance(files, dict) and KEY in files)


class HeldoutSetConfig(Section):
    """One of several held-out sets."""

    files: PromptFilesKey
    """Rows of the set, in the same forms as data.train, but without weights."""
    samples: PositiveInt = 1
    """Responses to each prompt. With several, metrics have pass@k and majority@k."""
    temperature: NonNegativeFloat = 0.0
    """The temperature of softmax; the other keys of sampling stay. 0 takes the likeliest token always."""
    interval: PositiveInt | None = None
    """Iterations between evaluations on the set, a multiple of metrics.eval_interval. null: metrics.eval_interval."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.files, tuple):
            check_weightless(self.files, "files")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            why = f"temperature = {self.temperature}: is 0 or at least {LEAST_TEMPERATURE}"
            raise Mendable(why, {"temperature": [0, LEAST_TEMPERATURE]})
        return self


SET_NAME = re.compile(r"[A-Za-z0-9_-]+")
HeldoutFiles = DataFiles | dict[str, HeldoutSetConfig]


def is_sets(heldout: Any) -> bool:
    """Whether `data.heldout`, parsed or not, is sets by name. No other form has a mapping as a value."""
    return isinstance(heldout, dict) and any(isinstance(value, dict | HeldoutSetConfig) for value in heldout.values())


def parse_heldout(given: Any) -> Any:
    """As `parse_prompts`, or sets by name. Errors: ValueError that names the set and the key."""
    if not is_sets(given):
        return parse_prompts(given)
    return {name: _parsed_set(name, value) for name, value in given.items()}


def _parsed_set(name: Any, given: Any) -> HeldoutSetConfig:
    if isinstance(given, HeldoutSetConfig):
        return given
    if not SET_NAME.fullmatch(str(name)):
        raise ValueError(f"{name!r}: the name of a set has letters, digits, _ and - alone")
    if not isinstance(given, dict):
        raise ValueError(f"{name} = {given!r}: sets by name are sections, such as {name}: {{files: {name}.jsonl}}")
    try:
        return HeldoutSetConfig(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        raised = problem.get("ctx", {}).get("error")
        if isinstance(raised, Mendable):
            raise raised.within(name) from None
        raise ValueError(f"{name}.{_set_problem(problem)}") from None


def _set_problem(problem: Any) -> str:
    """The key of the set, the value and the rule. Unions of kinds of files stay out of the place."""
    key = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "missing":
        return f"{key}: is required"
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; known are {', '.join(HeldoutSetConfig.model_fields)}"
    if problem["type"] == "value_error":
        return f"{key}{': ' * bool(key)}{problem['ctx']['error']}"
    return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def check_weightless(sources: tuple[Source, ...], key: str) -> None:
    """Errors: ValueError where a file of held-out rows has a weight."""
    if any(source.weight is not None for source in sources):
        raise ValueError(f"{key}: weights say how often a row is trained on, held-out rows are all used once")


def heldout_key(name: str) -> str:
    """The config's key for the files of a held-out set; "" is the name of the only one."""
    return f"data.heldout.{name}.files" if name else "data.heldout"


HeldoutKey = Annotated[
    PathText | ReasoningGymConfig | tuple[Source, ...] | dict[str, HeldoutSetConfig],
    BeforeValidator(
        parse_heldout,
        json_schema_input_type=str
        | HubSourceConfig
        | ReasoningGymConfig
        | list[str | Source]
        | dict[str, HeldoutSetConfig],
    ),
]


class FilesConfig(Section):
    """Which files are read, JSON, Parquet or Arrow, and how; common to prompts and to examples of fixed data."""

    train: DataFilesKey
    """Rows to train on: a file, a directory, a data set of the Hub, or a list such as [{path: a.jsonl, weight: 2}].
    A data set of the Hub is {hub: openai/gsm8k, name: main, split: train}. Formats are JSON, JSON lines, Parquet and
    Arrow. Tasks of reasoning-gym, for algorithms that generate, are {reasoning_gym: [{name: chain_sum, size: 2000,
    seed: 1}]}."""
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

    @property
    def files_by_key(self) -> Mapping[str, DataFiles]:
        """All files that are read, by the config's key."""
        return {"data.train": self.train, **({} if self.heldout is None else {"data.heldout": self.heldout})}

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if isinstance(self.heldout, tuple):
            check_weightless(self.heldout, "heldout")
        for name, path in self.columns.items():
            if not name or not path or not all(path.split(".")):
                raise ValueError(f"columns: {name!r}: {path!r} names no column, such as prompt: question")
        return self


class DataConfig(FilesConfig):
    """Where prompts come from. Every other column of a row travels to the reward functions."""

    train: PromptFilesKey
    """Rows to train on: a file, a directory, a data set of the Hub, or a list such as [{path: a.jsonl, weight: 2}].
    A data set of the Hub is {hub: openai/gsm8k, name: main, split: train}. Formats are JSON, JSON lines, Parquet and
    Arrow. Tasks of reasoning-gym, for algorithms that generate, are {reasoning_gym: [{name: chain_sum, size: 2000,
    seed: 1}]}."""
    heldout: HeldoutKey | None = None  # type: ignore[assignment]  # more forms than rows of fixed data have
    """Rows for evaluations, in the same forms as train, but without weights. null: no evaluation. Several sets by name
    are {math: {files: math.jsonl, samples: 16, temperature: 1.0}, code: {files: code.jsonl}}."""
    prompt_key: str = "prompt"
    """The column that holds the prompt. Of tasks of reasoning-gym with chat_template: messages."""
    chat_template: bool | None = None
    """Whether the tokenizer's chat template renders prompts: lists of messages, and texts as the user's message. null:
    true where the first row of train has messages, or with an environment; else false."""
    prompts_per_iteration: PositiveInt
    """Prompts of an iteration, over all ranks."""
    max_prompt_length: PositiveInt
    """Tokens of the longest prompt."""
    overlong_prompts: Literal["drop", "error"] = "error"
    """What happens to a prompt longer than max_prompt_length: the row is dropped, or the run ends with an error."""
    environment: EnvironmentKey | None = None
    """A class that begins each row's conversation, answers the model and gives the reward. null: a response is one
    turn."""

    @property
    def heldout_sets(self) -> Mapping[str, HeldoutSetConfig]:
        """By name; "" is the name of the only one."""
        if self.heldout is None or isinstance(self.heldout, dict):
            return self.heldout or {}
        return {"": HeldoutSetConfig(files=self.heldout)}

    @property
    def files_by_key(self) -> Mapping[str, DataFiles]:
        heldout = {heldout_key(name): each.files for name, each in self.heldout_sets.items()}
        return {"data.train": self.train, **heldout}

    @property
    def passes_over(self) -> bool:
        """Whether rows that do not start are left out when their turn comes."""
        environment = self.environment
        return environment is not None and not environment.is_agent and environment.on_error == "fail_row"

    @model_validator(mode="before")
    @classmethod
    def _messages_of_tasks(cls, given: Any) -> Any:
        """Rows of tasks have the question as a text and as messages; a chat template takes the latter."""
        if not isinstance(given, dict) or not is_tasks(given.get("train")):
            return given
        asked = given.get("chat_template")
        if asked or (asked is None and given.get("environment") is not None):
            return {"prompt_key": "messages", **given}
        return given

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        for name, each in self.heldout_sets.items():
            key, files = heldout_key(name).removeprefix("data."), each.files
            if isinstance(self.train, ReasoningGymConfig) and isinstance(files, ReasoningGymConfig):
                check_apart(self.train, files, key)
            elif is_tasks(self.train) != is_tasks(files):
                raise ValueError(
                    f"{key}: {KEY} is in one of train and {key} alone, but one scorer has to fit both: give both "
                    "tasks, or both files"
                )
        return self
