"""hybridflow.train where the clock of the second rank is hours ahead.

torchrun --nproc-per-node 2 -m tests.checkpoint.minutes_worker CONFIG [section.key=value ...]
"""

import sys
import time
from types import SimpleNamespace

from hybridflow.checkpoint import manager
from hybridflow.cli.train import main
from hybridflow.parallel.torchrun import torchrun_rank

if __name__ == "__main__":
    if torchrun_rank()[0] == 1:
        began = time.monotonic()
        ahead = SimpleNamespace(monotonic=lambda: began + 1e4 * (time.monotonic() - began))
        manager.time = ahead
    sys.exit(main(sys.argv[1:]))
