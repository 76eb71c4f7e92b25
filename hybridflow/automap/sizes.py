"""Values that a search goes over, whatever has them: a role or the engine. Pure."""

from collections.abc import Iterable
from typing import Any

from hybridflow.architecture.sharing import check_expert_shares, check_parallel
from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Cost
from hybridflow.config import RoleConfig, RolloutConfig
from hybridflow.errors import ConfigError
from hybridflow.placement.context_parallel import shares_tokens

MOST_STAGES = 32
TOKENS_OF_A_PART = 8192  # that a rank has at least where ranks share tokens: with fewer, messages are the longer part


def tensor_sizes(spec: ModelSpec, num_ranks: int, ranks_per_host: int, *, across: bool) -> list[int]:
    """That divide the model and the ranks, and stay on a host unless they may lie across."""
    most = num_ranks if across else min(num_ranks, ranks_per_host)
    stay = [tp for tp in range(1, most + 1) if across or ranks_per_host % tp == 0]
    return [tp for tp in stay if num_ranks % tp == 0 and divides(spec, tp)]


def stage_counts(spec: ModelSpec, num_ranks: int, tp: int) -> range:
    """Pipeline stages that there may be, whether or not they divide the ranks; none where tp is more than these."""
    return range(1, min(MOST_STAGES, spec.num_layers, num_ranks // tp) + 1)


def divides(spec: ModelSpec, tp: int) -> bool:
    """Whether so many ranks can share the model."""
    try:
        check_parallel(spec, "", tp)
    except ConfigError:
        return False
    return True


def shares_experts(spec: ModelSpec, tp: int) -> bool:
    """Whether so many ranks can share each expert; true where there are none."""
    try:
        check_expert_shares(spec, "", tp)
    except ConfigError:
        return False
    return True


def deals_experts(spec: ModelSpec, ep: int) -> bool:
    """Whether there are experts, and several ranks can have as many of them each."""
    return ep > 1 and spec.num_experts > 0 and spec.num_experts % ep == 0


def expert_sizes(spec: ModelSpec, tp: int, copies: int, *, most: int) -> list[int]:
    """Of expert parallelism: 1, parts of the tp ranks of a replica, and whole experts on the ranks of a replica or of
    several copies, at most `most` ranks."""
    parts = [ep for ep in range(2, tp) if tp % ep == 0]
    over = [tp * taken for taken in range(1, copies + 1) if copies % taken == 0]
    return [1, *(ep for ep in (*parts, *over) if ep <= max(most, tp) and deals_experts(spec, ep))]


def context_sizes(spec: ModelSpec, tp: int, longest: int) -> list[int]:
    """Powers of two that the model can share tokens by, and that leave a rank many of the longest sequence."""
    sizes = [1]
    while 2 * sizes[-1] * TOKENS_OF_A_PART <= longest and shares_tokens(spec, tp, 2 * sizes[-1]):
        sizes.append(2 * sizes[-1])
    return sizes


def values(free: frozenset[str], given: RoleConfig | RolloutConfig, key: str, all_values: Iterable[Any]) -> list[Any]:
    """All where the key is free, else the config's."""
    return list(all_values) if key in free else [getattr(given, key)]


def at_once(cost: Cost, count: int, *, hosts: int) -> float:
    """Seconds of so many alike on hosts that are shared, as `timeline` has it; else of one.

    They are taken to be spread evenly over the hosts; what else goes on at the time is left out.
    """
    here = max(1, count // max(1, hosts))
    others = (here - 1) * cost.load
    return cost.on_share(min(1.0, max(1 / here, 1 - others)))
