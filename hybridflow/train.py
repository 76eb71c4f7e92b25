"""Train on one experiment config, under torchrun:

    torchrun --nproc-per-node 2 -m hybridflow.train configs/quickstart.yaml [section.key=value ...]

CONFIG is a YAML file; each override replaces one of its values, `actor.optimizer.lr=1e-5` or
`reward.models.0.weight=2`. The number of ranks is torchrun's; parallel sizes are in the config. What a run leaves
behind is in OUTPUT_DIR/NAME: config.yaml (resolved), metrics.csv, tensorboard/, samples.jsonl and hf/, the trained
actor.
"""

import argparse
import contextlib
import os
import sys
import traceback
from typing import NoReturn

from hybridflow import __version__
from hybridflow.config import ExperimentConfig
from hybridflow.errors import UserError
from hybridflow.user_code import search_beside


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hybridflow.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the config")
    parser.add_argument("--num-iterations", type=int, default=None, help="instead of the config's num_iterations")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        _train(options)
    except Exception as error:  # the boundary of the process: one rank reports, all end
        try:
            _report(error)
        finally:  # a full disk under the output must not leave this process behind
            _leave(1)
    _leave(0)


def _train(options: argparse.Namespace) -> None:
    config = ExperimentConfig.from_yaml(options.config, options.overrides)
    search_beside(options.config)
    # torch and megatron load for seconds: a bad config fails before
    from hybridflow.parallel.device import device_name
    from hybridflow.parallel.platform import prepare_imports, torchrun_rank
    from hybridflow.planning.placed import check_output_dir

    prepare_imports(config.platform)
    rank, world_size = torchrun_rank()
    if rank == 0:
        check_output_dir(config)
        where = f"{world_size} ranks, platform {device_name()}"
        print(f"{config.name}: loading {', '.join(config.roles())} and the engine, {where}", flush=True)
    from hybridflow.recording.progress import print_summary
    from hybridflow.trainer import RLTrainer

    trainer = RLTrainer(config)
    summary = trainer.fit(options.num_iterations)
    if trainer.platform.rank == 0:
        print_summary(f"hybridflow {config.name}", summary.rows(config.run_dir))


def _report(error: Exception) -> None:
    """Print the error on the first rank that meets one. Ranks that fail because a peer left stay silent."""
    if not _first_to_fail():
        return
    if isinstance(error, UserError):
        print(f"hybridflow: error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def _first_to_fail() -> bool:
    try:
        from hybridflow.parallel.platform import first_to_fail
    except Exception:  # torch cannot be imported, which is the error to report
        return True
    return first_to_fail()


def _leave(status: int) -> NoReturn:
    """End at once: other ranks may be inside a collective, and engine threads would wait for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
