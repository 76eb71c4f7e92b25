"""Which training layouts meet which rollout layouts: one description for the worker and the test."""

from dataclasses import dataclass
from itertools import product

from tests.distributed.cases import Case
from tests.tiny_models import ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN

NUM_LAYERS = 4
# name: architecture, tied embeddings, key/value heads
FAMILIES = {
    "llama": ("llama", False, 4),
    "qwen2": ("qwen2", True, 4),
    "gqa": ("qwen2", False, 2),
    "mistral": ("mistral", False, 4),
    "qwen3": ("qwen3", True, 4),
    "glm": ("glm", False, 2),
    "opt": ("opt", True, 8),
    "opt_350m": ("opt_350m", True, 8),  # norms after the residual sums, embeddings of another width: both, or one
    "opt_post_norm": ("opt", True, 8),
    "opt_projected": ("opt", False, 8),
    "mixtral": ("mixtral", False, 4),
    "rope_llama3": ("llama", False, 4),
    "rope_linear": ("llama", False, 4),
    "rope_yarn": ("llama", False, 4),
    "rope_yarn_qwen2": ("qwen2", True, 4),
    "rope_yarn_qwen3": ("qwen3", False, 2),
    "qwen3_moe": ("qwen3_moe", False, 4),
    "glm4_moe": ("glm4_moe", False, 4),
    "qwen3_5": ("qwen3_5", True, 4),
    "qwen3_5_moe": ("qwen3_5_moe", False, 2),
    "gemma3": ("gemma3", True, 4),
    "gemma3_untied": ("gemma3", False, 4),  # whose tokens are not as good as certain
    "phi3": ("phi3", False, 4),
    "ministral3": ("ministral3", False, 4),
    "smollm3": ("smollm3", True, 4),
    "olmo3": ("olmo3", False, 4),
    "glm4_moe_lite": ("glm4_moe_lite", False, 8),
    "deepseek_v3": ("deepseek_v3", False, 8),
    "moonlight": ("moonlight", False, 8),
    "own_head": ("qwen3", True, 4),  # config.json says tied, the weights have another output layer
}
CHANGES = {
    "rope_llama3": {"rope_parameters": ROPE_LLAMA3},
    "rope_linear": {"rope_parameters": ROPE_LINEAR},
    **{name: {"rope_parameters": ROPE_YARN} for name in ("rope_yarn", "rope_yarn_qwen2", "rope_yarn_qwen3")},
    "opt_post_norm": {"do_layer_norm_before": False},
    "opt_projected": {"word_embed_proj_dim": 40},
    "own_head": {},
    "gemma3_untied": {},
}  # to configs
NUM_PROMPTS, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 6, 8
BUCKET_BYTES = 600_000  # several buckets a model
LARGEST_WEIGHT_BYTES = 600 * 256 * 4  # of attention, whole

TRAINING = (
    Case(),
    Case(tp=2),
    Case(pp=2),
    Case(pp=2, vpp=2),
    Case(tp=2, pp=2),
    Case(tp=2, dp=2),
    Case(pp=2, dp=2),
    Case(pp=4),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(tp=2, pp=2, dp=2),
    Case(tp=4, dp=2),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, recompute="full"),
)


@dataclass(frozen=True)
class Pair:
    case: Case
    tp: int  # of the rollout
    pp: int
    family: str
    trainer_ranks: int | None = None  # fewer than the world: the rollout has the other ranks to itself
    whole_experts: bool = False  # on an engine's ranks

    @property
    def name(self) -> str:
        where = "ep" * self.whole_experts + ("" if self.trainer_ranks is None else "-apart")
        return f"{self.case.name}-to-tp{self.tp}pp{self.pp}{where}-{self.family}"

    @property
    def num_ranks(self) -> int:
        return self.case.num_ranks if self.trainer_ranks is None else 2 * self.trainer_ranks


ROLLOUTS = tuple(product((1, 2, 4), (1, 2)))


def _pairs() -> list[Pair]:
    """Every training layout with every rollout layout that fits; tied and untied embeddings take turns."""
    pairs = [
        Pair(case, tp, pp, ("llama", "qwen2")[(number + turn) % 2])
        for number, case in enumerate(TRAINING)
        for turn, (tp, pp) in enumerate(ROLLOUTS)
        if case.num_ranks % (tp * pp) == 0
    ]
    apart = product((Case(tp=2), Case(pp=2), Case(dp=2)), ((1, 1), (2, 1), (1, 2)))
    pairs += [
        Pair(case, *sizes, ("llama", "qwen2")[turn % 2], trainer_ranks=2) for turn, (case, sizes) in enumerate(apart)
    ]
    # fewer key/value heads than ranks, in training, in the rollout, in both
    shared = ((Case(tp=4), 2, 1), (Case(tp=4), 4, 1), (Case(tp=2, pp=2), 4, 1), (Case(tp=4), 1, 2))
    pairs += [Pair(case, tp, pp, "gqa") for case, tp, pp in shared]
    # the other families, whose weights are other ones: in place, joined, cut further
    layouts = ((Case(tp=2), 2, 1), (Case(tp=2), 1, 1), (Case(pp=2), 2, 1))
    others = [family for family in FAMILIES if family not in ("llama", "qwen2", "gqa")]
    fewer = dict.fromkeys(CHANGES, ((Case(), 1, 1),)) | {
        "opt_350m": ((Case(), 1, 1), *layouts[1:]),
        "own_head": layouts,
        "moonlight": layouts[:2],
    }
    # stages with other shares of windows
    pairs += [Pair(Case(pp=2), 1, 2, "gemma3"), Pair(Case(tp=2, pp=2, sequence_parallel=True), 2, 2, "olmo3")]
    pairs += [Pair(*layout, name) for name in others for layout in fewer.get(name, layouts)]
    # experts: cut as the engine cuts them, otherwise, over replicas, and on ranks of the engine's own
    whole, over = Case(tp=2, ep=2), Case(dp=2, ep=2)
    experts = [(whole, 2, True), (whole, 2, False), (Case(tp=2), 2, True), (whole, 1, False), (over, 2, True)]
    experts += [
        (over, 1, False),
        (Case(tp=2, dp=2, ep=4, sequence_parallel=True), 4, True),
        (Case(tp=4, ep=2, etp=2), 2, True),
    ]
    pairs += [Pair(case, tp, 1, "qwen3_moe", whole_experts=ep) for case, tp, ep in experts]
    pairs.append(Pair(Case(pp=2, dp=2, ep=2), 2, 2, "mixtral", whole_experts=True))
    pairs.append(Pair(whole, 2, 1, "deepseek_v3", whole_experts=True))
    pairs.append(Pair(Case(tp=2, pp=2, sequence_parallel=True), 4, 1, "glm4_moe_lite"))
    return [*pairs, Pair(whole, 2, 1, "mixtral", trainer_ranks=2, whole_experts=True)]


PAIRS = _pairs()
DEFAULT = {  # of the default set: each way to hand over once
    "tp2pp1dp1vpp1-none-to-tp2pp1-qwen2",  # in place
    "tp2pp1dp1vpp1-none-to-tp1pp1-qwen2",  # joined
    "tp1pp2dp1vpp2-none-to-tp2pp1-qwen2",  # out of stages, and cut further
    "tp1pp2dp1vpp1-none-to-tp1pp2-qwen2",  # stages stay
    "tp2pp2dp1vpp1sp-none-to-tp4pp1-llama",  # four ranks
    "tp4pp1dp1vpp1-none-to-tp4pp1-gqa",  # ranks share key/value heads
    "tp1pp1dp2vpp1-none-to-tp2pp1-apart-qwen2",  # to ranks of the rollout's own
    "tp2pp1dp1vpp1ep2etpNone-none-to-tp2pp1ep-qwen3_moe",  # whole experts in place
    "tp1pp1dp2vpp1ep2etpNone-none-to-tp2pp1ep-qwen3_moe",  # of several replicas
    "tp2pp1dp1vpp1-none-to-tp2pp1-qwen3_5",  # states, in place
    "tp2pp1dp1vpp1-none-to-tp1pp1-gemma3",  # windows, joined
    "tp1pp2dp1vpp1-none-to-tp2pp1-deepseek_v3",  # latent attention, out of stages
    "tp2pp1dp1vpp1-none-to-tp2pp1-olmo3",  # norms that the engine's ranks hold whole
}
