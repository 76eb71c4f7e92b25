"""Whether rows are conversations, which a chat template renders, or texts alone: by the first of them."""

from collections.abc import Mapping
from typing import Any

from hybridflow.config.data import DataConfig, parse_sources
from hybridflow.data.fields import rename_fields
from hybridflow.data.messages import is_conversation
from hybridflow.data.sources import Files, open_files
from hybridflow.errors import DataError

NUM_ROWS = 16
FIELDS = ("messages", "prompt", "completion", "chosen")


def hold_conversations(train: Any, columns: Mapping[str, str]) -> bool | None:
    """Of rows as `data.train` names them in a config; None where the rows are not here, or have none of the fields."""
    try:
        rows = open_files(parse_sources(train), "data.train")
        read = [rename_fields(row, columns).fields for row in rows.rows_at(range(min(len(rows), NUM_ROWS)))]
    except (DataError, ValueError):
        return None
    values = [fields[name] for fields in read for name in FIELDS if name in fields]
    return any(map(is_conversation, values)) if values else None


def renders(data: DataConfig, files: Files) -> bool:
    """Whether the chat template renders prompts: data.chat_template, or where that is null the first prompt's kind.

    files: those of data.train. Rows that have no prompt, or one of token ids, say nothing.
    """
    if data.chat_template is not None or data.environment is not None:
        return data.chat_template is not False
    rows = files.rows_at(range(min(len(files), NUM_ROWS)))
    fields = (rename_fields(row, data.columns).fields for row in rows if row.problem is None)
    prompts = (own.get(data.prompt_key) for own in fields)
    return next((is_conversation(each) for each in prompts if isinstance(each, str) or is_conversation(each)), False)
