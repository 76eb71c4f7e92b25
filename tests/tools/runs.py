"""Short runs for the tools that start some."""

from pathlib import Path

from tests.launch import run_ranks

BRIEF = ("num_epochs=null", "num_iterations=2", "metrics.eval_interval=2", "stop_when=null")


def in_forks(arguments: list[str], log: Path | None = None) -> int:
    return run_ranks(2, "hybridflow.train", *arguments).returncode
