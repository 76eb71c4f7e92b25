"""Train a language model as one experiment config says:

    hybridflow train configs/quickstart.yaml [section.key=value ...] [--nproc N]

The command starts the ranks of this host: one for each GPU, or on CPUs the fewest that fit. --hostfile HOSTS starts
ranks on several hosts; `hybridflow launch` has more options for several hosts. Under
`torchrun ... -m hybridflow.train CONFIG` the command is one rank.

CONFIG is a YAML file with sections such as data, sampling, actor, rollout and algorithm. The sections critic, reference
and reward are there if the algorithm has these roles. algorithm.name is ppo (the default), grpo, dr_grpo, rloo, remax,
reinforce, opo, maxrl, distill or custom. custom runs a function of your own, from the working directory or from the
directory of CONFIG. sft, reward_model, dpo and kto train on the rows of a file. These four generate nothing: their
configs have no sampling, rollout or reward. Each override replaces a value: `actor.optimizer.lr=1e-5`,
`reward.models.0.weight=2`, `critic=null`. `hybridflow plan` prints the numbers of ranks that fit, and the memory of
each rank. Parallel sizes, token budgets, recompute, offloading and the KV cache may be `auto`. An `auto` is chosen for
the devices of the run.

A run writes into OUTPUT_DIR/NAME (runs/NAME). A run that starts anew moves an existing directory to NAME.1.

    config.yaml                                 the config with every default
    starts.jsonl                                each start: command, versions, and how the start ended
    metrics.csv, tensorboard/                   a row for each iteration
    experts_load.csv                            of a mixture of experts: the load of experts by layer
    samples.jsonl                               some responses with their scores
    logs/rank_N.log                             the log of a rank; HYBRIDFLOW_LOG=debug writes more, also on the screen
    checkpoints/step_NNNNNN/                    the state to resume from; `hybridflow checkpoints` lists checkpoints
    batches/iteration_NNNNNN.safetensors        every batch, with metrics.dump_batches
    batches/nonfinite_NNNNNN.safetensors        the tensors at hand when a number was not finite
    hf/                                         the trained model, for transformers and vLLM

--replay DIR trains on the dumped batches of another run and generates nothing. DIR is the directory of the other run,
or one of its batch files. --rollout-only generates and scores responses, dumps the batches, and trains nothing. Both
write into a new directory, NAME-replay or NAME-rollout, without hf/.

A run is saved every 30 minutes (checkpoint.save_minutes), or every checkpoint.save_interval iterations, and at its end.
The same command resumes the run after any end, and a larger num_iterations continues a finished run. SIGTERM, SIGUSR1
and SIGHUP make the run save and end. The exit statuses are:

    0  finished      1  error      70  a rank was stuck      75  stopped, and saved      76  stopped, and not saved
"""

import argparse
import contextlib
import logging
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, as_typed, error_text, positive
from hybridflow.cli.files_of_tree import read_config
from hybridflow.cli.piped_config import check_one_reader, file_for_ranks
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.config.auto import autos, with_neutral
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.hub import fetch_models
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.errors import ConfigError, ExitStatus, Stopped, UserError
from hybridflow.launcher.main import main as launch
from hybridflow.parallel.process_exit import leave
from hybridflow.parallel.proxies import keep_loopback_direct
from hybridflow.parallel.streams import keep_streams
from hybridflow.user_code import search_beside

if TYPE_CHECKING:
    from hybridflow.parallel.watchdog import Watchdog
    from hybridflow.trainers.fixed_data import FixedDataTrainer
    from hybridflow.trainers.online import OnlineTrainer

LOG = logging.getLogger(__name__)
WIDTH = 112  # columns of a pipe


def main(arguments: list[str] | None = None) -> int:
    keep_streams()
    keep_loopback_direct()
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_intermixed_args(given)  # options may stand between overrides
    options.trains = not (options.rollout_only or options.evaluate)
    if options.hostfile is not None:
        if options.nproc is not None:
            parser.error("--nproc is for one host; the slots of --hostfile say how many ranks each host has")
        return launch(_for_launcher(options))
    if options.nnodes is not None:
        parser.error("--nnodes needs --hostfile, a file with a line a host: NAME slots=RANKS")
    try:
        if (status := _ended_ranks(options, given)) is not None:
            return status
        _train(options)
    except Stopped as stopped:
        _end_stopped(stopped)
    except Exception as error:  # the boundary of the process: one rank reports, all end
        try:
            _report(error, debug=options.debug)
        finally:  # a full disk under the output must not leave this process behind
            leave(ExitStatus.ERROR)
    leave(ExitStatus.FINISHED)


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("hybridflow.train", __doc__)
    parser.add_argument("config", metavar="CONFIG", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the config")
    parser.add_argument(
        "--nproc", metavar="N", type=positive, help="ranks on this host (one for each GPU, or the fewest that fit)"
    )
    parser.add_argument("--hostfile", metavar="HOSTS", help="a file of hosts to train on, as for `hybridflow launch`")
    parser.add_argument("--nnodes", metavar="N | MIN:MAX", help="hosts of --hostfile to use; the others are spares")
    parser.add_argument("--num-iterations", type=int, default=None, help="replaces num_iterations of the config")
    parser.add_argument(
        "--resume", metavar="auto|never|PATH", help="resume from the run's latest checkpoint, from none, or from PATH"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--replay", metavar="DIR", type=Path, help="train on the dumped batches of another run")
    instead.add_argument("--rollout-only", action="store_true", help="generate and score without training")
    # of `hybridflow eval`: CONFIG is what that wrote; the user's functions may lie beside another file
    instead.add_argument("--evaluate", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--fetched", action="store_true", help=argparse.SUPPRESS)  # of ranks: the Hub's models are here
    parser.add_argument("--debug", action="store_true", help="show tracebacks of all errors, and the messages of torch")
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _overrides(options: argparse.Namespace) -> list[str]:
    found = list(options.overrides)
    if options.num_iterations is not None:
        found.append(f"num_iterations={options.num_iterations}")
    if options.resume is not None:
        found.append(f"checkpoint.load={'none' if options.resume == 'never' else options.resume}")
    return found


def _for_launcher(options: argparse.Namespace) -> list[str]:
    """The arguments of `hybridflow launch` that say the same."""
    nnodes = [] if options.nnodes is None else ["--nnodes", options.nnodes]
    ranks = ["--rollout-only"] * options.rollout_only + ["--debug"] * options.debug
    if options.evaluate is not None:
        ranks += ["--evaluate", options.evaluate]
    if options.replay is not None:
        ranks += ["--replay", str(options.replay)]
    behind = ["--", *ranks] if ranks else []
    return ["--hostfile", options.hostfile, *nnodes, options.config, *_overrides(options), *behind]


# ------------------------------------------------------------------------------------------------ the ranks


def _ended_ranks(options: argparse.Namespace, given: Sequence[str]) -> int | None:
    """Start the ranks and tell how they have ended; None in a rank, and where this process is the only one.

    Errors: ConfigError with all reasons why the run cannot begin here.
    """
    check_one_reader(options.config)
    tree = read_tree(options.config, _overrides(options))
    if not options.fetched:
        fetch_models(tree, weights=True)
    _search(options)
    config = read_config(with_neutral(tree), options.config)  # before torch, which loads for seconds
    if not (options.replay or options.rollout_only or options.evaluate):
        config.check_own_directory()
    from hybridflow.parallel import torchrun

    torchrun.forget_world_of_one()
    if torchrun.is_rank():
        torchrun.check_rank(options.nproc)
        return None
    torchrun.set_environment(config.env_vars)
    from hybridflow.cli.refusals import number_of_ranks
    from hybridflow.parallel.agent import run_ranks

    num_ranks = number_of_ranks(tree, config, options.config, options.nproc, trains=options.trains)
    if num_ranks == 1:
        return None
    with file_for_ranks(options.config) as file:
        end = run_ranks(
            ["-m", "hybridflow.train", "--fetched", *(file if word == options.config else word for word in given)],
            num_ranks,
            grace_seconds=config.checkpoint.grace_seconds,
            environment={torchrun.BY_COMMAND: "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            debug=options.debug,
        )
    if end.message is not None:
        print(end.message if end.by_rank else error_text(end.message, "hybridflow"), file=sys.stderr, flush=True)
    return end.status


def _search(options: argparse.Namespace) -> None:
    """A user's functions may lie beside the config."""
    search_beside(options.config if options.evaluate is None else options.evaluate)


def _train(options: argparse.Namespace) -> None:
    config, chosen = _config(options.config, _overrides(options))
    if not config.generates and (options.replay or options.rollout_only):
        given = "--replay" if options.replay else "--rollout-only"
        raise ConfigError(f"{given}: algorithm {config.algorithm.name} trains on fixed data and generates nothing")
    _search(options)
    # torch and megatron load for seconds: a bad config fails before
    from hybridflow.parallel.platform import prepare_imports
    from hybridflow.parallel.torchrun import is_by_command, set_environment

    if is_by_command():
        from hybridflow.parallel.agent import follow_agent

        follow_agent()
    set_environment(config.env_vars)
    prepare_imports(config.platform)
    from hybridflow.parallel.rank_log import rank_log

    with rank_log(config.run_dir / "logs"), _own_directory(config, options):
        _announce(config, chosen, options)
        if options.evaluate is not None:
            _evaluate_here(config, options)
            return
        _train_here(config, options)


@contextlib.contextmanager
def _own_directory(config: AnyConfig, options: argparse.Namespace) -> Iterator[None]:
    """Rank 0 has the run's directory for itself within the block. A replay and rollouts alone write elsewhere.

    Before anything is loaded, for a second start to end at once. Errors: ConfigError, RunDirError.
    """
    from hybridflow.parallel.torchrun import is_by_command, is_rank, restart_count, started, torchrun_rank
    from hybridflow.placement.placed import check_output_dir
    from hybridflow.recording.lock import RESTART_SECONDS, RunLock

    rank, world_size = torchrun_rank()
    if is_rank() and not is_by_command():  # else it has been checked before the ranks were started
        from hybridflow.cli.refusals import check_here

        at = started()  # one rank of a host reads
        check_here(config, world_size, reads=at.local_rank == 0, ranks=at.ranks_here if options.trains else None)
    if rank != 0:
        yield
        return
    check_output_dir(config)
    if options.replay or options.rollout_only:
        yield
        return
    lock = RunLock(config.run_dir)
    lock.take(patience=RESTART_SECONDS if restart_count() else 0.0)
    try:
        yield
    finally:
        lock.release()


def _announce(config: AnyConfig, chosen: Sequence[str], options: argparse.Namespace) -> None:
    """Rank 0 says what it loads. chosen: lines on what `auto` has come to."""
    from hybridflow.config import TrainedRoleConfig
    from hybridflow.parallel.device import device_name
    from hybridflow.parallel.platform import locks_host_memory
    from hybridflow.parallel.rank_log import IN_FILES_ALONE
    from hybridflow.parallel.ranks import counted
    from hybridflow.parallel.torchrun import torchrun_rank
    from hybridflow.placement.placed import left_out

    rank, world_size = torchrun_rank()
    if rank == 0:
        where = f"{counted(world_size)}, platform {device_name()}"
        engine = "" if options.replay or not config.generates else " and the engine"
        offloads = [isinstance(role, TrainedRoleConfig) and role.offload_optimizer for role in config.roles().values()]
        long = "; page-locking the memory of offload_optimizer takes minutes" * (locks_host_memory() and any(offloads))
        loading = f"loading {', '.join(config.roles())}{engine}, {where} (half a minute or more{long})"
        for line in (*config.notes, *chosen, *config.vendor_lines(), *left_out(config), loading):
            print(f"{config.name}: {line}", flush=True)
            LOG.info("%s", line, extra=IN_FILES_ALONE)


def _train_here(config: AnyConfig, options: argparse.Namespace) -> None:
    """As one rank, with nothing but the libraries loaded."""
    from hybridflow.parallel.rank_log import log_error
    from hybridflow.parallel.stop import StopRequest
    from hybridflow.parallel.watchdog import Watchdog
    from hybridflow.recording.progress import print_summary

    watchdog = Watchdog(config.watchdog.deadlines(), StopRequest(config.checkpoint.grace_seconds))
    try:
        trainer = _trainer(config, watchdog, options)
        summary = trainer.fit()
    except Stopped:
        watchdog.close()
        raise
    except Exception as error:
        log_error(error)
        watchdog.note_failure(error)  # does not return where another rank's end is the cause
        raise
    if trainer.platform.rank == 0:
        rows = summary.rows(trainer.config.run_dir, exported=trainer.writes_model)
        print_summary(f"hybridflow {trainer.config.name}", rows)
        for command in next_commands(trainer.config, exported=trainer.writes_model):
            print(command, flush=True)
    watchdog.close()


def _evaluate_here(config: AnyConfig, options: argparse.Namespace) -> None:
    """As one rank, with nothing but the libraries loaded. A signal ends it: there is nothing to save."""
    from rich.console import Console

    from hybridflow.parallel.rank_log import log_error, open_rank_log
    from hybridflow.parallel.stop import StopRequest
    from hybridflow.parallel.watchdog import Watchdog
    from hybridflow.trainers.evaluation import Evaluator, pass_lines, results_table, write_results

    assert isinstance(config, ExperimentConfig), "`hybridflow eval` writes no other config"
    watchdog = Watchdog(config.watchdog.deadlines(), StopRequest(config.checkpoint.grace_seconds, signals=()))
    try:
        open_rank_log()
        evaluator = Evaluator(config, watchdog)
        first = evaluator.platform.rank == 0
        evaluated = evaluator.evaluate(lambda line: print(line, flush=True) if first else None)
        if first:
            file = write_results(config, evaluated, evaluator.inputs)
            (Console() if sys.stdout.isatty() else Console(width=WIDTH)).print(results_table(evaluated))
            for line in [*pass_lines(evaluated), f"results: {file}"]:
                print(line, flush=True)
    except Exception as error:
        log_error(error)
        watchdog.note_failure(error)  # does not return where another rank's end is the cause
        raise
    watchdog.close()


def next_commands(config: AnyConfig, *, exported: bool) -> list[str]:
    """What a person does next, to be copied. Runs on fixed data have no samples, and a reward model does not talk."""
    names = ["report", *(["samples"] if config.generates else [])]
    if not exported:
        names.append("checkpoints")
    elif "actor" in config.roles():
        names.append("chat")
    return [f"{as_typed()} {name} {shlex.quote(str(config.run_dir))}" for name in names]


def _config(path: str, overrides: list[str]) -> tuple[AnyConfig, tuple[str, ...]]:
    """The config, and what was chosen where it says `auto`: that takes torch, a config without is read without."""
    tree = read_tree(path, overrides)
    if not autos(tree):
        return config_class(tree).from_tree(tree, path), ()
    neutral = with_neutral(tree)
    checked = config_class(neutral).from_tree(neutral, path)
    from hybridflow.parallel.platform import prepare_imports
    from hybridflow.parallel.torchrun import set_environment
    from hybridflow.trainers.auto import load_for_run

    set_environment(checked.env_vars)
    prepare_imports(checked.platform)
    return load_for_run(path, overrides)


def _trainer(
    config: "ExperimentConfig | FixedDataConfig", watchdog: "Watchdog", options: argparse.Namespace
) -> "OnlineTrainer | FixedDataTrainer":
    """What trains such a config. Without an engine vLLM is not looked for."""
    if isinstance(config, FixedDataConfig):
        from hybridflow.trainers.fixed_data import FixedDataTrainer

        return FixedDataTrainer(config, watchdog)
    from hybridflow.trainers.online import OnlineTrainer

    return OnlineTrainer(config, watchdog, replay=options.replay, rollout_only=options.rollout_only)


def _report(error: Exception, *, debug: bool) -> None:
    """Print the error on the first rank that meets one. Ranks that fail because a peer left stay silent."""
    if not _first_to_fail():
        return
    wrong = isinstance(error, UserError) and not debug
    text = error_text(error, "hybridflow") if wrong else "".join(traceback.format_exception(error)).rstrip()
    try:
        from hybridflow.parallel.agent import write_error
        from hybridflow.parallel.torchrun import error_file, is_by_command
    except Exception:  # torch cannot be imported, which is the error to report
        print(text, file=sys.stderr, flush=True)
        return
    file = error_file()
    written = file is not None and write_error(file, text)
    if not (written and is_by_command()):  # or the command says it when all ranks are gone
        print(text, file=sys.stderr, flush=True)


def _end_stopped(stopped: Stopped) -> NoReturn:
    from hybridflow.parallel.torchrun import torchrun_rank

    if torchrun_rank()[0] == 0:
        saved = "the run is saved, and the same command resumes" if stopped.saved else "the run is not saved"
        print(f"hybridflow: stopped {stopped}; {saved}", flush=True)
    leave(ExitStatus.STOPPED if stopped.saved else ExitStatus.NOT_SAVED)


def _first_to_fail() -> bool:
    try:
        from hybridflow.parallel.platform import first_to_fail
    except Exception:  # torch cannot be imported, which is the error to report
        return True
    return first_to_fail()
