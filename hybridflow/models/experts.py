"""A mixture of experts in place of a layer's MLP, with experts shared by ranks.

Each rank has a run of whole experts, or a share of each expert like that of a dense MLP, or a share of each of a run.
How tokens get to them is in `expert_dispatch`, how they are ordered by expert in `expert_rows`.

For a token x with router weights W (Shazeer et al. 2017; Mixtral, Jiang et al. 2024):

    p = softmax(W x) over all experts, in float32; the k largest count, divided by their sum if so configured
    y = sum over those experts e of p_e fc2_e swiglu(fc1_e x)

Axes of a router's tensors, as suffixes: t tokens, e experts, k the chosen experts of a token.

The experts of a layer are one parameter, as in vLLM, so that the engine can read the trainer's memory. megatron's own
layer has one a expert, and with tensor parallelism asks for sequence parallelism.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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

from hybridflow.architecture.latent_fields import BEST_OF_GROUP
from hybridflow.models.expert_dispatch import Arrived, TokenDispatcher
from hybridflow.models.expert_rows import ExpertKernels, rows_of, sums_of
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
        self.count: Callable[[Tensor], None] | None = None  # of the experts that are chosen
        num_experts = not_none(config.num_moe_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=config.params_dtype))

    def forward(self, tokens: Tensor, engine_tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(t, hidden) -> (t, k) float32 shares of the chosen experts, and (t, k) their numbers.

        engine_tk: the engine's experts, which are taken; the shares stay this router's own. See `models.routing`.

        The logits are in the weights' dtype, as vLLM 0.32.0's gates of these families give them on every device.
        """
        p_te = softmax(linear(tokens, self.weight), dim=-1, dtype=torch.float32)
        p_tk, chosen_tk = p_te.topk(self._chosen)
        if engine_tk is not None:
            chosen_tk = self.replay(chosen_tk, engine_tk)
            p_tk = p_te.gather(1, chosen_tk)
        return p_tk / p_tk.sum(-1, keepdim=True) if self.normalize else p_tk, chosen_tk


class SigmoidRouter(Router):
    """Of GLM-4.5, and of DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437, equations 14 to 16).

    Scores s are the sigmoids of the logits, in float32. The k largest of s + bias count, of the best groups alone where
    there are groups. Their shares g are s alone, divided by their sum if so configured, times `scaling`.
    The bias is no parameter of the loss and stays.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(self.weight.data.float())
        self.expert_bias = nn.Parameter(torch.zeros(len(self.weight)), requires_grad=False)

    def keep_float32(self) -> None:
        """Cast the weight and the bias back to float32, after a cast of the model."""
        self.float()

    def forward(self, tokens: Tensor, engine_tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        s_te = linear(tokens.float(), self.weight.float()).sigmoid()
        chosen_tk = self.groups.masked(s_te + self.expert_bias).topk(self._chosen).indices
        if engine_tk is not None:
            chosen_tk = self.replay(chosen_tk, engine_tk)
        s_tk = s_te.gather(1, chosen_tk)
        g_tk = s_tk / (s_tk.sum(-1, keepdim=True) + 1e-20) if self.normalize else s_tk
        return g_tk * self.scaling, chosen_tk


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

    def __init__(self, config: TransformerConfig, kernels: ExpertKernels, place: Place) -> None:
        super().__init__()
        self._kernels, self._drops_activation = kernels, runs_again(config, "moe_act")
        size, dtype = not_none(config.moe_ffn_hidden_size) // place.tp, config.params_dtype
        self.num_held = not_none(config.num_moe_experts) // place.ep
        self.linear_fc1 = ExpertLinear(self.num_held, 2 * size, config.hidden_size, dtype)  # [gate; up]
        self.linear_fc2 = ExpertLinear(self.num_held, config.hidden_size, size, dtype)

    def forward(self, arrived: Arrived) -> Tensor:
        """(n, hidden) of the outputs of the tokens that have arrived: of each the sum over the experts held here.

        Shares multiply what the second matrix reads, which is narrower than the outputs. The backward pass then needs
        no outputs without shares.
        """
        kernels, order = self._kernels, self._kernels.order(arrived.experts, self.num_held, arrived.num_copies)
        gate_up = self.linear_fc1(rows_of(arrived.tokens, order, kernels), order.ends)
        read, activated = partial(self.linear_fc2, ends=order.ends), partial(kernels.activated, order=order)
        if self._drops_activation:
            output_rows = read_and_dropped(read, activated, gate_up, arrived.shares)
        else:
            output_rows = read(activated(gate_up, arrived.shares))
        return sums_of(output_rows, order, kernels)


class MixtureOfExperts(MegatronModule):
    """megatron's MLP of a layer: (tokens, 1, hidden) in, the same and no bias out.

    `dispatcher`, `group` (tensor parallel) and `router.normalize` are set by who builds the model; megatron hands on a
    config. place: which part of the experts this rank has.
    engine_experts: (t, k), the engine's experts of the next tokens: of all tokens, also with sequence parallelism.
    differences: where those are counted that the trainer would not have chosen.
    """

    dispatcher: TokenDispatcher

    def __init__(
        self,
        config: TransformerConfig,
        *,
        swiglu: Function,
        kernels: ExpertKernels,
        place: Place,
        router: type[Router] = Router,
        shared_size: int = 0,
        gated: bool = False,
        **kwargs: object,
    ) -> None:
        """swiglu: of the expert that every token goes through; shared_size: its size; 0: there is none. gated: whether
        it has a gate.

        kwargs: what a layer of 0.19.2 tells any MLP; `group` counts, megatron's groups do not.
        """
        super().__init__(config=config)
        self.router, self.experts = router(config), Experts(config, kernels, place)
        if shared_size:
            self.shared_experts = SharedExpert(config, shared_size, swiglu, gated=gated)
        self.group: dist.ProcessGroup | None = None
        self._again, self._shared_again = runs_again(config, "moe"), runs_again(config, "shared_experts")
        self.engine_experts: Tensor | None = None
        self.differences: RoutingMismatch | None = None

    def forward(self, hidden: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        return again(self._routed_as_now(), hidden) if self._again else self._computed(hidden), None

    def _routed_as_now(self) -> Callable[[Tensor], Tensor]:
        """The function restores this micro-batch's replayed experts before each run. Its first run alone counts
        differences and loads."""
        router = self.router
        now = self.engine_experts, self.differences, router.replay, router.count
        runs = iter((now, (self.engine_experts, None, replayed, None)))

        def run(hidden: Tensor) -> Tensor:
            self.engine_experts, self.differences, router.replay, router.count = next(runs)
            return self._computed(hidden)

        return run

    def _computed(self, hidden: Tensor) -> Tensor:
        tokens = self.dispatcher.tokens(hidden)
        sent = self.dispatcher.dispatch(tokens, *self.router(tokens, self._own_replayed(len(tokens))))
        if not self._has_shared:
            return sent.back(self.experts(sent.arrived())).view(hidden.shape)
        if self.dispatcher.sends:
            shared_output = self._shared(hidden)  # while tokens travel
            return sent.back(self.experts(sent.arrived())).view(hidden.shape) + shared_output
        arrived, shared = sent.arrived(), partial(self.shared_experts, group=self.group)
        output = self.experts(arrived)
        output = output + (again(shared, arrived.tokens) if self._shared_again else shared(arrived.tokens))
        return sent.back(output).view(hidden.shape)

    @property
    def _has_shared(self) -> bool:
        return hasattr(self, "shared_experts")

    def _own_replayed(self, num_tokens: int) -> Tensor | None:
        """Of the tokens that this rank routes, where sequence parallelism splits them."""
        if self.engine_experts is None or len(self.engine_experts) == num_tokens:
            return self.engine_experts
        start = not_none(self.group).rank() * num_tokens
        differences = self.differences
        self.router.replay = replayed if differences is None else differences.within(start, num_tokens).replayed
        return self.engine_experts[start : start + num_tokens]

    def _shared(self, hidden: Tensor) -> Tensor:
        """The shared expert's output by itself: the expert's shares lie on the tensor-parallel ranks."""
        output = again(self._own_shared, hidden) if self._shared_again else self._own_shared(hidden)
        sum_up = reduce_scatter_to_sequence_parallel_region if self.config.sequence_parallel else _reduce
        summed: Tensor = sum_up(output.unflatten(0, (-1, *hidden.shape[1:2])), group=self.group)
        return summed

    def _own_shared(self, hidden: Tensor) -> Tensor:
        """(t, hidden): this rank's summand, of the tokens of all tensor-parallel ranks."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.group)
        output: Tensor = self.shared_experts(hidden.flatten(0, 1), self.group)
        return output


def _reduce(output: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    summed: Tensor = reduce_from_tensor_model_parallel_region(output, group=group)
    return summed


class ExpertGroups(NamedTuple):
    """The experts in `number` equal runs; a token's experts are of the `chosen` groups with the best scores."""

    number: int = 1
    chosen: int = 1

    def masked(self, scores: Tensor) -> Tensor:
        """(t, experts) -> the same with minus infinity in the groups that are not chosen."""
        if self.chosen == self.number:
            return scores
        by_group = scores.unflatten(1, (self.number, -1))
        best = by_group.topk(BEST_OF_GROUP).values.sum(-1)  # (t, groups)
        chosen = best.new_zeros(best.shape).bool().scatter(1, best.topk(self.chosen).indices, True)
        masked: Tensor = by_group.masked_fill(~chosen[:, :, None], float("-inf")).flatten(1)
        return masked
