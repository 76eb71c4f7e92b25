"""On how many ranks of this host a run is started, and whether it could begin there."""

from pathlib import Path
from typing import Any

from hybridflow.cli.refusals import check_here
from hybridflow.config.auto import autos
from hybridflow.config.kinds import AnyConfig
from hybridflow.config.world_size import TRIED, world_size_to_try
from hybridflow.errors import ConfigError
from hybridflow.parallel.device import num_devices
from hybridflow.parallel.platform import prepare_imports
from hybridflow.user_code import search_beside


def number_of_ranks(tree: dict[str, Any], config: AnyConfig, source: str | Path, given: int | None) -> int:
    """As given; else all GPUs of this host, or on CPUs the fewest that fit.

    config: of the tree, with neutral values for `auto`.
    Errors: ConfigError with all reasons why the run cannot begin on that many, and on how many it could.
    """
    prepare_imports(config.platform)
    search_beside(source)
    wanted, none_fits = given or num_devices(), False
    if autos(tree):
        config, wanted = fitting(tree, source, wanted)
    elif wanted is None:
        wanted, problem = world_size_to_try(config)
        none_fits = problem is not None
    try:
        check_here(config, wanted, output=True)
    except ConfigError as error:
        first = f"no number of ranks fits; on {wanted}, the least that the grids need:\n" if none_fits else ""
        raise ConfigError(f"{first or _other_number(config, source, wanted)}{error}") from error
    return wanted


def _other_number(config: AnyConfig, source: str | Path, wanted: int) -> str:
    """A line to begin with where the number of ranks is what is wrong."""
    try:
        config.check_world_size(wanted)
    except ConfigError:
        least, problem = world_size_to_try(config)
        if problem is None:
            many = f"needs {least} rank{'s' * (least > 1)} (or a multiple), got {wanted}"
            return f"{many}: hybridflow train {source} --nproc {least}\n"
    return ""


def fitting(tree: dict[str, Any], source: str | Path, wanted: int | None) -> tuple[AnyConfig, int]:
    """A config whose `auto` is resolved, for so many ranks or for the smallest number on which something fits."""
    from hybridflow.trainers.auto import resolved_for

    for count in [wanted] if wanted else TRIED:
        try:
            return resolved_for(tree, source, count)[0], count
        except ConfigError:
            if wanted or count == TRIED[-1]:
                raise
    raise AssertionError("the last that is tried tells why it does not fit")
