"""vLLM 0.32.0's gated delta nets on a CPU: by the trainer's own delta rule, from the weights as they lie.

vLLM's kernels there take bfloat16 and heads of 128 alone, and the convolution a packed copy of its weight, which
training would never update. And Qwen3.5 imports what reads images, which needs a package that text does not need.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from hybridflow.models.delta_rule import NO_PARENT, Sequences, delta_rule_with_states, unit
from hybridflow.parallel.versions import replace_in

IMAGES = ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2")
FUNCTIONS = "torchvision.transforms.v2.functional"


def compute_delta_nets() -> None:
    """vLLM makes an operator of the function when the first layer is made. May be called again."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as theirs
    from vllm.utils.torch_utils import LayerNameType

    core.__annotations__["layer_name"] = LayerNameType  # of which vLLM makes the operator's schema
    replace_in(theirs, cpu_gdn_attention_core=core)


def register_language_models(architectures: tuple[str, ...]) -> None:
    """Have vLLM take its classes as they are imported here: it would look at each in a process of its own.

    architectures: of vllm.model_executor.models.qwen3_5.
    """
    from vllm.model_executor.models import ModelRegistry

    missing = importlib.util.find_spec("torchvision") is None
    if missing:  # transformers and vLLM name it where images are read, and nothing else of it is used
        sys.modules |= _empty_modules()
    try:
        with _without_warnings():
            module = importlib.import_module("vllm.model_executor.models.qwen3_5")
    finally:
        if missing:
            for name in (*IMAGES, FUNCTIONS):
                del sys.modules[name]
    for architecture in architectures:
        ModelRegistry.register_model(architecture, getattr(module, architecture))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Within the block transformers does not warn of what reads images more slowly than it could."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _empty_modules() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {name: ModuleType(name) for name in (*IMAGES, FUNCTIONS)}
    for name, module in found.items():
        vars(module).update(__path__=[], __getattr__=_nothing)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(found[parent], leaf, module)
    return found


def _nothing(name: str) -> Any:
    """Whatever is asked for by name while classes are defined."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """In place of vLLM's: (t, channels) and (t, heads) of a step in, (t, heads, dv) out.

    The cache has of a sequence the last inputs of the convolution, (width - 1, channels), and the state, as (heads, dk,
    dv).
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context: Any = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a trial run without a cache
        return
    assert isinstance(context.attn_metadata, dict), "one micro-batch a step"
    about: Any = context.attn_metadata[layer.prefix]
    count = about.num_decodes + about.num_prefills
    assert about.num_spec_decodes == 0, "drafts are not asked for"
    if not count:
        return
    starts = about.non_spec_query_start_loc[: count + 1].tolist()
    tokens, lengths = starts[-1], tuple(stop - start for start, stop in pairwise(starts))
    slots = about.non_spec_state_indices_tensor[:count].long()
    continues = torch.ones(count, dtype=torch.bool)
    if about.has_initial_state is not None:
        continues[about.num_decodes :] = about.has_initial_state[about.num_decodes : count]
    inputs, states = layer.kv_cache[0], _by_keys(layer)
    before = torch.where(continues[:, None, None], inputs[slots], 0).to(mixed_qkv.dtype)
    heads, inputs_after = _convolved(mixed_qkv[:tokens], before, _convolution(layer.conv1d), lengths)
    inputs[slots] = inputs_after.to(inputs.dtype)
    q, k, v = (x.squeeze(0) for x in layer.rearrange_mixed_qkv(heads))
    decay = -layer.A_log.float().exp() * softplus(a[:tokens].float() + layer.dt_bias.float())
    rate = b[:tokens].float().sigmoid()
    state = torch.where(continues[:, None, None, None], states[slots].float(), 0)
    if lengths == (1,) * count:
        out, state = _one_token(q, k, v, decay, rate, state=state)
    else:
        sequences = Sequences(lengths, (NO_PARENT,) * count)
        out, state = delta_rule_with_states(q, k, v, decay, rate, sequences=sequences, states=state)
    core_attn_out[:tokens] = out.to(core_attn_out.dtype)
    states[slots] = state.to(states.dtype)


def _convolution(layer: Any) -> Tensor:
    """(channels, width). Where the weights are vLLM's own it may have packed them, and keeps them as they were."""
    unpacked: Tensor | None = getattr(layer, "_cpu_unpacked_conv_weight", None)
    weight: Tensor = layer.weight.squeeze(1) if unpacked is None else unpacked
    return weight


def _by_keys(layer: Any) -> Tensor:
    """(slots, heads, dk, dv): of vLLM's (slots, heads, dv, dk) the same memory."""
    states: Tensor = layer.kv_cache[1]
    return states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)


def _convolved(x: Tensor, before: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(t, channels) with silu, and the last inputs of each sequence. before: (sequences, width - 1, channels)."""
    kept = before.shape[1]
    if lengths == (1,) * len(before):
        lines = torch.cat([before, x[:, None]], dim=1)
        return silu((lines * weight.T).sum(1)), lines[:, 1:]
    outputs, after = [], []
    for line, piece in zip(before, x.split(lengths), strict=True):
        whole = torch.cat([line, piece])
        outputs.append(conv1d(whole.T[None], weight[:, None], groups=len(weight))[0].T)
        after.append(whole[len(whole) - kept :])
    return silu(torch.cat(outputs)), torch.stack(after)


def _one_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, *, state: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sequence. See `models.delta_rule` for the equation."""
    shared = v.shape[1] // k.shape[1]
    q, k = (unit(x.float()).repeat_interleave(shared, 1) for x in (q, k))
    state = state * decay.exp()[..., None, None]
    update = (v.float() - (state * k[..., None]).sum(-2)) * rate[..., None]
    state = state + k[..., None] * update[..., None, :]
    return (state * (q * q.shape[-1] ** -0.5)[..., None]).sum(-2), state
