"""JSON of files that may hold anything. Without torch, which takes a second to load."""

import json
from typing import Any

from hybridflow.errors import CheckpointError
from hybridflow.formats.git_lfs import NOT_FETCHED, is_pointer


def parse_json(text: bytes, wrong: str) -> dict[str, Any]:
    """The JSON object in a file that may hold anything; errors start with `wrong`."""
    if is_pointer(text):
        raise CheckpointError(f"{wrong}it {NOT_FETCHED}")
    try:
        tree = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{wrong}{error}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{wrong}it holds {type(tree).__name__}, not an object")
    return tree


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise ValueError(f"the key {key!r} stands twice")
        key.encode()  # half a character cannot be printed
        tree[key] = value
    return tree
