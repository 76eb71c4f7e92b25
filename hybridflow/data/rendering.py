"""How a run makes text of rows: a line for a person, and a record beside the weights that a run writes.

    rendering = example_rendering(config.data, "pairs", files, tokenizer)
    rendering.line                          # columns chosen, rejected have conversations, rendered by the chat ...
    earlier_lines(config, rendering.record) # where a model of the run comes from rows that were rendered otherwise

The first rows of each source are looked at. A record has what all of these rows have in common, and nothing else.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridflow.config import RunConfig, TrainedRoleConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.fixed_data import FixedDataSection
from hybridflow.config.roles import RewardModelConfig
from hybridflow.data.example_texts import Kind, num_alike, rendered_columns
from hybridflow.data.fields import TOOLS, rename_fields
from hybridflow.data.messages import is_conversation, is_token_ids, read_messages
from hybridflow.data.rows import Row, attempt, shown
from hybridflow.data.sources import Files
from hybridflow.data.templates import ChatTemplate, TemplateOptions, template_file
from hybridflow.formats.json_text import parse_json

FILE = "rendering.json"
NUM_ROWS = 16  # of a source
MOST = 80  # characters of a value
AS_THEY_ARE = "prompts are texts as they are; data.chat_template: true makes each the user's message"
ROWS, TEMPLATE, ARGUMENTS, SYSTEM = "rows", "chat_template", "chat_template_kwargs", "system_prompt"  # of a record
CONVERSATIONS, TEXTS, TOKEN_IDS = "conversations", "texts", "token ids"


@dataclass(frozen=True)
class Rendering:
    """line: for a person; none of a model without chat template that generates. record: for the runs after this one."""

    line: str | None
    record: Mapping[str, Any]

    def lines(self, config: RunConfig) -> list[str]:
        """Those of the start of a run."""
        return [*([] if self.line is None else [self.line]), *earlier_lines(config, self.record)]


def prompt_rendering(
    data: DataConfig, files: Files, tokenizer: PreTrainedTokenizerBase, *, by_template: bool
) -> Rendering:
    """Of the prompts in `files`. by_template: the chat template renders them, or what an environment begins with."""
    looked_at = _looked_at(files, data.columns, lambda fields: [data.prompt_key])
    template = ChatTemplate(tokenizer, TemplateOptions(data.chat_template_kwargs, data.message_format))
    record = _in_common(_record_of(row, template, renders=by_template) for row in looked_at)
    if not by_template:
        return Rendering(None if tokenizer.chat_template is None else AS_THEY_ARE, record)
    if data.environment is not None:  # whose class or agent has the messages
        record = {ROWS: CONVERSATIONS, TEMPLATE: _source(tokenizer), ARGUMENTS: data.chat_template_kwargs}
    return Rendering(f"prompts are {_by_template(record, template)}", record)


def example_rendering(
    data: FixedDataSection, kind: Kind, files: Files, tokenizer: PreTrainedTokenizerBase
) -> Rendering:
    """Of the rows of fixed data in `files`."""
    template = ChatTemplate(tokenizer, TemplateOptions(data.chat_template_kwargs, data.message_format))
    looked_at = _looked_at(files, data.columns, lambda fields: rendered_columns(fields, kind))
    if not looked_at:
        return Rendering(None, {})
    record = _in_common(_record_of(row, template, renders=row.kind == CONVERSATIONS) for row in looked_at)
    first = looked_at[0]
    names = [f"{name} ({data.columns[name]})" if name in data.columns else name for name in first.columns]
    has = f"columns {', '.join(names)} have" if len(names) > 1 else f"column {names[0]} has"
    how = f", {_by_template(record, template)}" if first.kind == CONVERSATIONS else " as they are"
    if first.kind == TEXTS and tokenizer.chat_template is not None:
        how += ": the chat template renders lists of messages alone"
    other = next((f"; {row.where} has {row.kind}" for row in looked_at if row.kind != first.kind), "")
    return Rendering(f"{has} {first.kind}{how}{other}", record)


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Beside weights; no file where nothing is known."""
    if record:
        (directory / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def earlier_lines(config: RunConfig, record: Mapping[str, Any]) -> list[str]:
    """A line for each directory that the run's models come from, and whose record says something else."""
    lines = []
    for path, key in _directories(config).items():
        if not (path / FILE).is_file():
            continue
        then = parse_json((path / FILE).read_bytes(), f"{path / FILE}: is not JSON, remove the file: ")
        found = [
            f"{name}: {_shown_apart(then[name], record[name])}"
            for name in (ROWS, TEMPLATE, ARGUMENTS, SYSTEM)
            if name in then and name in record and then[name] != record[name]
        ]
        if found:
            lines.append(
                f"warning: {key} = {path}: the run that wrote this model rendered rows otherwise. {'; '.join(found)}"
            )
    return lines


# ------------------------------------------------------------------------------------------------ the first rows


@dataclass(frozen=True)
class _LookedAt:
    where: str
    fields: Mapping[str, Any]
    columns: Sequence[str]
    kind: str


def _looked_at(
    files: Files, columns: Mapping[str, str], rendered: Callable[[Mapping[str, Any]], Sequence[str]]
) -> list[_LookedAt]:
    """Those of the first rows that have something to render. rendered: the columns of a row that are."""
    starts = [0, *files.ends[:-1]]
    firsts = [range(start, min(start + NUM_ROWS, end)) for start, end in zip(starts, files.ends, strict=True)]
    found = []
    for row in files.rows_at([number for numbers in firsts for number in numbers]):
        named = attempt(lambda row: rename_fields(row, columns), row)
        if row.problem is not None or not isinstance(named, Row):
            continue
        names = [name for name in rendered(named.fields) if name in named.fields]
        kind = _kind([named.fields[name] for name in names])
        if kind is not None:
            found.append(_LookedAt(row.where, named.fields, names, kind))
    return found


def _kind(values: Sequence[Any]) -> str | None:
    if any(map(is_conversation, values)):
        return CONVERSATIONS
    if values and all(map(is_token_ids, values)):
        return TOKEN_IDS
    return TEXTS if values and all(isinstance(value, str) for value in values) else None


def _record_of(row: _LookedAt, template: ChatTemplate, *, renders: bool) -> dict[str, Any] | None:
    """The record of one row; None of a row that cannot be used. Nothing is known of what was rendered before."""
    values = [row.fields[name] for name in row.columns]
    if row.kind == TOKEN_IDS:
        return {}
    if not renders:
        special = filter(None, template.tokenizer.all_special_tokens)
        return {} if any(token in value for token in special for value in values) else {ROWS: TEXTS}
    begins = next(filter(is_conversation, values), None)  # None: a text, which is the user's message

    def record(row: _LookedAt) -> dict[str, Any]:
        messages = [] if begins is None else read_messages(begins, row.where, template.options.form)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        arguments = template.arguments(row.fields, row.where)
        arguments.pop(TOOLS, None)
        arguments = json.loads(json.dumps(arguments, default=str))  # as the record has them
        return {ROWS: CONVERSATIONS, TEMPLATE: _source(template.tokenizer), ARGUMENTS: arguments, SYSTEM: system}

    found = attempt(record, row)
    return found if isinstance(found, dict) else None


def _in_common(records: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    known = [record for record in records if record is not None]
    return {
        name: value
        for name, value in (known[0] if known else {}).items()
        if all(name in one and one[name] == value for one in known)
    }


# ------------------------------------------------------------------------------------------------ words


def _by_template(record: Mapping[str, Any], template: ChatTemplate) -> str:
    arguments = record.get(ARGUMENTS, template.options.kwargs)
    given = f" with {json.dumps(arguments)}" if arguments else ""
    return f"rendered by the chat template of {template_file(template.tokenizer)}{given}"


def _source(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The text of the template; of several the JSON."""
    template = tokenizer.chat_template
    return template if isinstance(template, str | None) else json.dumps(template, sort_keys=True)


def _shown_apart(then: Any, now: Any) -> str:
    """Both; long texts from where they part."""
    start = 0
    if isinstance(then, str) and isinstance(now, str) and max(len(then), len(now)) > MOST:
        start = max(num_alike(then, now) - MOST // 2, 0)
        then, now = then[start:], now[start:]
    at = f", from character {start} on" if start else ""
    return f"{shown(then, MOST)} then, {shown(now, MOST)} now{at}"


def _directories(config: RunConfig) -> dict[Path, str]:
    """Where models come from, each once, with the key; not those that get texts of their own."""
    found: dict[Path, str] = {}
    for name, role in config.roles().items():
        if isinstance(role, RewardModelConfig) and role.reencode:
            continue
        found.setdefault(Path(role.model), f"{name}.model")
        adapter = role.lora.adapter_path if isinstance(role, TrainedRoleConfig) and role.lora is not None else None
        if adapter is not None:
            found.setdefault(Path(adapter), f"{name}.lora.adapter_path")
    return found
