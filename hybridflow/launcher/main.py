"""Start an experiment on many machines with one command, by torchrun and OpenSSH:

    hybridflow launch --hostfile HOSTS configs/x.yaml [section.key=value ...]

or, with any Python from 3.11 on, `python launch/run.py` in its place.

HOSTS has a line a host, `[user@]host slots=N [port=N]`; slots are ranks, of which each has a GPU of its own. Every host
has the same code, environment and models at the same places. All hosts are reached and compared first; then torchrun
starts on each, and all output comes here behind the host's name, and into runs/NAME/logs/HOST.log. A first Ctrl-C or
SIGTERM makes the run save and end, a second one end at once. Where a rank or a host fails, all are ended and the exit
status is that of the first to fail: 70 a rank was stuck, 75 stopped as told and saved, 76 not saved, 128 + N killed by
signal N, else 1.

With spares, `--nnodes 2:3`, the run goes on with the hosts that are left, from its last checkpoint.
Arguments behind `--` go to `hybridflow train`, or with --health to `hybridflow health`.
"""

import sys
from collections.abc import Sequence

from hybridflow.launcher.arguments import parse
from hybridflow.launcher.hostfile import LaunchError
from hybridflow.launcher.job import run
from hybridflow.launcher.output import say


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None, "it is the help"
    try:
        return run(parse(sys.argv[1:] if arguments is None else arguments, __doc__))
    except LaunchError as error:
        for line in str(error).splitlines():
            say(f"error: {line}", error=True)
        return 1
    except KeyboardInterrupt:
        say("interrupted before ranks were started", error=True)
        return 130
