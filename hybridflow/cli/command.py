"""What every command has in common: what it calls itself, and how it says what is wrong."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from hybridflow.parallel.streams import speak_utf8


def argument_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The first thing that a command makes. description: the docstring of the command's module."""
    speak_utf8()
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program(module), description=description, formatter_class=raw)


def program(module: str) -> str:
    """As a person typed it: `hybridflow plan`, `hybridflow-plan`, or else `python -m hybridflow.plan`."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("hybridflow") else f"python -m {module}"


def as_typed() -> str:
    """`hybridflow` where a shell finds this environment's script, else the path, else `python -m hybridflow`."""
    script = Path(sys.executable).with_name("hybridflow")
    found = shutil.which("hybridflow")
    if found is not None and Path(found).parent == script.parent:
        return "hybridflow"
    if not script.is_file():
        return "python -m hybridflow" if found is None else "hybridflow"
    near = script.is_relative_to(Path.cwd())
    return shlex.quote(os.path.relpath(script) if near else str(script))


def print_error(error: object, module: str) -> None:
    """On stderr, a line for each line of the error, behind the name of the command."""
    started = Path(sys.argv[0]).name
    prefix = started if started.startswith("hybridflow") else module
    print(error_text(error, prefix), file=sys.stderr, flush=True)


def error_text(error: object, prefix: str) -> str:
    """Each line behind `prefix: error:`, but those that begin with spaces: lines of code, to be copied. Then notes."""
    lines = str(error).splitlines() or [type(error).__name__]
    found = [line if line.startswith("    ") else f"{prefix}: error: {line}" for line in lines]
    return "\n".join([*found, *(f"{prefix}: {note}" for note in getattr(error, "__notes__", ()))])


def positive(text: str) -> int:
    """A number of ranks, devices or tokens, as an option has it."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1")
    return number
