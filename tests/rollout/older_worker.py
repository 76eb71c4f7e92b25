"""Train with what stands for torch 2.11 and vLLM 0.24.0, as far as these lack a name that 0.32.0 has.

python -m tests.rollout.older_worker CONFIG OUT
"""

import sys
from pathlib import Path

import torch
import vllm

from tests.gpu import loop_worker


def main(config: Path, out: Path) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    del BaseModelLoader.create_model
    vllm.__version__, torch.__version__ = "0.24.0", "2.11.0+cpu"
    loop_worker.main(config, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
