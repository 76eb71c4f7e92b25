"""Which training layouts meet which rollout layouts: one description for the worker and the test."""

from dataclasses import dataclass

from tests.distributed.cases import CHANGES, Case

NUM_PROMPTS, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 6, 8
BUCKET_BYTES = 600_000  # several buckets a model
LARGEST_WEIGHT_BYTES = 600 * 256 * 4  # of attention, whole


@dataclass(frozen=True)
class Pair:
    family: str
    case: Case
    tp: int = 1  # of the rollout
    pp: int = 1
    apart: bool = False  # the rollout has as many ranks to itself
    whole_experts: bool = False  # on an engine's ranks

    @property
    def name(self) -> str:
        where = "ep" * self.whole_experts + "-apart" * self.apart
        return f"{self.case.name}-to-tp{self.tp}pp{self.pp}{where}-{self.family}"

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks * (2 if self.apart else 1)

    @property
    def values(self) -> dict[str, object]:
        """By the names of `PAIR_AXES`."""
        rollout = {"to_tp": self.tp, "to_pp": self.pp, "apart": self.apart, "whole": self.whole_experts}
        return {"kind": self.family, **self.case.values, **rollout}


# By reading in each other's memory and by messages: both are in every pair.
PAIR_AXES = {
    "kind": ("llama", "qwen3", "glm", "gemma3", "olmo3", "qwen3_5", "qwen3_moe", "deepseek_v3"),
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "vpp": (1, 2),
    "dp": (1, 2),
    "experts": ((1, None), (2, None)),
    "to_tp": (1, 2, 4),
    "to_pp": (1, 2),
    "apart": (False, True),
    "whole": (False, True),
}
TP, PP, DP, TP4 = Case(tp=2), Case(pp=2), Case(dp=2), Case(tp=4)
CHUNKS, CHUNKS_OF_TWO = Case(pp=2, vpp=2), Case(pp=2, vpp=2, dp=2)
WHOLE = Case(tp=2, ep=2)
DEFAULT = (
    Pair("llama", DP, 2, apart=True),  # to ranks of the rollout's own
    Pair("qwen3", TP4, 4),  # ranks share key/value heads
    Pair("glm", TP, 2),  # the engine cuts gates as they stand
    Pair("gemma3", TP),  # joined
    Pair("olmo3", TP, 2),  # norms that the engine's ranks hold whole
    Pair("qwen3_5", PP, 1, 2),  # stages stay
    Pair("qwen3_moe", WHOLE, 2, whole_experts=True),  # in place
    Pair("qwen3_moe", Case(dp=2, ep=2), 2, whole_experts=True),  # of several replicas
    Pair("deepseek_v3", CHUNKS, 2),  # out of stages, and cut further
)
REST = (
    Pair("llama", Case(tp=2, pp=2, vpp=2), 4),
    Pair("llama", TP4, 1, 2),
    Pair("llama", Case(pp=4), 2, 2),
    Pair("qwen3", CHUNKS_OF_TWO, 2, 2),
    Pair("qwen3", TP, apart=True),
    Pair("glm", Case(), apart=True),
    Pair("glm", CHUNKS_OF_TWO, 1, 2),
    Pair("glm", TP4, 4),
    Pair("gemma3", Case(), apart=True),
    Pair("gemma3", CHUNKS_OF_TWO, 4),
    Pair("gemma3", PP, 1, 2),  # stages with other shares of windows
    Pair("gemma3", Case(tp=4, pp=2, vpp=2), 2, 2),
    Pair("olmo3", CHUNKS, 1, 2),
    Pair("olmo3", Case(), apart=True),
    Pair("olmo3", Case(tp=4, dp=2), 4),
    Pair("qwen3_5", TP, 2, apart=True),
    Pair("qwen3_5", CHUNKS_OF_TWO, 4),
    Pair("qwen3_5", TP4, 4),
    Pair("qwen3_moe", CHUNKS, 1, 2, apart=True),
    Pair("qwen3_moe", TP4, 4, apart=True, whole_experts=True),
    Pair("qwen3_moe", WHOLE, 2),  # the engine cuts each expert
    Pair("deepseek_v3", Case(tp=4, ep=2), 1, 2),
    Pair("deepseek_v3", WHOLE, apart=True, whole_experts=True),  # all on one rank
    Pair("deepseek_v3", Case(tp=2, pp=2, vpp=2, dp=2, ep=2), 4, 2, whole_experts=True),
    Pair("opt_350m", PP, 2),  # whole matrices at both ends, out of stages
    # what an engine is told of a config, one rank shows
    *(Pair(family, Case()) for family in CHANGES),
)
WEEKLY = tuple(
    Pair(("llama", "qwen2")[number % 2], case, tp, pp)
    for case in (Case(), TP, PP, CHUNKS, TP4, Case(tp=2, dp=2), Case(tp=2, pp=2, dp=2, sequence_parallel=True))
    for number, (tp, pp) in enumerate(((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)))
    if case.num_ranks % (tp * pp) == 0
)
PAIRS = (*DEFAULT, *REST, *WEEKLY)
