"""Gradients of weights on a CPU, added to their buffers as they are multiplied: as apex's extension does on CUDA.

It saves a tensor of the weight's size and a pass over it, and bfloat16 gradients are not rounded before they are added.
megatron's layers call it where `fuse` has set them to; `overlays` gives it to them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.cpu.kernels import matrix
from hybridflow.cpu.kernels.matrix import has_units
from hybridflow.cpu.megatron.products import by_units, mkl_is_slow, way_of


def fuse(model: nn.Module) -> None:
    """Have layers add their weights' gradients to the buffers themselves.

    Not a layer that shares a weight with the embeddings: what autograd adds up for those is the buffer's as well.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "gradient_accumulation_fusion") and module.weight is not None:
            module.gradient_accumulation_fusion = True


def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad (outputs, inputs) float32 += grad^T x of (tokens, outputs) and (tokens, inputs). megatron's name."""
    of_outputs = grad.t()
    if x.dtype == torch.bfloat16:
        if has_units():
            matrix.product(of_outputs, x, to=main_grad)
        else:
            main_grad.add_(of_outputs @ x)
        return
    way = way_of(of_outputs, x)
    if way is by_units:
        matrix.product(of_outputs, x, to=main_grad)
    elif mkl_is_slow():
        main_grad.add_(of_outputs @ x)
    else:
        main_grad.addmm_(of_outputs, x)
