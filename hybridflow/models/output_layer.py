"""The output layer of a policy model: logits are made when a caller asks for them, or some rows at a time.

All logits of 16,384 tokens and a vocabulary of 152k are 4.6 GiB in bfloat16, which limits the context before attention
does. What is wanted of them are log-probs and entropies. More logits than `parallel.vocab.LOGITS_AT_ONCE` are made in
chunks of rows, and made again in the backward pass, for one product more; fewer are kept, as any activation is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridflow.parallel.vocab import (
    OwnColumns,
    Temperature,
    VocabKernels,
    chunks_of_rows,
    divisors_of,
    vocab_parallel_log_probs,
)


class OutputLayer(ColumnParallelLinear):
    """(padded vocabulary / tp, hidden) on each rank. The input is whole on all, with sequence parallelism too."""

    def __init__(
        self, input_size: int, vocab_size: int, *, config: TransformerConfig, tied: bool, tp_group: ProcessGroup
    ):
        super().__init__(
            input_size,
            vocab_size,
            config=config,
            init_method=not_none(config.init_method),
            bias=False,
            skip_weight_param_allocation=tied,
            gather_output=False,
            tp_group=tp_group,
        )
        self.sequence_parallel = False  # it must not gather again, and must sum the input's gradient over the group
        self.allreduce_dgrad = tp_group.size() > 1

    def forward(self, hidden: Tensor, weight: Tensor | None = None) -> "Outputs":  # type: ignore[override]
        return Outputs(hidden, self, self.weight if weight is None else weight)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits: Tensor = super().forward(hidden, weight)[0]
        return logits


@dataclass(frozen=True, eq=False)
class Outputs:
    """Rows of the last hidden state, of which logits are not made yet. hidden: (r, hidden size)."""

    hidden: Tensor
    layer: OutputLayer
    weight: Tensor

    def logits(self) -> Tensor:
        """(r, padded vocabulary / tp) in the model's dtype."""
        return self.layer.logits(self.hidden, self.weight)

    def log_probs_and_entropy(
        self, targets: Tensor, *, vocab_size: int, temperature: Temperature, kernels: VocabKernels
    ) -> tuple[Tensor, Tensor]:
        """As `parallel.vocab.vocab_parallel_log_probs` of these logits; alike on all ranks of the group."""
        group, columns = not_none(self.layer.tp_group), len(self.weight)
        if len(chunks_of_rows(len(self.hidden), columns)) < 2:
            return vocab_parallel_log_probs(
                self.logits(), targets, group=group, vocab_size=vocab_size, temperature=temperature, kernels=kernels
            )
        own = OwnColumns(columns, group=group, vocab_size=vocab_size, kernels=kernels)
        add = add_by_megatron if self.layer.gradient_accumulation_fusion else add_rounded
        both: tuple[Tensor, Tensor] = _LogProbsOfRows.apply(self.hidden, self.weight, targets, temperature, own, add)
        return both


def logits_or_values(output: Outputs | Tensor) -> Tensor:
    """Of a policy model all logits, of a value model the values as they are."""
    return output.logits() if isinstance(output, Outputs) else output


# ------------------------------------------------------------------------------------------------ chunks of rows

AddGradient = Callable[[Tensor, Tensor, Tensor], None]  # of a weight, by (input, gradient of the output), to a buffer


def add_by_megatron(x: Tensor, grad: Tensor, to: Tensor) -> None:
    """Added as it is multiplied: by apex's extension, or on a CPU by what stands for it."""
    vars(layers)["fused_weight_gradient_mlp_cuda"].wgrad_gemm_accum_fp32(x, grad, to)


def add_rounded(x: Tensor, grad: Tensor, to: Tensor) -> None:
    """Each product is rounded to the model's dtype once, as the product of all rows would be."""
    to.add_(grad.t() @ x)


class _LogProbsOfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: Temperature,
        own: OwnColumns,
        add: AddGradient,
    ) -> tuple[Tensor, Tensor]:
        local, divisors = own.local(targets), divisors_of(temperature, hidden)
        parts = [
            own.partial_sums(hidden[rows] @ weight.t(), local[rows], divisors[rows])
            for rows in chunks_of_rows(len(hidden), len(weight))
        ]
        peaks, sums = zip(*parts, strict=True)
        log_probs, entropy, normalizer = own.combined(torch.cat(peaks), torch.cat(sums, dim=1), local)
        ctx.save_for_backward(hidden, weight, *(local, divisors, normalizer, entropy))
        ctx.main_grad = getattr(weight, "main_grad", None)  # megatron's buffer, float32
        ctx.own, ctx.add = own, add
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, local, divisors, normalizer, entropy = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        buffer = ctx.main_grad
        if of_weight and buffer is None:
            buffer = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in chunks_of_rows(len(hidden), len(weight)):
            logits = hidden[rows] @ weight.t()
            ctx.own.write_gradients(
                logits,
                local[rows],
                divisors[rows],
                normalizer=normalizer[rows],
                entropy=entropy[rows],
                grad_log_probs=None if grad_log_probs is None else grad_log_probs[rows],
                grad_entropy=None if grad_entropy is None else grad_entropy[rows],
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[rows])
            if of_weight:
                ctx.add(hidden[rows], logits, buffer)
            del logits
        if grad_hidden is not None:
            ctx.own.sum(grad_hidden)
        # megatron adds what autograd has to the buffer, unless it believes that a layer did: nothing is left to add
        grad_weight = torch.zeros_like(weight) if ctx.main_grad is not None else buffer
        return grad_hidden, grad_weight.to(weight.dtype) if of_weight else None, None, None, None, None
