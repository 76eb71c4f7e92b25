"""A conversion that stops in the middle of its writing, for a test that kills it there.

python -m tests.tools.convert.slow_worker SOURCE TARGET [--overwrite]
"""

import sys
import time

from hybridflow.cli import convert as command
from hybridflow.convert.progress import ByteProgress


def advance(self: ByteProgress, num_bytes: int) -> None:
    print("writing", flush=True)
    time.sleep(600)


ByteProgress.advance = advance
kind = "megatron-to-hf" if "--back" in sys.argv else "hf-to-megatron"
sys.exit(command.main([kind, *(argument for argument in sys.argv[1:] if argument != "--back")]))
