"""reference/exit-statuses.md: of `hybridflow.errors.ExitStatus`, with what stands below each member."""

import ast
import inspect

from docs.generator.markdown import HEAD, code, plain, table
from hybridflow.errors import ExitStatus

INTRODUCTION = """\
# Exit statuses

## Of a rank

A rank is one training process. `hybridflow train` ends with the status of the first rank that failed.

"""
OTHERS = """
A rank that a signal kills has no status of its own. A shell shows 128 + N for signal N, such as 137 for SIGKILL.

## Of `hybridflow launch`

The launcher ends with the status of the first rank that failed.

| Status | Meaning |
| --- | --- |
| 0 | All ranks have finished. |
| 1 | The launcher refused to start, or a rank ended with 1, or a host was lost. A message says which. |
| 70, 75, 76 | The status of a rank, as above. |
| 128 + N | Signal N killed a rank. |
| 130 | Ctrl-C ended the launcher before ranks had started. |

## Of other commands

| Status | Meaning |
| --- | --- |
| 0 | The command has done its work. |
| 1 | One message says what is wrong, or a check of `health`, `checkpoints` or `convert verify` has failed. |
| 2 | The command line is wrong. |
| 3 | `hybridflow plan`: the run does not fit the memory of a device. |

## Of torchrun

torchrun ends with 1 whatever status a failed rank has. The summary of torchrun shows the status of the rank.
"""


def page() -> str:
    said = _said()
    rows = [(str(int(each)), code(each.name), plain(said[each.name])) for each in ExitStatus]
    return HEAD + INTRODUCTION + table(("Status", "Name", "Meaning"), rows) + OTHERS


def _said() -> dict[str, str]:
    """The text below each member."""
    [found] = ast.parse(inspect.getsource(ExitStatus)).body
    assert isinstance(found, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for node in found.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                continue
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                texts[name] = " ".join(text.split())
    return texts
