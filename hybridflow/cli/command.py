"""What a command calls itself in its help: as it was started, by its console script or by `python -m`."""

import sys
from pathlib import Path


def program(module: str) -> str:
    """`hybridflow-plan` where that script was started, else `python -m hybridflow.plan`."""
    started = Path(sys.argv[0]).name
    return started if started.startswith("hybridflow") else f"python -m {module}"
