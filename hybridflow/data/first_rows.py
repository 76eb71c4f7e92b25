"""Whether rows are conversations, which a chat template renders, or texts alone: by the first of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.config.data import DataConfig, parse_sources
from hybridflow.data.fields import rename_fields
from hybridflow.data.messages import is_conversation
from hybridflow.data.rows import Row, attempt
from hybridflow.data.sources import Files, open_files
from hybridflow.errors import DataError

NUM_ROWS = 16
FIELDS = ("messages", "prompt", "completion", "chosen")


def hold_conversations(train: Any, columns: Mapping[str, str], fields: Sequence[str] = FIELDS) -> bool | None:
    """Of rows as `data.train` names them in a config; None where the rows are not here, or have none of the fields."""
    try:
        rows = open_files(parse_sources(train), "data.train")
        named = [rename_fields(row, columns).fields for row in rows.rows_at(range(min(len(rows), NUM_ROWS)))]
    except (DataError, ValueError):
        return None
    values = [own[name] for own in named for name in fields if name in own]
    return any(map(is_conversation, values)) if values else None


def rendered_in_training(data: Mapping[str, Any]) -> bool | None:
    """Of the section `data` of a tree: whether prompts of training are rendered; None where the rows are not here."""
    given, train = data.get("chat_template"), data.get("train")
    if given is not None or data.get("environment") is not None:
        return given is not False
    if train is None:
        return None
    return hold_conversations(train, data.get("columns") or {}, (str(data.get("prompt_key", "prompt")),))


def renders(data: DataConfig, files: Files) -> bool:
    """Whether the chat template renders prompts: data.chat_template, or where that is null the first prompt's kind.

    files: those of data.train. Rows that have no prompt, or one of token ids, say nothing.
    """
    if data.chat_template is not None or data.environment is not None:
        return data.chat_template is not False
    rows = files.rows_at(range(min(len(files), NUM_ROWS)))
    named = [attempt(lambda row: rename_fields(row, data.columns), row) for row in rows if row.problem is None]
    prompts = [row.fields.get(data.prompt_key) for row in named if isinstance(row, Row)]
    told = (each for each in prompts if isinstance(each, str) or (each and is_conversation(each)))
    return is_conversation(next(told, ""))
