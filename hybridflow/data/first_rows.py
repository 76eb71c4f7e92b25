"""Whether rows are conversations, which a chat template renders, or texts alone: by the first of them."""

from collections.abc import Mapping
from typing import Any

from hybridflow.config.data import parse_sources
from hybridflow.data.fields import rename_fields
from hybridflow.data.messages import is_conversation
from hybridflow.data.sources import open_files
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
