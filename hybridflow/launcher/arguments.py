"""The command line of `hybridflow launch`."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.launcher.hostfile import LaunchError

ROOT = Path(__file__).resolve().parents[2]  # that hybridflow/ lies in: of a checkout, or site-packages
DEFAULT_PORT = 29500  # torchrun's own
RESTARTS_WITH_SPARES = 3
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# of schedulers: the number of nodes, and which of them this is
NUM_NODES_FROM = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES")
NODE_RANK_FROM = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "NODE_RANK", "PET_NODE_RANK")


@dataclass(frozen=True)
class LaunchOptions:
    """What is asked for."""

    config: str | None
    overrides: tuple[str, ...]
    rest: tuple[str, ...]  # behind `--`, for hybridflow.train or hybridflow.health
    health: bool
    dry_run: bool
    hostfile: Path | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    nnodes: tuple[int, int] | None  # least and most
    max_restarts: int | None
    no_ssh: bool
    node_rank: int | None
    nproc_per_node: int | None
    master_addr: str | None
    master_port: int | None
    rdzv_timeout: float
    connect_timeout: float
    lost_after: float
    ssh_config: str | None
    ssh_options: tuple[str, ...]
    python: str
    directory: Path
    environment: Mapping[str, str]
    allow_unlike_gpus: bool

    @property
    def module(self) -> list[str]:
        """What torchrun starts, with the arguments."""
        config = [self.config] if self.config is not None else []
        return ["-m", "hybridflow.health" if self.health else "hybridflow.train", *config, *self.overrides, *self.rest]


def parse(arguments: Sequence[str], description: str) -> LaunchOptions:
    """Errors: LaunchError; SystemExit of argparse, with the usage."""
    ours, rest = _split(list(arguments))
    given = _parser(description).parse_intermixed_args(ours)
    config, overrides = _config(given.config, given.words)
    if config is None and not given.health:
        raise LaunchError(f"which config? `{program()} --hostfile HOSTS configs/x.yaml`")
    if config is not None and os.path.exists(config) and (not os.path.isfile(config) or config.startswith("/dev/")):
        raise LaunchError(f"{config}: is no file: every rank reads the config, and a pipe gives the text once")
    if given.hostfile is None and not given.no_ssh:
        raise LaunchError("--hostfile names the hosts; --no-ssh starts this node's ranks alone, for schedulers")
    return LaunchOptions(
        config=config,
        overrides=tuple(overrides),
        rest=tuple(rest),
        health=given.health,
        dry_run=given.dry_run,
        hostfile=given.hostfile,
        include=tuple(given.include),
        exclude=tuple(given.exclude),
        nnodes=_num_nodes(given.nnodes),
        max_restarts=given.max_restarts,
        no_ssh=given.no_ssh,
        node_rank=given.node_rank,
        nproc_per_node=given.nproc_per_node,
        master_addr=given.master_addr,
        master_port=given.master_port,
        rdzv_timeout=given.rdzv_timeout,
        connect_timeout=given.connect_timeout,
        lost_after=given.lost_after,
        ssh_config=given.ssh_config,
        ssh_options=tuple(given.ssh_option),
        python=_python(given.python),
        directory=Path(given.directory).absolute(),
        environment=_environment(given.env),
        allow_unlike_gpus=given.allow_unlike_gpus,
    )


def program() -> str:
    """As a person has started it."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("hybridflow") else "python launch/run.py"


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="CONFIG | section.key=value", help="a YAML file, and values to replace in there")
    add("--config", metavar="CONFIG", help="the experiment's YAML file, if it is not the first word")
    add("--hostfile", type=Path, metavar="FILE", help="a file with one line a host: [user@]host slots=N [port=N]")
    add("--include", action="append", default=[], metavar="HOSTS", help="use only these hosts: worker-[0-3],big*")
    add("--exclude", action="append", default=[], metavar="HOSTS", help="do not use these hosts")
    add("--nnodes", metavar="N | MIN:MAX", help="number of hosts to use; further hosts are spares (default: all hosts)")
    add("--max-restarts", type=_count, metavar="N", help="starts after a failure (default: 3 with spares, otherwise 0)")
    add("--dry-run", action="store_true", help="print the commands and the grids of each host; reach no host")
    add("--health", action="store_true", help="check hosts and links and do not train; CONFIG is optional")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of the ranks (default: as here)")
    add("--allow-unlike-gpus", action="store_true", help="start although hosts have unlike GPUs")
    add("--master-addr", metavar="ADDR", help="the address at which other hosts reach the first host")
    add("--master-port", type=_port, metavar="PORT", help=f"first host's port (default: {DEFAULT_PORT} or a free one)")
    add("--rdzv-timeout", type=_seconds, default=300.0, metavar="S", help="seconds to reach the first host (300)")
    add("--connect-timeout", type=_seconds, default=15.0, metavar="S", help="seconds for ssh to a host (15)")
    add("--lost-after", type=_seconds, default=30.0, metavar="S", help="silent seconds of a lost host (30)")
    add("--ssh-config", metavar="FILE", help="the config file of ssh (default ~/.ssh/config)")
    add("--ssh-option", action="append", default=[], metavar="KEY=VALUE", help="an option of ssh, as with ssh -o")
    add("--python", metavar="FILE", help="the ranks' Python on every host (default: .venv/bin/python if it exists)")
    add("--directory", default=".", metavar="DIR", help="the ranks' directory on every host (default: this one)")
    add("--no-ssh", action="store_true", help="start only the ranks of this node; a scheduler starts the other nodes")
    add("--node-rank", type=_count, metavar="I", help=f"with --no-ssh: node number ({', '.join(NODE_RANK_FROM[:2])})")
    add("--nproc-per-node", type=_positive, metavar="N", help="with --no-ssh: ranks of a node (default: one a GPU)")
    return parser


def found(names: Sequence[str]) -> int | None:
    """The number that a scheduler tells in one of these variables."""
    value = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return int(value) if value is not None and value.isdecimal() else None


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and behind `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _config(option: str | None, words: list[str]) -> tuple[str | None, list[str]]:
    """The config, and the overrides: words with an equals sign."""
    files = [word for word in words if "=" not in word]
    given = [*([option] if option is not None else []), *files]
    if len(given) > 1:
        raise LaunchError(f"{given[1]!r} is no override, section.key=value, and {given[0]} is the config already")
    return given[0] if given else None, [word for word in words if "=" in word]


def _num_nodes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6})?", text):
        raise LaunchError(f"--nnodes {text}: a number of hosts, or MIN:MAX")
    least, _, most = text.partition(":")
    numbers = int(least), int(most or least)
    if not 1 <= numbers[0] <= numbers[1]:
        raise LaunchError(f"--nnodes {text}: MIN is 1 or more, and MAX no less")
    return numbers


def _environment(given: Sequence[str]) -> dict[str, str]:
    environment = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not VARIABLE.fullmatch(name):
            raise LaunchError(f"--env {word!r}: {name!r} is no name of a variable")
        if not equals and name not in os.environ:
            raise LaunchError(f"--env {name}: is not set here; --env {name}=VALUE sets it")
        environment[name] = value if equals else os.environ[name]
    return environment


def _python(given: str | None) -> str:
    """An absolute path: every host is to have it there."""
    if given is None:
        own = ROOT / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable
    path = shutil.which(given)
    return os.path.abspath(path if path is not None else given)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, a number from 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds
