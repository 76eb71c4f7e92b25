"""One report of what only a GPU can show: `python -m tests.gpu [PART ...]`. Without a GPU, what a CPU can.

`python -m tests.gpu node` is the first hour on 8 GPUs: see `tests.gpu.node`.
"""

import sys
import tempfile
import traceback
from pathlib import Path

import torch

from hybridflow.parallel.device import current_device, device_name
from tests.gpu import node
from tests.gpu.parts import PARTS


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - {part.__name__ for part in PARTS})
    if unknown:
        print(f"no part {', '.join(unknown)}; there are {', '.join(part.__name__ for part in PARTS)}", file=sys.stderr)
        return 2
    device, failures = current_device(), 0
    print(f"torch {torch.__version__}, {device_name()}")
    if device.type != "cuda":
        print("no GPU: the parts run as far as a CPU can, and say nothing of one")
    for part in PARTS:
        if names and part.__name__ not in names:
            continue
        print(f"\n{part.__name__.replace('_', ' ')}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                lines = part(device, Path(folder))
        except Exception:  # the report goes on: the next part may tell why
            traceback.print_exc(file=sys.stdout)
            failures += 1
            continue
        for line in lines:
            print(f"  {'ok   ' if line.right else 'WRONG'}  {line.name}: {line.value}")
        failures += sum(not line.right for line in lines)
    print(f"\n{failures} wrong" if failures else "\nall right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(node.main(sys.argv[2:]) if sys.argv[1:2] == ["node"] else main(sys.argv[1:]))
