"""reference/cli.md: every command with its arguments, from the parsers."""

import argparse
from collections.abc import Iterator

from docs.generator.command_lines import parser_of, subcommands, usage_of
from docs.generator.markdown import HEAD, code, plain, table
from hybridflow.cli.main import COMMANDS

INTRODUCTION = """\
# Commands

`hybridflow COMMAND --help` prints the same. `hybridflow CONFIG.yaml` is `hybridflow train CONFIG.yaml`.
[Exit statuses](exit-statuses.md) has a page of its own, and so have the [keys of configs](config.md).

"""


def page() -> str:
    names = [[f"[`{name}`](#{name})", f"{what[0].upper()}{what[1:]}."] for name, (_, what) in COMMANDS.items()]
    return HEAD + INTRODUCTION + table(("Command", "What it does"), names) + "".join(map(_section, COMMANDS))


def _section(name: str) -> str:
    parser = parser_of(name)
    parts = [f"\n## {name}\n\n", *_of(parser)]
    for child, each in subcommands(parser):
        parts += [f"\n### {name} {child}\n\n", *_of(each)]
    return "".join(parts)


def _of(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"```text\n{usage_of(parser)}\n```\n"
    if parser.description:
        yield f"\n```text\n{_without_double(parser.description)}\n```\n"
    rows = [row for action in parser._actions if (row := _row(action))]
    if rows:
        yield "\n" + table(("Argument", "Meaning"), rows)


def _without_double(text: str) -> str:
    """A description without empty lines at its ends."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).strip()


def _row(action: argparse.Action) -> tuple[str, str] | None:
    """None for what --help does not show, and for --help."""
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return None
    value = _value(action)
    names = ", ".join(code(f"{name} {value}".rstrip()) for name in action.option_strings) or code(value)
    text = (action.help or "") % {**vars(action), "prog": "hybridflow"}
    return names, plain(text[:1].upper() + text[1:])


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None and action.metavar is None:
        return " | ".join(map(str, action.choices))
    shown = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    text = shown if isinstance(shown, str) else " ".join(shown)
    return f"{text} ..." if action.nargs in ("*", "+") else text
