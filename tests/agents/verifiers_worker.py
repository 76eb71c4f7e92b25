"""Runs with environments of verifiers: python -m tests.agents.verifiers_worker CONFIG OUT CASES, overrides by name."""

import json
import sys
from pathlib import Path

from tests.environments import rollouts_worker

if __name__ == "__main__":
    rollouts_worker.run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
