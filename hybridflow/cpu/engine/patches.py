"""What vLLM 0.32.0 needs on a CPU in order to live inside a trainer. Each change has a reason.

Next tokens are drawn by a kernel in C: the tokens that vLLM draws, and their log-probs alone. vLLM takes the log-probs
of the whole vocabulary, and an exponential in float64 of nearly each token to rule it out.
"""

import functools
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.cpu.engine.decoder import decoder_in_c
from hybridflow.cpu.engine.kernels import Methods, attention_in_c, linear_by_torch, linear_in_c, norm_in_c, swiglu_in_c
from hybridflow.cpu.kernels.library import library
from hybridflow.cpu.kernels.sampling import draw
from hybridflow.parallel.versions import replace_in

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


def patch() -> None:
    """May be called again. The kernels come when this process has them: ranks have agreed on that."""
    _patch_once()
    if library() is not None:
        _compute_as_the_trainer()


@functools.cache
def _patch_once() -> None:
    _read_live_weights()
    _read_live_experts()
    _wait_without_spinning()
    _register_kernels_once()
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # in talk between stages


@functools.cache
def patch_latent_attention() -> None:
    """Of models that have it alone."""
    _turn_heads_of_latent_attention()
    _route_in_float32()


def _read_live_weights() -> None:
    """Linear layers compute from the weight itself.

    vLLM would repack each weight and delete the original: a second copy that training never updates.
    """
    import vllm.model_executor.layers.utils as utils

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = linear_in_c if library() is not None else linear_by_torch

    replace_in(utils, dispatch_cpu_unquantized_gemm=dispatch)


def _read_live_experts() -> None:
    """Experts compute from the weights themselves, for the same reason."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    replace_in(CPUUnquantizedExperts, process_weights_after_loading=lambda self, layer: None, apply=_apply_experts)


def _apply_experts(
    self: object,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: object,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *args: object,
    **kwargs: object,
) -> None:
    """output (t, hidden) <- sum over a token's experts of weight x w2 swiglu(w1 x); w1 is [gate; up] of each expert."""
    chosen = topk_ids.flatten().long()
    if expert_map is not None:  # a rank has some of the experts whole: the rank's numbers, -1 for the others
        chosen = expert_map[chosen].long()
        chosen = torch.where(chosen < 0, len(w1), chosen)
    order = chosen.argsort(stable=True)
    ends = chosen.bincount(minlength=len(w1) + 1)[: len(w1)].cumsum(0).to(torch.int32)
    order = order[: int(ends[-1])]
    gate, up = torch.nn.functional.grouped_mm(
        hidden_states[order // topk_ids.shape[1]], w1.transpose(1, 2), offs=ends
    ).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    outputs = torch.nn.functional.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    outputs = outputs * topk_weights.flatten()[order, None]
    by_token = outputs.new_zeros(topk_ids.numel(), outputs.shape[1]).index_copy(0, order, outputs)
    output.copy_(by_token.unflatten(0, topk_ids.shape).sum(1))


def _turn_heads_of_latent_attention() -> None:
    """By torch. vLLM 0.32.0's kernel for CPUs turns queries of three dimensions, as these are, wrongly."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    theirs = vars(RotaryEmbedding)["forward_cpu"]

    def turned(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return theirs(self, positions, query, key)

    replace_in(RotaryEmbedding, forward_cpu=turned)


def _route_in_float32() -> None:
    """A router whose logits are to be float32 computes them so, as vLLM's kernels on GPUs do.

    On a CPU vLLM rounds the logits to the weight's dtype first.
    """
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    theirs = vars(GateLinear)["forward"]

    def routed(self: Any, x: torch.Tensor) -> Any:
        if self.out_dtype != torch.float32 or self.weight.dtype == torch.float32 or self.bias is not None:
            return theirs(self, x)
        logits = torch.nn.functional.linear(x.float(), self.weight.float())
        return (logits, None) if self.return_bias else logits

    replace_in(GateLinear, forward=routed)


def _wait_without_spinning() -> None:
    """Ranks talk over gloo.

    vLLM's own shared memory spins while it waits: with more ranks than cores a step took seconds instead of
    milliseconds. It also leaves 4 MiB a rank in /dev/shm behind every run.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    replace_in(CpuCommunicator, _all_group_ranks_share_shm_group_name=lambda self: False)


@functools.cache
def _compute_as_the_trainer() -> None:
    """By the kernels in C."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.models.llama import LlamaDecoderLayer
    from vllm.model_executor.models.mistral import MistralDecoderLayer
    from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.sample.sampler import Sampler

    replace_in(CPUAttentionBackendImpl, **attention_in_c(CPUAttentionBackendImpl))
    replace_in(RMSNorm, **norm_in_c(RMSNorm))
    replace_in(SiluAndMul, **swiglu_in_c())
    for layer in (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer):
        replace_in(layer, **decoder_in_c(layer))
    replace_in(Sampler, **sampler_in_c(Sampler))


def _register_kernels_once() -> None:
    """Every engine wraps vLLM's kernels again, around the wrappers of the engine before, in 0.2 s a time."""
    from vllm.platforms import current_platform

    once = functools.cache(current_platform.register_triton_kernel_overrides)
    replace_in(type(current_platform), register_triton_kernel_overrides=staticmethod(once))


LOG_PROBS = "processed_logprobs"  # of the distribution that is drawn from
SEEDS = 2**31  # vLLM draws one below this for each token, from the generator of the token's request


def sampler_in_c(theirs: type) -> Methods:
    """For vLLM's sampler: where every request draws by the request's seed from all that the logits leave."""
    their_forward = vars(theirs)["forward"]

    def forward(
        self: Any,
        logits: Tensor,
        sampling_metadata: "SamplingMetadata",
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        about, mode = sampling_metadata, logprobs_mode_override or self.logprobs_mode
        logits = logits.to(torch.float32)
        if predict_bonus_token or mode != LOG_PROBS or not _draws_from_all(self, logits, about):
            return their_forward(self, logits, about, predict_bonus_token, logprobs_mode_override)
        logits = self.apply_logits_processors(logits, about, predict_bonus_token)
        logits = self.apply_temperature(logits, about.temperature, about.all_random)
        for processor in about.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        tokens, log_probs, ranks = draw(logits, _seeds(about.generators))
        ids = tokens.to(torch.int32).unsqueeze(-1)
        return SamplerOutput(ids, LogprobsTensors(ids, log_probs.unsqueeze(-1), ranks))

    return {"forward": forward}


def _draws_from_all(sampler: Any, logits: Tensor, about: "SamplingMetadata") -> bool:
    return (
        about.all_random
        and about.top_k is None
        and about.top_p is None
        and about.max_num_logprobs == 0
        and not about.logprob_token_ids
        and len(about.generators) == len(logits)
        and not sampler.use_fp64_gumbel
        and logits.stride(-1) == 1
    )


def _seeds(generators: dict[int, torch.Generator]) -> Tensor:
    """Of each row, as vLLM draws it: one number of the request's generator."""
    seeds = torch.empty(len(generators), dtype=torch.int64)
    each = seeds.split(1)
    for row, generator in generators.items():
        each[row].random_(0, SEEDS, generator=generator)
    return seeds
