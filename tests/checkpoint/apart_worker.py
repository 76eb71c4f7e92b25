"""`python -m hybridflow.train` of ranks that have no directory in common, where that of the config is relative.

torchrun ... -m tests.checkpoint.apart_worker CONFIG [section.key=value ...]
"""

import os
import sys
from pathlib import Path

from hybridflow.cli.train import main

if __name__ == "__main__":
    own = Path(sys.argv[1]).parent / f"of rank {os.environ['RANK']}"
    own.mkdir(exist_ok=True)
    os.chdir(own)
    main(sys.argv[1:])
