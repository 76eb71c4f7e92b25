"""Log-probs and entropy of a rank's columns of the logits on a CPU, each in one pass: by the kernels in C.

`parallel.vocab` opens this door; what these give and take is written there, at `VocabKernels`.
"""

import torch
from torch import Tensor

from hybridflow.cpu.kernels import vocabulary

Temperature = float | Tensor


def partial_sums(logits: Tensor, columns: int, targets: Tensor, temperature: Temperature) -> tuple[Tensor, Tensor]:
    if columns == 0:
        return torch.full(logits.shape[:1], -torch.inf), torch.zeros(3, logits.shape[0])
    return vocabulary.partial_sums(logits, columns, targets, _divisors(temperature))


def gradients(
    logits: Tensor,
    columns: int,
    targets: Tensor,
    temperature: Temperature,
    *,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    if columns == 0:
        logits.zero_()
        return
    vocabulary.gradients(
        logits,
        columns,
        targets,
        _divisors(temperature),
        normalizer=normalizer,
        entropy=entropy,
        grad_log_probs=grad_log_probs,
        grad_entropy=grad_entropy,
    )


def _divisors(temperature: Temperature) -> Tensor:
    return temperature.contiguous() if isinstance(temperature, Tensor) else torch.tensor([temperature])
