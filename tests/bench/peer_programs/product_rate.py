"""The machine's matrix-product rate, as `tests.bench.iteration` measures it: FLOP/s by dtype, as JSON in a file.

torchrun --nproc-per-node 2 -m tests.bench.peer_programs.product_rate FILE float32 [bfloat16]
"""

import json
import sys
from pathlib import Path

from hybridflow.parallel import platform as platforms
from tests.bench.iteration import matrix_product_rate


def main() -> None:
    file, dtypes = Path(sys.argv[1]), sys.argv[2:]
    platform = platforms.start(seed=0)
    rates = {dtype: matrix_product_rate(dtype) for dtype in dtypes}
    if platform.rank == 0:
        file.write_text(json.dumps(rates))
    platforms.stop()


if __name__ == "__main__":
    main()
