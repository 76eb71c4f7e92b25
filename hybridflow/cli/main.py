"""The one command:

hybridflow COMMAND ...               every command has --help
hybridflow CONFIG.yaml ...           the same as `hybridflow train CONFIG.yaml ...`
"""

import difflib
import importlib
import os
import sys

from hybridflow import __version__
from hybridflow.parallel.proxies import keep_loopback_direct
from hybridflow.parallel.streams import speak_utf8

# name -> (module whose main(arguments) runs it, what it does); in the order in which a person needs them
COMMANDS = {
    "train": ("hybridflow.cli.train", "train a model as a config says"),
    "launch": ("hybridflow.launcher.main", "train on several hosts, by a hostfile and ssh"),
    "plan": ("hybridflow.cli.plan", "print the rank layout and the memory of each rank, without a run"),
    "config": ("hybridflow.cli.config", "print starter configs, keys with their descriptions, and resolved configs"),
    "health": ("hybridflow.cli.health", "check machines, links and the config's inputs before a run"),
    "data": ("hybridflow.cli.data", "show columns, token lengths and rows of a data file, as a run reads them"),
    "samples": ("hybridflow.cli.samples", "print responses of a run with their scores"),
    "report": ("hybridflow.cli.report", "write one HTML page of one run or several"),
    "chat": ("hybridflow.cli.chat", "talk to a model that a run has trained"),
    "eval": ("hybridflow.cli.evaluate", "evaluate a run or a model on held-out sets, without training"),
    "checkpoints": ("hybridflow.cli.checkpoints", "list and verify the checkpoints of a run"),
    "convert": ("hybridflow.cli.convert", "convert models between HuggingFace and megatron-core"),
    "env": ("hybridflow.cli.env", "print releases, machine and variables for a bug report"),
    "make-tiny": ("hybridflow.examples.tiny.make_tiny", "make the tiny models and data of the quickstarts"),
    "make-sums": ("hybridflow.examples.sums.make_sums", "make the rows and fetch the model of configs/smollm2_*.yaml"),
}
SUFFIXES = (".yaml", ".yml")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    speak_utf8()
    keep_loopback_direct()
    if not given:
        print(_overview(), file=sys.stderr)
        return 2
    first, *rest = given
    if first in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if first == "--version":
        print(__version__)
        return 0
    if first not in COMMANDS and _is_config(first, rest):
        first, rest = "train", given
    if first not in COMMANDS:
        print(f"hybridflow: error: {_unknown(first)}", file=sys.stderr)
        return 2
    sys.argv = [f"hybridflow {first}", *rest]  # what usage and errors call the command
    status: int = importlib.import_module(COMMANDS[first][0]).main(rest)
    return status


def _is_config(first: str, rest: list[str]) -> bool:
    """Whether a config stands where a command could: also behind options."""
    words = [first, *rest] if first.startswith("-") else [first]
    return any(word.endswith(SUFFIXES) or (os.path.exists(word) and not os.path.isdir(word)) for word in words)


def _unknown(first: str) -> str:
    close = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = f"did you mean hybridflow {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}"
    return f"{first}: is no command and no config file; {hint}"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"    {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    head = "usage: hybridflow COMMAND ...      hybridflow CONFIG.yaml [section.key=value ...]"
    return "\n".join([head, "", "commands:", *lines, "", "hybridflow COMMAND --help explains a command."])


if __name__ == "__main__":
    sys.exit(main())
