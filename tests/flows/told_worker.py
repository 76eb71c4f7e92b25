"""`python -m hybridflow.train` that is told to end while an iteration scores: a signal has come to rank 1.

torchrun ... -m tests.flows.told_worker ITERATION CONFIG [section.key=value ...]
"""

import os
import sys
from typing import Any

from hybridflow.cli.train import main
from hybridflow.flows.run import Run


def told_in(number: int) -> None:
    whole = Run.whole

    def told(run: Run, *given: Any, **asked: Any) -> Any:
        if run.iteration == number and os.environ["RANK"] == "1":
            run._book._watchdog.stop.ask("SIGUSR1")
        return whole(run, *given, **asked)

    Run.whole = told  # type: ignore[method-assign]


if __name__ == "__main__":
    told_in(int(sys.argv[1]))
    main(sys.argv[2:])
