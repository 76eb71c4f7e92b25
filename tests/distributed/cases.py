"""What the parity worker runs and what the test compares it with: one description for both."""

from dataclasses import dataclass, replace

import torch

from hybridflow.batch import RolloutBatch, offsets, response_mask
from hybridflow.config import OptimizerConfig
from hybridflow.config.algorithms import GRPO, PPO
from hybridflow.config.recompute import Recompute
from tests.reference.ppo import Hyperparameters
from tests.tiny_models import ROPE_LINEAR, ROPE_LLAMA3, VOCAB_SIZE
from tests.window_models import WINDOW_FAMILIES


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    first: int | None = None  # layers in the first stage
    last: int | None = None
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    all_budgets: bool = False
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    @property
    def name(self) -> str:
        uneven = f"f{self.first}" * (self.first is not None) + f"l{self.last}" * (self.last is not None)
        sp = "sp" * self.sequence_parallel
        experts = f"ep{self.ep}etp{self.etp}" if self.shares_experts_anew else ""
        experts += f"cp{self.cp}" * (self.cp > 1)
        again = self.recompute if isinstance(self.recompute, str) else "+".join(self.recompute)
        return f"tp{self.tp}pp{self.pp}dp{self.dp}vpp{self.vpp}{experts}{uneven}{sp}-{again}"

    @property
    def shares_experts_anew(self) -> bool:
        """Other than each expert over the ranks of tp."""
        return self.ep > 1 or self.etp is not None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def layout(self) -> dict[str, object]:
        """The config keys of a role."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "virtual_pipeline_parallel_size": self.vpp,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "sequence_parallel": self.sequence_parallel,
            "context_parallel_size": self.cp,
            "expert_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "dtype": "float32",
        }


NUM_LAYERS = 4
# name: architecture, tied embeddings, key/value heads (with "gqa" fewer than ranks where tp = 4)
FAMILIES = {
    "llama": ("llama", False, 4),
    "qwen2": ("qwen2", True, 4),
    "llama_tied": ("llama", True, 4),
    "qwen2_untied": ("qwen2", False, 4),
    "gqa": ("llama", False, 2),
    "mistral": ("mistral", False, 4),
    "qwen3": ("qwen3", True, 2),
    "glm": ("glm", False, 2),
    "opt": ("opt", True, 8),
    "opt_350m": ("opt_350m", True, 8),  # norms after the residual sums, embeddings of another width: both, or one
    "opt_post_norm": ("opt", True, 8),
    "opt_projected": ("opt", False, 8),
    "mixtral": ("mixtral", False, 4),
    "rope_llama3": ("llama", False, 4),
    "rope_linear": ("llama", False, 4),
    "qwen3_moe": ("qwen3_moe", True, 2),
    "glm4_moe": ("glm4_moe", False, 2),
    "glm4_moe_lite": ("glm4_moe_lite", False, 8),
    "deepseek_v3": ("deepseek_v3", False, 8),  # groups of experts, YaRN
    "moonlight": ("moonlight", False, 8),
    "qwen3_5": ("qwen3_5", False, 2),
    "qwen3_5_moe": ("qwen3_5_moe", False, 4),
    "gemma3": ("gemma3", True, 2),
    "phi3": ("phi3", False, 2),
    "ministral3": ("ministral3", False, 4),
    "smollm3": ("smollm3", True, 4),
    "olmo3": ("olmo3", False, 4),
}
CHANGES = {
    "rope_llama3": {"rope_parameters": ROPE_LLAMA3},
    "rope_linear": {"rope_parameters": ROPE_LINEAR},
    "opt_post_norm": {"do_layer_norm_before": False},
    "opt_projected": {"word_embed_proj_dim": 40},
}  # to configs
# these run samples of a prompt: every kind of position and of layer
GROUPED = ("llama", "qwen2", "glm", "opt", "mixtral", "qwen3_5", "deepseek_v3", *WINDOW_FAMILIES)
SPLIT = "tp2pp1dp1vpp1sp-selective"  # norms' gradients are summed over the ranks of tp
STAGED = "tp1pp2dp1vpp1l1-full"
MIXED = "tp2pp2dp1vpp1sp-none"
WHOLE_EXPERTS = "tp2pp2dp1vpp1ep2etpNonesp-selective"
EXPERTS_OF_REPLICAS = "tp2pp1dp2vpp1ep4etpNonesp-none"
CONTEXT, CONTEXT_IN_STAGES = "tp2pp1dp1vpp1cp2sp-full", "tp1pp2dp1vpp1cp2-selective"
# computed again whole, in part, and not at all; with and without sequence parallelism
CONTEXT_OF_MIXERS = (CONTEXT, CONTEXT_IN_STAGES, "tp1pp1dp1vpp1cp4-none", "tp2pp2dp1vpp2cp2sp-none")
FEW_KV = "tp4pp1dp1vpp1-none"  # more ranks than key/value heads
# A family differs from llama in its weights and their split, not in what stages and replicas do: so each is tried where
# its weights are cut in another way, and llama alone in every layout.
FAMILY_CASES: dict[str, tuple[str, ...]] = {
    "llama_tied": ("tp1pp2dp1vpp1f1-none", "tp2pp2dp1vpp2sp-selective"),
    "qwen2_untied": ("tp1pp2dp1vpp1f1-none", "tp2pp2dp1vpp2sp-selective"),
    "gqa": (FEW_KV, "tp4pp1dp2vpp1-none"),
    "mistral": (SPLIT, STAGED),
    "qwen3": (SPLIT, STAGED, FEW_KV),
    "glm": (SPLIT, STAGED, FEW_KV, CONTEXT),
    "opt": (SPLIT, STAGED, MIXED, CONTEXT_IN_STAGES),
    # whole matrices at both ends, which every rank or only one stage has
    "opt_350m": ("tp2pp1dp1vpp1-none", STAGED, "tp2pp2dp2vpp1-none"),
    "opt_post_norm": ("tp2pp1dp1vpp1-none",),
    "opt_projected": ("tp2pp1dp1vpp1-none",),
    "mixtral": (SPLIT, STAGED, MIXED, CONTEXT),
    "rope_llama3": ("tp2pp1dp1vpp1-none",),
    "rope_linear": ("tp1pp1dp1vpp1-none",),
    "qwen3_moe": (SPLIT, STAGED, FEW_KV),
    "glm4_moe": (SPLIT, STAGED, MIXED, FEW_KV),
    # states and convolutions that stages, recomputation, several chunks and tensor-parallel ranks cut; gates
    "qwen3_5": ("tp2pp1dp1vpp1-none", SPLIT, STAGED, MIXED, FEW_KV, "tp2pp2dp1vpp2sp-selective", *CONTEXT_OF_MIXERS),
    "qwen3_5_moe": (SPLIT, STAGED, MIXED, CONTEXT),
    "gemma3": (SPLIT, STAGED, MIXED, FEW_KV, "tp2pp2dp1vpp2sp-selective", *CONTEXT_OF_MIXERS),
    "phi3": (SPLIT, STAGED, MIXED, FEW_KV),
    "ministral3": (SPLIT, STAGED, MIXED),
    "smollm3": (SPLIT, STAGED, MIXED, CONTEXT_IN_STAGES),
    "olmo3": (SPLIT, STAGED, MIXED, CONTEXT),
    "glm4_moe_lite": (SPLIT, STAGED, MIXED, WHOLE_EXPERTS),
    "deepseek_v3": (
        SPLIT,
        STAGED,
        MIXED,
        *CONTEXT_OF_MIXERS,
        "tp2pp1dp1vpp1-none",
        "tp2pp2dp1vpp2sp-selective",
        EXPERTS_OF_REPLICAS,
    ),
    "moonlight": (SPLIT, "tp2pp1dp1vpp1-none", CONTEXT),
}
CASES = (
    Case(all_budgets=True),
    Case(recompute="full"),
    Case(tp=2),
    Case(dp=2, all_budgets=True),
    Case(tp=2, sequence_parallel=True, recompute="selective"),
    Case(pp=2, all_budgets=True),
    Case(pp=2, first=1),
    Case(pp=2, last=1, recompute="full"),
    Case(pp=2, vpp=2, all_budgets=True),
    Case(tp=2, dp=2, all_budgets=True),
    Case(tp=4),
    Case(tp=2, dp=2, sequence_parallel=True, recompute="full"),
    Case(pp=4),
    Case(tp=2, pp=2, all_budgets=True),
    Case(pp=2, dp=2),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(pp=2, dp=2, vpp=2, recompute="full"),
    Case(tp=2, pp=2, vpp=2, sequence_parallel=True, recompute="selective"),
    Case(tp=4, dp=2),
    Case(tp=2, pp=2, dp=2),
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, recompute="full"),
)
CONTEXT_CASES = (
    Case(cp=2, all_budgets=True),
    Case(tp=2, cp=2, sequence_parallel=True, recompute="full"),
    Case(pp=2, cp=2, recompute="selective"),
    Case(cp=2, dp=2),
    Case(cp=4),
    Case(tp=2, pp=2, vpp=2, cp=2, sequence_parallel=True),
)
EXPERT_CASES = (
    Case(tp=2, ep=2),
    Case(tp=2, ep=2, sequence_parallel=True, recompute="full"),
    Case(tp=4, ep=2, etp=2),
    Case(tp=2, pp=2, ep=2, sequence_parallel=True, recompute="selective"),
    Case(tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True),
    Case(tp=4, dp=2, ep=4),
    # several replicas share the experts
    Case(dp=2, ep=2),
    Case(dp=2, etp=2),
    Case(dp=4, ep=2, recompute="full"),
    Case(dp=4, ep=2, etp=2),
    Case(tp=2, dp=2, ep=4, sequence_parallel=True),
    Case(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True, recompute="selective"),
    Case(cp=2, ep=2),
    Case(tp=2, cp=2, ep=4, sequence_parallel=True),
    Case(pp=2, dp=2, ep=2),
    Case(pp=2, dp=2, vpp=2, ep=2),
    Case(tp=2, pp=2, dp=2, ep=4, sequence_parallel=True, recompute="full"),
)
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "qwen3_5_moe")  # these share experts in every way
CASES += EXPERT_CASES + CONTEXT_CASES
BUDGETS = (64, 17, 1000)  # micro-batch tokens: several sequences, about one, all in one
HYPER = Hyperparameters(temperature=0.8)
POLICY = {"clip_range": HYPER.clip_low, "clip_range_high": HYPER.clip_high, "entropy_coef": HYPER.entropy_coef}
ALGORITHM = PPO.model_validate(
    {
        "gamma": HYPER.gamma,
        "gae_lambda": HYPER.gae_lambda,
        "value_clip_range": HYPER.value_clip,
        "policy": POLICY,
        "kl": {"coef": HYPER.kl_coef},
    }
)
GROUPS = GRPO.model_validate({"policy": POLICY, "kl": {"coef": HYPER.kl_coef}})
SGD = OptimizerConfig(name="sgd", lr=0.1, clip_grad=0.5)
ADAM = OptimizerConfig(name="adam", lr=0.01, eps=0.1, betas=(0.8, 0.9), weight_decay=0.05, clip_grad=0.5)  # ZeRO-1
# a large eps: Adam turns rounding noise of near-zero gradients into steps


DEFAULT = {  # of the default set: each way to cut a model once, tied embeddings in stages, experts, kinds of layers
    ("tp2pp1dp1vpp1-none", "llama"),
    ("tp1pp1dp2vpp1-none", "llama"),
    ("tp1pp1dp1vpp1cp2-none", "llama"),
    ("tp1pp2dp1vpp1-none", "llama"),
    ("tp1pp2dp1vpp2-none", "llama"),
    (SPLIT, "llama"),
    (SPLIT, "mixtral"),
    ("tp2pp2dp1vpp2sp-selective", "qwen2"),
    ("tp2pp1dp1vpp1ep2etpNone-none", "mixtral"),
    ("tp1pp1dp2vpp1ep2etpNone-none", "mixtral"),
    ("tp2pp2dp1vpp1ep2etpNonesp-selective", "glm4_moe"),
    (SPLIT, "qwen3_5_moe"),
    (STAGED, "glm4_moe_lite"),
    (SPLIT, "gemma3"),
    (STAGED, "phi3"),
    (MIXED, "qwen3_5"),
    (MIXED, "deepseek_v3"),
    (SPLIT, "smollm3"),
    (MIXED, "olmo3"),
    (STAGED, "ministral3"),
}


def applies(case: Case, family: str) -> bool:
    """llama in every layout; qwen2, whose embeddings are tied, in those with stages; the others where they differ."""
    if case.cp > 1 and family not in ("llama", "mixtral"):  # what weights have to do with it is nothing
        return case.name in FAMILY_CASES.get(family, ())
    if case.shares_experts_anew:
        return family in MIXTURES or case.name in FAMILY_CASES.get(family, ())
    if family == "qwen2":
        return case.pp > 1
    return family == "llama" or case.name in FAMILY_CASES[family]


def budgets(case: Case, family: str) -> tuple[int, ...]:
    """Micro-batches of other sizes cut a batch, not a model: one family shows them."""
    return BUDGETS if case.all_budgets and family == "llama" else BUDGETS[:1]


def make_rollout() -> RolloutBatch:
    """Eight sequences of varying lengths, two of them of one length."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([9, 14, 6, 14, 17, 4, 11, 8])
    prompts = torch.tensor([3, 5, 2, 9, 4, 3, 1, 4])
    # from 4 on: transformers gives the padding token, 3, no gradient
    tokens = torch.randint(4, VOCAB_SIZE, (int(lengths.sum()),), generator=generator)
    mask = response_mask(lengths, prompts)
    return RolloutBatch(
        tokens, lengths, prompts, torch.arange(8), torch.zeros(8, dtype=torch.bool), mask, torch.zeros(len(tokens))
    )


def make_groups() -> RolloutBatch:
    """Two groups of four responses, with gaps and tails that the policy did not write, to prompts that they share."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([9, 14, 6, 14, 17, 5, 14, 8])
    prompts = torch.tensor([5, 5, 5, 5, 4, 4, 4, 4])
    tokens = torch.randint(4, VOCAB_SIZE, (int(lengths.sum()),), generator=generator)
    starts = offsets(lengths)
    for row in range(8):
        prompt = slice(int(starts[row]), int(starts[row] + prompts[row]))
        tokens[prompt] = tokens[int(starts[row // 4 * 4]) :][: prompts[row]]
    mask = response_mask(lengths, prompts)
    mask[starts[1] + 7 : starts[1] + 10] = False  # of a prompt of 5 and a response of 9: a gap of 3
    mask[starts[4] + 6] = False
    mask[starts[4] + 14 :][:3] = False  # and the last 3 of 17
    mask[starts[7] + 4] = False  # its first response token
    return RolloutBatch(
        tokens, lengths, prompts, torch.arange(8) // 4, torch.zeros(8, dtype=torch.bool), mask, torch.zeros(len(tokens))
    )


def make_uneven_groups() -> RolloutBatch:
    """The tokens of `make_rollout` as groups of three and five whose rows have prompts of their own, of all lengths."""
    rollout = make_rollout()
    mask = rollout.response_mask.clone()
    starts = offsets(rollout.lengths)
    mask[starts[1] + 7 : starts[1] + 10] = False  # of a prompt of 5 and a response of 9: a gap of 3
    mask[starts[4] + 14 :][:3] = False  # the last 3 of 17
    return replace(rollout, response_mask=mask, prompt_indices=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))
