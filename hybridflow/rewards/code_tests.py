"""The tests of a program as a row has them, read into cases: what follows the program, or what it reads and prints.

    cases("assert f(1) == 2", "tests")                                      one case of Python
    cases('{"inputs": ["1 2"], "outputs": ["3"]}', "tests")                 the JSON text of verl's code data
    cases([{"input": "1 2", "output": "3", "testtype": "stdin"}], "tests")  LiveCodeBench's

A JSON text run as Python would be an expression that harms no program: each would pass.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.python_tests import RULE, deciding

Case = tuple[str, str, str | None]  # what follows the program, what it reads, what it is to print
FORMS = (
    "tests are a text, a list of texts, or inputs and outputs, texts too: "
    '{"inputs": ["1 2"], "outputs": ["3"]}, also as a JSON text'
    f"; {RULE}"
)
CALLS = "tests that call a function are not read, write them as Python: assert"


def cases(given: Any, column: str, entry_point: str | None = None) -> list[Case]:
    """At least one. Of several texts those without a test, such as imports, stand before each of the later ones.

    entry_point: see `python_tests`. Errors: ValueError naming the column, for tests of another form or of nothing.
    """
    tree = _tree(given)
    if isinstance(tree, Mapping):
        return _pairs(tree, column)
    parts = [tree] if isinstance(tree, str) else tree
    if not isinstance(parts, Sequence) or not all(isinstance(one, str | Mapping) for one in parts):
        raise _of_another_form(given, column)
    found, before = list[Case](), ""
    for one in map(_tree, parts):
        if not isinstance(one, str):
            found += cases(one, column, entry_point)
        elif (decides := deciding(before + one, column, entry_point)) is None:
            before += f"{one}\n"
        else:
            found.append((decides, "", None))
    if not found:
        raise _of_another_form(given, column)
    return found


def _tree(given: Any) -> Any:
    """What a JSON text of an object, a list or a text says; anything else as it is."""
    if not isinstance(given, str) or given.lstrip()[:1] not in ("{", "[", '"'):
        return given
    try:
        tree = json.loads(given)
    except (ValueError, RecursionError):  # then it is Python
        return given
    return _tree(tree) if isinstance(tree, str) and tree != given else tree


def _pairs(tree: Mapping[str, Any], column: str) -> list[Case]:
    """What the program reads and is to print."""
    name, kind = tree.get("fn_name"), tree.get("testtype") or "stdin"
    if name or kind != "stdin":
        found = f"fn_name = {name!r}" if name else f"testtype = {kind!r}"
        raise ValueError(f"column {column!r}: {found}: {CALLS} {name or 'f'}(1) == 2")
    inputs, outputs = tree.get("inputs", tree.get("input")), tree.get("outputs", tree.get("output"))
    if isinstance(inputs, str) and isinstance(outputs, str):
        inputs, outputs = [inputs], [outputs]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise _of_another_form(tree, column)
    if len(inputs) != len(outputs):
        raise ValueError(
            f"column {column!r}: {len(inputs)} inputs and {len(outputs)} outputs: each input has one output"
        )
    texts = [(_text(asked), _text(wanted)) for asked, wanted in zip(inputs, outputs, strict=True)]
    if any(text is None for pair in texts for text in pair):
        raise _of_another_form(tree, column)
    return [("", (asked or "").replace("\r\n", "\n"), wanted or "") for asked, wanted in texts]


def _text(given: Any) -> str | None:
    """A list of texts is one of lines."""
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    return given if isinstance(given, str) else None


def _of_another_form(given: Any, column: str) -> ValueError:
    return ValueError(f"column {column!r}: {str(given)[:200]!r}: {FORMS}")
