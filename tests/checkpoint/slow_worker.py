"""`python -m hybridflow.train` on a disk that takes a minute for every file of tensors from the second checkpoint on.

torchrun ... -m tests.checkpoint.slow_worker CONFIG [section.key=value ...]
"""

import sys
import time
from typing import Any

from hybridflow.checkpoint import saver
from hybridflow.train import main

write_records = saver.write_records


def slowly(directory: Any, *arguments: Any) -> Any:
    if "step_000001" not in str(directory):
        print("writing", flush=True)
        time.sleep(60)
    return write_records(directory, *arguments)


if __name__ == "__main__":
    saver.write_records = slowly
    main(sys.argv[1:])
