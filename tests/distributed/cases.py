"""What the parity worker runs and what the test compares it with: one description for both."""

from dataclasses import dataclass, replace

import torch

from hybridflow.algorithm_config import GRPO, PPO
from hybridflow.batch import RolloutBatch, offsets, response_mask
from hybridflow.config import OptimizerConfig
from tests.reference.ppo import Hyperparameters
from tests.tiny_models import ROPE_LINEAR, ROPE_LLAMA3, VOCAB_SIZE


@dataclass(frozen=True)
class Case:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    first: int | None = None  # layers in the first stage
    last: int | None = None
    sequence_parallel: bool = False
    recompute: str = "none"
    all_budgets: bool = False

    @property
    def name(self) -> str:
        uneven = f"f{self.first}" * (self.first is not None) + f"l{self.last}" * (self.last is not None)
        sp = "sp" * self.sequence_parallel
        return f"tp{self.tp}pp{self.pp}dp{self.dp}vpp{self.vpp}{uneven}{sp}-{self.recompute}"

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def layout(self) -> dict[str, object]:
        """The config keys of a role."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "virtual_pipeline_parallel_size": self.vpp,
            "num_layers_in_first_pipeline_stage": self.first,
            "num_layers_in_last_pipeline_stage": self.last,
            "sequence_parallel": self.sequence_parallel,
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
}
CHANGES = {
    "rope_llama3": {"rope_parameters": ROPE_LLAMA3},
    "rope_linear": {"rope_parameters": ROPE_LINEAR},
    "opt_post_norm": {"do_layer_norm_before": False},
    "opt_projected": {"word_embed_proj_dim": 40},
}  # to configs
THOROUGH = ("llama", "qwen2")  # these are tried in every layout
GROUPED = (
    *THOROUGH,
    "glm",
    "opt",
    "mixtral",
)  # these run samples of one prompt, too: every kind of position, experts
FAMILY_CASES = ("tp1pp1dp1vpp1-none", "tp2pp1dp1vpp1-none", "tp2pp1dp1vpp1sp-selective", "tp1pp2dp1vpp1l1-full")
FAMILY_CASES += ("tp4pp1dp1vpp1-none", "tp2pp2dp1vpp1sp-none")
# whole matrices at both ends, which every rank or only one stage has
END_CASES = ("tp1pp1dp1vpp1-none", "tp2pp1dp1vpp1-none", "tp1pp1dp2vpp1-none", "tp1pp2dp1vpp1l1-full")
END_CASES += ("tp2pp2dp1vpp1sp-none", "tp2pp2dp2vpp1-none")
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


def applies(case: Case, family: str) -> bool:
    """Where a family could differ from the thorough ones, it is tried."""
    if family == "gqa":
        return case.tp == 4
    if family == "opt_350m":
        return case.name in END_CASES
    if not family.startswith(THOROUGH):
        few = FAMILY_CASES[1:2] if family.startswith("opt_") else FAMILY_CASES[:2]
        return case.name in (few if family in CHANGES else FAMILY_CASES)
    return family in THOROUGH or (case.pp > 1 and case.num_ranks <= 4 and not case.all_budgets)


def cases_for(num_ranks: int) -> list[Case]:
    return [case for case in CASES if case.num_ranks == num_ranks]


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
