"""Draws of an engine's next tokens on a CPU: `sampling.c`, called.

Token i of a row is drawn where logit_i + g_i is the largest, g_i = -log(-log u_i) (Gumbel's, which makes it a draw of
the softmax), u_i = (b_i + 0.5) / 2^53, and b_i the upper 53 bits of the (i + 1)-th number of a SplitMix64 that begins
at the row's seed, mixed once. That is what vLLM 0.32.0 draws on CPUs.
"""

import ctypes

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run


class Draw(ctypes.Structure):
    """That of sampling.c."""

    _fields_ = fields(["logits", "seeds", "tokens", "log_probs", "ranks", "next"], ["rows", "vocabulary", "row"])


def draw(logits: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A token of each row of logits (rows, vocabulary), float32, of which some may be -inf; seeds: (rows,) int64.

    Returns, (rows,) each: tokens, int64; their log-probs of the softmax, nats, float32; how many logits of the row are
    at least theirs, int64. A row of which all logits are -inf gives token 0.
    """
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    assert logits.dtype == torch.float32 and seeds.dtype == torch.int64, "as the kernel reads them"
    assert logits.dim() == 2 and logits.stride(1) == 1 and seeds.is_contiguous(), "as the kernel reads them"
    rows, vocabulary = logits.shape
    tokens, ranks = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
    log_probs = torch.empty(rows)
    arguments = Draw(
        logits=logits.data_ptr(),
        seeds=seeds.data_ptr(),
        tokens=tokens.data_ptr(),
        log_probs=log_probs.data_ptr(),
        ranks=ranks.data_ptr(),
        rows=rows,
        vocabulary=vocabulary,
        row=logits.stride(0),
    )
    run(kernels.hybridflow_draw, arguments, rows)
    return tokens, log_probs, ranks
