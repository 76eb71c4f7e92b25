"""A config that comes from a pipe, as in `envsubst < my.yaml | hybridflow train /dev/stdin`: one process reads it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybridflow.config.files import as_yaml, is_lasting, read_tree
from hybridflow.errors import ConfigError


def check_one_reader(config: str) -> None:
    """Errors: ConfigError for a pipe that several ranks would read: one gets the text."""
    if is_lasting(config) or not os.path.exists(config):
        return
    from hybridflow.parallel import torchrun  # torch loads for seconds

    _, world_size = torchrun.torchrun_rank()
    if world_size > 1 and torchrun.is_rank():
        raise ConfigError(
            f"{config}: is no file, and each of {world_size} ranks reads the config: a pipe gives the text once. "
            "Write the config into a file, or let `hybridflow train --nproc N` start the ranks"
        )


@contextlib.contextmanager
def file_for_ranks(config: str) -> Iterator[str]:
    """A file that all ranks can read: the config, or what a pipe has said."""
    if is_lasting(config):
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="hybridflow-") as directory:
        file = Path(directory) / "config.yaml"
        file.write_text(as_yaml(read_tree(config)), encoding="utf-8")
        yield str(file)
