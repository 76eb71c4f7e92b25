"""The fields of a row under the names that they have here: `data.columns`, and what is there where one is missing.

Parquet and Arrow give all objects of a column the same keys, with null for those that an object was written without. A
chat template would render such a null: what enters a template has the keys that it was written with.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridflow.data.rows import Row, RowError
from hybridflow.errors import remedy

TOOLS, KWARGS = "tools", "chat_template_kwargs"  # columns that enter the chat template
RENDERED = (TOOLS, KWARGS)


def rename_fields(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the fields that `columns` maps (ours: the file's, dots lead into nested ones) under our names.

    A field that went by another name is there under the new one alone; what holds nested ones stays. verl's
    reward_model.ground_truth is also there as ground_truth. Errors: RowError that lists what there is.
    """
    fields = dict(row.fields)
    for path in columns.values():
        fields.pop(path, None)
    for name, path in columns.items():
        value = _found(row, path, f"data.columns.{name}")
        if name in fields and path.partition(".")[0] != name:
            raise RowError(
                f"{row.where}: data.columns.{name} = {path}: the row has a field {name} of its own"
                f"{remedy({f'data.columns.{name}': [name]})}",
                "two of a name",
            )
        fields[name] = value
    verl = fields.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        fields.setdefault("ground_truth", verl["ground_truth"])
    if row.fills_nulls:
        fields = {name: _as_written(value) if _is_rendered(name, value) else value for name, value in fields.items()}
    return replace(row, fields=fields)


def _is_rendered(name: str, value: Any) -> bool:
    """Whether a chat template gets it: messages, tools and arguments. Reward functions get all else as it is read."""
    messages = isinstance(value, list) and any(isinstance(one, dict) and {"role", "from"} & one.keys() for one in value)
    return messages or name in RENDERED


def _as_written(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_written(inner) for key, inner in value.items() if inner is not None}
    return [_as_written(inner) for inner in value] if isinstance(value, list) else value


def _found(row: Row, path: str, key: str) -> Any:
    if path in row.fields:
        return row.fields[path]
    value: Any = row.fields
    for i, part in enumerate(path.split(".")):
        if not isinstance(value, dict) or part not in value:
            above = ".".join(path.split(".")[:i])
            raise RowError(f"{row.where}: has no field {path!r} ({key}); {_names_there(value, above)}", f"no {path}")
        value = value[part]
    return value


def _names_there(value: Any, above: str) -> str:
    if not isinstance(value, dict):
        return f"{above} is a {type(value).__name__}"
    return f"{f'the fields of {above}' if above else 'its fields'} are {', '.join(value) or 'none'}"
