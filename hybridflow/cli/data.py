"""Show a data file as a run reads it: columns, token lengths as a histogram, and three rows as tokens.

    hybridflow data data/train.parquet                                       # the columns alone
    hybridflow data data/train.parquet configs/mine.yaml [section.key=value ...]

FILE is a file of rows (JSON, Parquet or Arrow), or a directory of such files. A data set of the HuggingFace Hub is
'{hub: openai/gsm8k, name: main, split: train}'. Tasks of reasoning-gym are
'{reasoning_gym: [{name: chain_sum, size: 100, seed: 1}]}'. FILE takes the place of data.train in CONFIG. The other
keys of the section `data` say how the rows are read. The tokenizer is the trained model's own. [[ and ]] enclose the
tokens that are trained on. For a run that generates, the command shows the prompts. The exit status is 1 if the run
would not begin.
"""

import json
from collections.abc import Iterator

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.config import read_tree, read_value
from hybridflow.config.auto import with_neutral
from hybridflow.config.data import parse_prompts
from hybridflow.config.hub import fetch_models, use_variables
from hybridflow.config.kinds import config_class
from hybridflow.errors import ConfigError, UserError
from hybridflow.user_code import search_beside


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.data", __doc__)
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a data file, a directory of data files, {hub: ..., split: ...}, or {reasoning_gym: [...]}",
    )
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="the YAML file of a run that reads FILE")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replaces a value of the config")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        for line in _lines(options.file, options.config, options.overrides):
            print(line)
    except UserError as error:
        print_error(error, "hybridflow.data")
        return 1
    return 0


def _lines(file: str, config: str | None, overrides: list[str]) -> Iterator[str]:
    named = read_value(file, "FILE") if file.startswith("{") else file
    try:
        files = parse_prompts(named)
    except ValueError as error:
        raise ConfigError(f"FILE: {error}") from error
    # torch loads for seconds: a wrong argument fails before
    from hybridflow.data.sources import fetch, open_files
    from hybridflow.data.view import columns, data_lines

    given = None if config is None else read_tree(config, [*overrides, f"data.train={json.dumps(named)}"])
    if given is not None:
        use_variables(given)
    fetch(files, "FILE")
    opened = open_files(files, "FILE")
    yield from opened.notes
    yield from columns(opened)
    if config is not None and given is not None:
        yield ""
        fetch_models(given, weights=False)
        search_beside(config)
        tree = with_neutral(given)
        yield from data_lines(config_class(tree).from_tree(tree, config))
