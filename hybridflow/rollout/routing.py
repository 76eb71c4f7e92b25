"""Which experts the engine chose for each token, for a trainer that replays them (`models.routing`).

vLLM 0.32.0 returns them from the newer runner (V2) alone. On the older one (V1), which a CPU and an engine of pipeline
stages have, each router tells the choice to a function of ours, and the choice is kept where the token's keys and
values are: in the slots of the KV cache, of which there is one a token.

    slots       block of the cache x tokens a block + place in the block
    records     (slots, layers of this stage, k), beside the cache
    a request   owns blocks; when it is finished the records of their slots are the experts of the request's tokens

Where layers keep other things (a window, a state), the slots are those of the layers with all keys and values.

So nobody has to know which row of a step is whose, in how many steps a prompt was read, or what was computed again. And
a token that the prefix cache supplied has the experts of the request that computed it: it has that one's block.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.models.routing import RoutingSizes, bits

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import CompletionOutput


class RoutingRecorder(Protocol):
    """Tells the experts of a request's tokens."""

    def experts(self, name: str, output: "CompletionOutput", num_tokens: int) -> Tensor:
        """(num_tokens, layers, k) on the CPU, zero in the layers of other stages.

        name: the engine's own of a request that has finished in the last step.
        """


class ReturnedRouting:
    """What V2 returns with a response."""

    def __init__(self, sizes: RoutingSizes) -> None:
        self._sizes = sizes

    def experts(self, name: str, output: "CompletionOutput", num_tokens: int) -> Tensor:
        """See `RoutingRecorder`. vLLM's own memory, in the record's type, with rows for all layers."""
        found = output.routed_experts
        expected = (num_tokens, self._sizes.num_layers, self._sizes.chosen)
        if found is None or found.shape != expected:
            shape = None if found is None else found.shape
            raise EnvironmentProblem(f"vLLM returned routed experts of shape {shape}, expected {expected}")
        experts = torch.from_numpy(found)
        if experts.dtype != self._sizes.dtype:
            raise EnvironmentProblem(f"vLLM returned routed experts in {experts.dtype}, expected {self._sizes.dtype}")
        return experts


class SlotRecorder:
    """Records on V1. The hooks are called in every step of the model that no graph replays."""

    def __init__(self, runner: Any, sizes: RoutingSizes) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._runner, self.sizes = runner, sizes
        mixtures = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        self._layers = [module.layer_id for module in mixtures]
        groups, num_blocks = runner.kv_cache_config.kv_cache_groups, runner.kv_cache_config.num_blocks
        whole = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        kept = [0] if len(groups) == 1 else whole  # others forget tokens, or have no place for each
        if not mixtures or not kept:
            found = f"{len(mixtures)} mixtures of experts and {len(groups)} kinds of KV cache"
            raise EnvironmentProblem(f"vLLM has {found}; recorded routes need mixtures and a place for every token")
        self._group = kept[0]
        self._layer: str = groups[self._group].layer_names[0]
        self._block_tokens = int(groups[self._group].kv_cache_spec.block_size)
        shape = num_blocks * self._block_tokens + 1, len(mixtures), sizes.chosen  # slot -1: the last row
        # on a GPU in no plan: of a 30B mixture with 48 layers of 8 experts 384 bytes for each token of the cache
        self._records = torch.zeros(*shape, dtype=sizes.dtype, device=runner.device)
        for column, module in enumerate(mixtures):
            module.router.set_capture_fn(partial(self._record, column))

    def _record(self, column: int, experts: Tensor) -> None:
        """Of the tokens of a step, (t, k). Those that only fill it up have slot -1."""
        from vllm.forward_context import get_forward_context

        mappings = get_forward_context().slot_mapping
        if not mappings:  # a trial run without a cache
            return
        assert isinstance(mappings, dict), "one micro-batch a step"
        slots = mappings[self._layer]
        if len(slots) != len(experts):
            raise EnvironmentProblem(f"vLLM routed {len(experts)} tokens for {len(slots)} slots; expected one a slot")
        bits(self._records)[slots, column] = bits(experts.to(self._records.dtype))

    def experts(self, name: str, output: "CompletionOutput | None", num_tokens: int) -> Tensor:
        """See `RoutingRecorder`; also of a request that runs.

        The runner forgets a finished request when the runner's next step begins.
        """
        blocks = self._runner.requests[name].block_ids[self._group]
        places = torch.arange(num_tokens)
        slots = torch.tensor(blocks)[places // self._block_tokens] * self._block_tokens + places % self._block_tokens
        found = self.sizes.nothing(num_tokens)
        bits(found)[:, self._layers] = bits(self._records)[slots.to(self._records.device)].cpu()
        return found
