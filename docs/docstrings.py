"""How the page of the Python API shows docstrings: lines such as `seed: of the run` become a list.

mkdocs.yml names it as an extension of griffe, which reads the code for mkdocstrings.
"""

import re
from typing import Any

import griffe

NAMED = re.compile(r"(?P<names>Errors|[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.*)")


def with_lists(text: str) -> str:
    """Each line that begins with names of arguments as an item; lines that go on with an item stay within it."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        found = NAMED.fullmatch(line)
        if found:
            lines += [*([] if within else [""]), f"- {_names(found['names'])}: {found['text']}"]
            within = True
        elif not line.strip():
            lines.append(line)
            within = False
        else:
            lines.append(f"  {line}" if within and not line.startswith(" ") else line)
    return "\n".join(lines)


def _names(names: str) -> str:
    return names if names == "Errors" else ", ".join(f"`{name}`" for name in names.split(", "))


class ArgumentLists(griffe.Extension):
    def on_object(self, *, obj: Any, **named: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
