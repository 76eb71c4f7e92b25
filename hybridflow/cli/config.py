"""Config files: starters, keys with their meaning, a file with every default, and the differences of two files.

    hybridflow config init                             names of starter configs
    hybridflow config init grpo > mine.yaml            a whole config; CHANGE marks the values to replace
    hybridflow config show mine.yaml [key=value ...]   every key with the value, base and defaults included
    hybridflow config keys [reward.models]             keys with type, default and description
    hybridflow config schema                           JSON schema of config files, for editors
    hybridflow config diff a.yaml b.yaml               keys that differ, base and defaults included

The command reads no model and starts no run. The exit status is 1 if a config or a key is wrong.
"""

import argparse
import os
import sys

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.config.files import as_yaml
from hybridflow.config.json_schema import schema_text
from hybridflow.config.key_list import entries
from hybridflow.config.resolved import differences, resolved_tree
from hybridflow.config.starters import starter_text, starters, title
from hybridflow.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        print(_output(options), end="", flush=True)
    except UserError as error:
        print_error(error, "hybridflow config")
        return 1
    except BrokenPipeError:  # `| head` has read enough; Python would print the error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("hybridflow.cli.config", __doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    init = commands.add_parser("init", help="print a starter config; without NAME, the names")
    init.add_argument("name", nargs="?", metavar="NAME", help="such as ppo, grpo, sft or dpo")
    show = commands.add_parser("show", help="print a config with base and all defaults")
    show.add_argument("config", metavar="CONFIG", help="a YAML file")
    show.add_argument("overrides", nargs="*", metavar="key=value", help="replaces a value of the config")
    keys = commands.add_parser("keys", help="list keys with type, default and description")
    keys.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="a key or a section, such as reward.models"
    )
    commands.add_parser("schema", help="print the JSON schema of config files")
    diff = commands.add_parser("diff", help="print the keys that differ between two configs")
    diff.add_argument("first", metavar="A", help="a YAML file")
    diff.add_argument("second", metavar="B", help="another YAML file")
    return parser


def _output(options: argparse.Namespace) -> str:
    """What a subcommand prints. Errors: UserError."""
    match options.command:
        case "init":
            return _starter(options.name)
        case "show":
            tree, notes = resolved_tree(options.config, options.overrides)
            for note in notes:
                print(f"hybridflow config: {note}", file=sys.stderr)
            return as_yaml(tree)
        case "keys":
            return "".join(f"{entry.text()}\n" for entry in entries(options.prefix))
        case "schema":
            return schema_text()
    lines = differences(options.first, options.second)
    return "".join(f"{line}\n" for line in lines) or "no key differs\n"


def _starter(name: str | None) -> str:
    if name is not None:
        return starter_text(name)
    known = starters()
    width = max(map(len, known))
    return "".join(f"{each:{width}}  {title(path)}\n" for each, path in known.items())


if __name__ == "__main__":
    sys.exit(main())
