"""The parsers of `hybridflow COMMAND`, without running a command, and command lines that they take.

A command makes its parser and parses in one function, so the parser is caught where it would begin to parse.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stderr
from functools import cache
from io import StringIO
from typing import NoReturn
from unittest.mock import patch

from hybridflow.cli.main import COMMANDS, _is_config

USAGE = "usage: "
WIDTH = "100"  # of usage texts, whatever terminal there is


class _Caught(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


@cache
def parser_of(command: str) -> argparse.ArgumentParser:
    def caught(parser: argparse.ArgumentParser, *arguments: object, **named: object) -> NoReturn:
        raise _Caught(parser)

    with ExitStack() as stack:
        for method in ("parse_known_args", "parse_known_intermixed_args"):
            stack.enter_context(patch.object(argparse.ArgumentParser, method, caught))
        stack.enter_context(patch.object(sys, "argv", [f"hybridflow {command}"]))
        try:
            importlib.import_module(COMMANDS[command][0]).main([])
        except _Caught as found:
            return found.parser
    raise AssertionError(f"hybridflow {command} has parsed nothing")


def subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def usage_of(parser: argparse.ArgumentParser) -> str:
    with patch.dict(os.environ, {"COLUMNS": WIDTH}):
        first, *rest = parser.format_usage().rstrip().splitlines()
    return "\n".join([first.removeprefix(USAGE), *(line.removeprefix(" " * len(USAGE)) for line in rest)])


def why_not(words: Sequence[str]) -> str:
    """Why `hybridflow WORDS` is no command line; "" where it is one. Nothing runs."""
    if not words or words[0] in ("-h", "--help", "--version"):
        return ""
    first, *rest = words
    if first not in COMMANDS:
        if not _is_config(first, rest):
            return f"{first}: no command"
        first, rest = "train", list(words)
    said = StringIO()
    parser = parser_of(first)
    try:
        with redirect_stderr(said), patch("sys.stdout", StringIO()):
            _parse(parser, rest[: rest.index("--")] if "--" in rest else rest)
    except SystemExit as end:
        return "" if not end.code else said.getvalue().strip().splitlines()[-1]
    return ""


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    if next(subcommands(parser), None) is None:
        parser.parse_intermixed_args(words)
    else:
        parser.parse_args(words)
