"""What a refusal tells to set, read from the message as a person reads it."""

import re
from collections.abc import Iterator

from hybridflow.config.key_list import entries

VALUE = r"\[[^\]]*\]|[^\s,;=]+"
SETTING = rf"[a-z_0-9]+(?:\.[A-Za-z_0-9]+)*=(?:{VALUE})"
# `a=1`, `a=1 b=2` for both together, `a=1, 2 or 4` for one of these
SETTINGS = re.compile(
    rf"(?<![\w.])({SETTING}(?: {SETTING})*)((?:, (?!or )(?:{VALUE})(?![^\s]*=))* or (?!more)(?:{VALUE})(?![^\s]*=))?"
)


def told(message: str) -> Iterator[tuple[str, ...]]:
    """Overrides, `key=value`, that go together; one tuple for each way that the message names."""
    for found in SETTINGS.finditer(message):
        settings = tuple(setting.rstrip(".:") for setting in found[1].split())
        yield settings
        for value in re.split(r", | or ", found[2] or "")[1:]:
            yield (f"{settings[0].partition('=')[0]}={value.rstrip('.:')}",)


def keys_of(settings: tuple[str, ...]) -> list[str]:
    """The keys, each of which the schema has. Errors: ConfigError."""
    keys = [setting.partition("=")[0] for setting in settings]
    for key in keys:
        assert entries(
            re.sub(r"^data\.heldout\.\w+", "data.heldout.NAME", re.sub(r"^data\.columns\..*", "data.columns", key))
        )
    return keys


def refusal_of(line: str) -> str:
    """What a line refuses, without its numbers and without what to set."""
    return re.sub(r"[0-9][0-9.,-]*", "N", line.partition(". Set ")[0])
