"""Start an experiment on many machines with one command, by torchrun and OpenSSH:

    hybridflow launch --hostfile HOSTS configs/x.yaml [section.key=value ...]

`python launch/run.py` does the same with any Python from 3.11 on.

HOSTS has one line for each host: `[user@]host slots=N [port=N]`. A slot is a rank, and each rank has one GPU.
Code, environment and models lie at the same paths on every host. The launcher first reaches and compares all hosts.
Then torchrun starts on each host. The output of all hosts appears here, each line behind the host's name. The output
also goes to runs/NAME/logs/HOST.log. The first Ctrl-C or SIGTERM makes the run save and end. The second one ends the
run at once. After the failure of a rank or a host the launcher ends all ranks. The exit status is that of the first
failure:

    70  a rank was stuck      75  stopped, and saved      76  stopped, and not saved      128 + N  signal N      1  else

With spare hosts, `--nnodes 2:3`, the run resumes on the remaining hosts from the latest checkpoint. Arguments behind
`--` go to `hybridflow train`, or with --health to `hybridflow health`.
"""

import sys
from collections.abc import Sequence

from hybridflow.launcher.arguments import parse
from hybridflow.launcher.hostfile import LaunchError
from hybridflow.launcher.job import run
from hybridflow.launcher.output import say


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse(sys.argv[1:] if arguments is None else arguments, __doc__ or ""))
    except LaunchError as error:
        for line in str(error).splitlines():
            say(f"error: {line}", error=True)
        return 1
    except KeyboardInterrupt:
        say("interrupted before ranks were started", error=True)
        return 130
