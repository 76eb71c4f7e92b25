"""Which way tokens take to their experts: chosen once, when a model is built, and alike on all ranks."""

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none

from hybridflow.errors import EnvironmentProblem
from hybridflow.models.deep_ep import DeepEP, why_not_deep_ep
from hybridflow.models.expert_dispatch import AllToAll, TokenDispatcher, WithinReplica
from hybridflow.models.layer_classes import DispatcherName, asks_for_deep_ep, expert_kernels
from hybridflow.parallel.agreement import failures
from hybridflow.parallel.grid import Grid


def token_dispatcher(config: TransformerConfig, grid: Grid, wanted: DispatcherName) -> TokenDispatcher:
    """Of a mixture. Collective over the ranks that share the experts, where these are of several replicas.

    Errors: EnvironmentProblem on all of these where DeepEP is wanted and one of them cannot have it, with its reason.
    """
    place, num_experts = grid.place("experts"), not_none(config.num_moe_experts)
    num_held = num_experts // place.ep
    if grid.layout.dense_per_expert_copy == 1:
        sequence_parallel = config.sequence_parallel
        return WithinReplica(place, num_held, grid.groups.tp, sequence_parallel=sequence_parallel)
    group = grid.groups.tp_ep
    if asks_for_deep_ep(wanted):
        missing = failures(why_not_deep_ep(place, config.params_dtype, config.hidden_size), group)
        if not missing:
            return DeepEP(group, num_experts)
        if wanted == "deepep":
            raise EnvironmentProblem(f"token_dispatcher: deepep: {'; '.join(missing)}")
    return AllToAll(place, num_held, group, expert_kernels(kept=True))
