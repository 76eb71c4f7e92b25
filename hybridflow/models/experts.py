"""A mixture of experts in place of a layer's MLP, every expert cut over the tensor-parallel ranks like a dense MLP.

For a token x with router weights W (Shazeer et al. 2017; Mixtral, Jiang et al. 2024):

    p = softmax(W x) over all experts, in float32; the k largest count, divided by their sum if so configured
    y = sum over those experts e of p_e fc2_e swiglu(fc1_e x)

The experts of a layer are one parameter, as in vLLM, so that the engine can read the trainer's memory. megatron's own
layer has one a expert, and with tensor parallelism asks for sequence parallelism.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, softmax

from hybridflow.models.layers import Function
from hybridflow.models.routing import Replay, replayed


class Router(nn.Module):
    """Chooses a token's experts. Replicated: every tensor-parallel rank sees all tokens and chooses alike."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._chosen, self.normalize = config.moe_router_topk, True
        self.replay: Replay = replayed  # of its own choice and the engine's
        num_experts = not_none(config.num_moe_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=config.params_dtype))

    def forward(self, tokens: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(t, hidden) -> (t, k) float32 shares of the chosen experts, and (t, k) their numbers.

        experts: (t, k), the engine's, which are taken; the shares stay this router's own. See `models.routing`.

        The logits are in the weights' dtype, as vLLM 0.32.0's gates of these families give them on every device.
        """
        every = softmax(linear(tokens, self.weight), dim=-1, dtype=torch.float32)
        shares, chosen = every.topk(self._chosen)
        if experts is not None:
            chosen = self.replay(chosen, experts)
            shares = every.gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True) if self.normalize else shares, chosen


class ExpertLinear(nn.Module):
    """One matrix an expert, (experts, out, in)."""

    def __init__(self, config: TransformerConfig, rows: int, columns: int) -> None:
        super().__init__()
        num_experts = not_none(config.num_moe_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, rows, columns, dtype=config.params_dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows up to ends[e] (int32) that are not of earlier experts go to expert e."""
        return grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class Experts(nn.Module):
    """This rank's share of every expert."""

    def __init__(self, config: TransformerConfig, swiglu: Function) -> None:
        super().__init__()
        self._swiglu = swiglu
        size = not_none(config.moe_ffn_hidden_size) // config.tensor_model_parallel_size
        self.linear_fc1 = ExpertLinear(config, 2 * size, config.hidden_size)  # [gate; up]
        self.linear_fc2 = ExpertLinear(config, config.hidden_size, size)

    def forward(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """(t, hidden), (t, k), (t, k) -> (t, hidden): this rank's summand of the outputs.

        Shares are multiplied into what the second matrix reads, which is narrower than its outputs: those are then
        kept by nobody, and are in the tokens' dtype.
        """
        chosen, order = experts.flatten().sort(stable=True)  # copies of tokens by expert
        numbers = torch.arange(len(self.linear_fc1.weight), device=chosen.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # bincount would wait for the device
        hidden: Tensor = self._swiglu.apply(self.linear_fc1(tokens[order // experts.shape[1]], ends))
        weighted = (hidden * shares.flatten()[order, None]).to(hidden.dtype)
        outputs = self.linear_fc2(weighted, ends)
        # back in the order of the tokens, and a plain sum: adding by index would depend on which comes first
        by_token: Tensor = outputs[order.argsort()].unflatten(0, experts.shape)
        return by_token.sum(1)


class MixtureOfExperts(MegatronModule):
    """megatron's MLP of a layer: (tokens, 1, hidden) in, the same and no bias out.

    `group` (tensor parallel) and `router.normalize` are set by who builds the model; megatron hands on its config.
    replayed: (t, k), the engine's experts of the tokens that come next, all of them also with sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, *, swiglu: Function, **kwargs: object) -> None:
        """kwargs: what a layer of 0.19.2 tells any MLP; its groups are not asked, `group` is."""
        super().__init__(config=config)
        self.router, self.experts = Router(config), Experts(config, swiglu)
        self.group: dist.ProcessGroup | None = None
        self.replayed: Tensor | None = None

    def forward(self, hidden: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        if self.config.sequence_parallel:
            # what comes back of the gradient is summed below already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        tokens = hidden.flatten(0, 1)
        shares, experts = self.router(tokens, self.replayed)
        # each rank's part of the experts gives a part of these gradients; their sum is the router's and the tokens'
        tokens, shares = (copy_to_tensor_model_parallel_region(x, group=self.group) for x in (tokens, shares))
        output = self.experts(tokens, shares, experts).unflatten(0, hidden.shape[:2])
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.config.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return reduce(output, group=self.group), None
