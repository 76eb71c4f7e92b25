"""A mixture of experts in place of a layer's MLP, with experts shared by the tensor-parallel ranks.

Each rank has a run of whole experts, or a share of each expert like that of a dense MLP, or a share of each of a run.
All of them see all tokens and route alike, so that no token has to be sent: the sum over the ranks is the output. Where
several replicas share the experts, each rank routes own tokens and sends them (`expert_dispatch`).

For a token x with router weights W (Shazeer et al. 2017; Mixtral, Jiang et al. 2024):

    p = softmax(W x) over all experts, in float32; the k largest count, divided by their sum if so configured
    y = sum over those experts e of p_e fc2_e swiglu(fc1_e x)

The experts of a layer are one parameter, as in vLLM, so that the engine can read the trainer's memory. megatron's own
layer has one a expert, and with tensor parallelism asks for sequence parallelism.
"""

from collections.abc import Callable
from functools import partial

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
from torch.nn.utils import skip_init

from hybridflow.models.expert_dispatch import dispatch_and_combine
from hybridflow.models.expert_groups import ExpertGroups
from hybridflow.models.layers import Function
from hybridflow.models.recomputation import again, read_and_dropped, runs_again
from hybridflow.models.routing import Replay, RoutingMismatch, replayed
from hybridflow.parallel.layout import Place


class Router(nn.Module):
    """Chooses a token's experts. Replicated: every tensor-parallel rank sees all tokens and chooses alike."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._chosen, self.normalize, self.scaling = config.moe_router_topk, True, 1.0
        self.groups = ExpertGroups()
        self.replay: Replay = replayed  # of the router's choice and the engine's
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


class SigmoidRouter(Router):
    """Of GLM-4.5, and of DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437, equations 14 to 16).

    Scores are the sigmoids of the logits, in float32. The k largest of score + bias count, of the best groups alone
    where there are groups. What they count is the score alone, divided by their sum if so configured, times `scaling`.
    The bias is no parameter of the loss and stays.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(self.weight.data.float())
        self.expert_bias = nn.Parameter(torch.zeros(len(self.weight)), requires_grad=False)

    def keep_float32(self) -> None:
        """After a cast."""
        self.float()

    def forward(self, tokens: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = linear(tokens.float(), self.weight.float()).sigmoid()
        chosen = self.groups.masked(scores + self.expert_bias).topk(self._chosen).indices
        if experts is not None:
            chosen = self.replay(chosen, experts)
        shares = scores.gather(1, chosen)
        if self.normalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return shares * self.scaling, chosen


class NarrowSigmoidRouter(SigmoidRouter):
    """Of DeepSeek-V3: the weight has the model's dtype, as in the engine, and the logits are computed in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(self.weight.data.to(config.params_dtype))

    def keep_float32(self) -> None:
        """After a cast: the bias alone."""
        self.expert_bias.data = self.expert_bias.data.float()


class SharedExpert(nn.Module):
    """This rank's share of the expert that every token goes through, cut like a dense MLP.

    gated: the outputs are multiplied by sigmoid(w x), w the same on all ranks.
    """

    def __init__(self, config: TransformerConfig, size: int, swiglu: Function, *, gated: bool = False) -> None:
        super().__init__()
        self._swiglu = swiglu
        shape = (2 * size // config.tensor_model_parallel_size, config.hidden_size)  # [gate; up]
        options = {"bias": False, "dtype": config.params_dtype}
        self.linear_fc1 = skip_init(nn.Linear, shape[1], shape[0], **options)  # every weight is loaded
        self.linear_fc2 = skip_init(nn.Linear, shape[0] // 2, shape[1], **options)
        self.gate = skip_init(nn.Linear, shape[1], 1, **options) if gated else None

    def forward(self, tokens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """(t, hidden) -> (t, hidden): this rank's summand of the outputs. group: of the ranks that have the others."""
        output: Tensor = self.linear_fc2(self._swiglu.apply(self.linear_fc1(tokens)))
        if self.gate is None:
            return output
        # each rank's summand gives a part of the gradient, whose sum is the gate's
        weight = copy_to_tensor_model_parallel_region(self.gate.weight, group=group)
        return output * linear(tokens, weight).sigmoid()


class ExpertLinear(nn.Module):
    """One matrix an expert, (experts, out, in)."""

    def __init__(self, num_experts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, rows, columns, dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Rows up to ends[e] (int32) that are not of earlier experts go to expert e."""
        return grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class Experts(nn.Module):
    """This rank's part of a layer's experts: the experts of the rank's run, and the rank's share of each."""

    def __init__(self, config: TransformerConfig, swiglu: Function, place: Place) -> None:
        super().__init__()
        self._swiglu = swiglu
        self._drops_activation = runs_again(config, "moe_act")
        size, dtype = not_none(config.moe_ffn_hidden_size) // place.tp, config.params_dtype
        self.num_held = not_none(config.num_moe_experts) // place.ep
        self._num_experts, self._holds_all = self.num_held * place.ep, place.ep == 1
        self._first = place.ep_rank * self.num_held
        self.linear_fc1 = ExpertLinear(self.num_held, 2 * size, config.hidden_size, dtype)  # [gate; up]
        self.linear_fc2 = ExpertLinear(self.num_held, config.hidden_size, size, dtype)

    def forward(self, tokens: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        """(t, hidden), (t, k), (t, k) -> (t, hidden): this rank's summand of the outputs.

        Shares are multiplied into what the second matrix reads, which is narrower than the outputs: shares are then
        kept by nobody, and are in the tokens' dtype.
        """
        order, ends = self._by_expert(experts)
        outputs = self.compute(tokens[order // experts.shape[1]], shares.flatten()[order, None], ends)
        # back in the order of the tokens, and a plain sum: adding by index would depend on which comes first
        if self._holds_all:
            by_token: Tensor = outputs[order.argsort()]
        else:
            nothing = outputs.new_zeros(experts.numel(), outputs.shape[1])
            by_token = nothing.index_put((order,), outputs)  # index_copy would keep the outputs for its gradient
        summands: Tensor = by_token.unflatten(0, experts.shape)
        return summands.sum(1)

    def compute(self, rows: Tensor, shares: Tensor, ends: Tensor) -> Tensor:
        """(r, hidden) by expert, (r, 1), and where each expert's rows end (int32) -> (r, hidden)."""
        gate_up, read = self.linear_fc1(rows, ends), partial(self.linear_fc2, ends=ends)
        if self._drops_activation:
            return read_and_dropped(read, self._activated, gate_up, shares)
        outputs: Tensor = read(self._activated(gate_up, shares))
        return outputs

    def _activated(self, gate_up: Tensor, shares: Tensor) -> Tensor:
        """What the second matrix reads."""
        hidden: Tensor = self._swiglu.apply(gate_up)
        return (hidden * shares).to(hidden.dtype)

    def _by_expert(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of tokens that go to the experts of this rank, by expert, and where each expert's end (int32).

        Where others have some of the experts, how many copies there are is read back from the device: rows for all of
        them would take ep times the memory.
        """
        numbers = torch.arange(self.num_held, device=experts.device)
        wanted = experts.flatten() if self._holds_all else (experts.flatten() - self._first) % self._num_experts
        chosen, order = wanted.sort(stable=True)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # bincount would wait for the device
        return order if self._holds_all else order[: int(ends[-1])], ends


class MixtureOfExperts(MegatronModule):
    """megatron's MLP of a layer: (tokens, 1, hidden) in, the same and no bias out.

    `group` (tensor parallel) and `router.normalize` are set by who builds the model; megatron hands on a config.
    place: which part of the experts this rank has. `ep_group`: the ranks that share a copy of the experts, where these
    are of several replicas; else None.
    replayed: (t, k), the engine's experts of the tokens that come next, all of them also with sequence parallelism.
    differences: where those are counted that the trainer would not have chosen.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        swiglu: Function,
        place: Place,
        router: type[Router] = Router,
        shared_size: int = 0,
        gated: bool = False,
        **kwargs: object,
    ) -> None:
        """shared_size: of the expert that every token goes through; 0: there is none. gated: whether it has a gate.

        kwargs: what a layer of 0.19.2 tells any MLP; `group` counts, megatron's groups do not.
        """
        super().__init__(config=config)
        self.router, self.experts = router(config), Experts(config, swiglu, place)
        if shared_size:
            self.shared_experts = SharedExpert(config, shared_size, swiglu, gated=gated)
        self.group: dist.ProcessGroup | None = None
        self.ep_group: dist.ProcessGroup | None = None
        self._place = place
        self._again, self._shared_again = runs_again(config, "moe"), runs_again(config, "shared_experts")
        self.replayed: Tensor | None = None
        self.differences: RoutingMismatch | None = None

    def forward(self, hidden: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        return again(self._routed_as_now(), hidden) if self._again else self._computed(hidden), None

    def _routed_as_now(self) -> Callable[[Tensor], Tensor]:
        """The mixture with the experts that it is to take now: when it is computed again, others of other tokens are
        set. The first time alone counts differences."""
        now, later = (self.replayed, self.differences, self.router.replay), (self.replayed, None, replayed)
        runs = iter((now, later))

        def run(hidden: Tensor) -> Tensor:
            self.replayed, self.differences, self.router.replay = next(runs)
            return self._computed(hidden)

        return run

    def _computed(self, hidden: Tensor) -> Tensor:
        if self.ep_group is not None:
            return self._computed_elsewhere(hidden, self.ep_group)
        if self.config.sequence_parallel:
            # what comes back of the gradient is summed below already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        tokens = hidden.flatten(0, 1)
        shares, experts = self.router(tokens, self.replayed)
        # each rank's part of the experts gives a part of these gradients; their sum is the router's and the tokens'
        tokens, shares = (copy_to_tensor_model_parallel_region(x, group=self.group) for x in (tokens, shares))
        output = self.experts(tokens, shares, experts)
        if self._has_shared:
            shared = partial(self.shared_experts, group=self.group)
            output = output + (again(shared, tokens) if self._shared_again else shared(tokens))
        return self._summed(output.unflatten(0, hidden.shape[:2]))

    @property
    def _has_shared(self) -> bool:
        return hasattr(self, "shared_experts")

    def _summed(self, output: Tensor) -> Tensor:
        """Over the tensor-parallel ranks; with sequence parallelism of this rank's tokens."""
        if self.config.sequence_parallel:
            summed: Tensor = reduce_scatter_to_sequence_parallel_region(output, group=self.group)
        else:
            summed = reduce_from_tensor_model_parallel_region(output, group=self.group)
        return summed

    def _computed_elsewhere(self, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        tokens = hidden.flatten(0, 1)
        shares, experts = self.router(tokens, self._own_replayed(len(tokens)))
        compute, num_held = self.experts.compute, self.experts.num_held
        output = dispatch_and_combine(
            tokens, shares, experts, place=self._place, num_held=num_held, group=group, compute=compute
        )
        return output.view(hidden.shape) + self._shared(hidden) if self._has_shared else output.view(hidden.shape)

    def _own_replayed(self, num_tokens: int) -> Tensor | None:
        """Of this rank's tokens, where sequence parallelism splits them."""
        if self.replayed is None or len(self.replayed) == num_tokens:
            return self.replayed
        start = not_none(self.group).rank() * num_tokens
        differences = self.differences
        self.router.replay = replayed if differences is None else differences.within(start, num_tokens).replayed
        return self.replayed[start : start + num_tokens]

    def _shared(self, hidden: Tensor) -> Tensor:
        """The shared expert's output by itself: the expert's shares lie on the tensor-parallel ranks."""
        output = again(self._own_shared, hidden) if self._shared_again else self._own_shared(hidden)
        return self._summed(output.unflatten(0, (-1, *hidden.shape[1:2])))

    def _own_shared(self, hidden: Tensor) -> Tensor:
        """(t, hidden): this rank's summand, of the tokens of all tensor-parallel ranks."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        output: Tensor = self.shared_experts(hidden.flatten(0, 1), self.group)
        return output
