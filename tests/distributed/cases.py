"""What the parity worker runs and what the test compares it with: one description for both."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.batch import RolloutBatch, offsets, response_mask
from hybridflow.config import OptimizerConfig
from hybridflow.config.algorithms import GRPO, PPO
from hybridflow.config.recompute import Recompute
from tests.reference.ppo import Hyperparameters
from tests.tiny_models import ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, VOCAB_SIZE, give_own_head, make_checkpoints


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
    def values(self) -> dict[str, object]:
        """By the names of `AXES`."""
        experts = {"experts": (self.ep, self.etp), "sp": self.sequence_parallel}
        return {axis: experts[axis] if axis in experts else getattr(self, axis) for axis in LAYOUT_AXES}

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
# name: architecture, tied embeddings, key/value heads
FAMILIES = {
    "llama": ("llama", False, 4),
    "qwen3": ("qwen3", True, 2),  # norms of heads; with tp = 4 ranks share key/value heads
    "opt": ("opt", True, 8),  # biases, learned positions
    "gemma3": ("gemma3", True, 2),  # windows, norms around
    "qwen3_5": ("qwen3_5", False, 2),  # delta nets
    "glm4_moe": ("glm4_moe", False, 2),  # a dense layer, then mixtures with a shared expert
    "deepseek_v3": ("deepseek_v3", False, 8),  # latent attention, groups of experts, YaRN
    "llama_tied": ("llama", True, 4),
    "qwen2": ("qwen2", True, 4),
    "qwen2_untied": ("qwen2", False, 2),
    "mistral": ("mistral", False, 4),
    "glm": ("glm", False, 2),
    "opt_350m": ("opt_350m", True, 8),  # norms after the residual sums, embeddings of another width: both, or one
    "opt_post_norm": ("opt", True, 8),
    "opt_projected": ("opt", False, 8),
    "mixtral": ("mixtral", False, 4),
    "rope_llama3": ("llama", False, 4),
    "rope_linear": ("llama", False, 4),
    "rope_yarn": ("llama", False, 4),
    "rope_yarn_qwen2": ("qwen2", True, 4),
    "rope_yarn_qwen3": ("qwen3", False, 2),
    "qwen3_moe": ("qwen3_moe", True, 2),
    "glm4_moe_lite": ("glm4_moe_lite", False, 8),
    "moonlight": ("moonlight", False, 8),
    "qwen3_5_moe": ("qwen3_5_moe", False, 4),
    "gemma3_untied": ("gemma3", False, 4),  # whose tokens are not as good as certain
    "phi3": ("phi3", False, 2),
    "ministral3": ("ministral3", False, 4),
    "smollm3": ("smollm3", True, 4),
    "olmo3": ("olmo3", False, 4),
    "own_head": ("qwen3", True, 4),  # config.json says tied, the weights have another output layer
}
CHANGES = {  # to configs; of these families another has the weights
    "llama_tied": {},
    "qwen2_untied": {},
    "rope_llama3": {"rope_parameters": ROPE_LLAMA3},
    "rope_linear": {"rope_parameters": ROPE_LINEAR},
    **{name: {"rope_parameters": ROPE_YARN} for name in ("rope_yarn", "rope_yarn_qwen2", "rope_yarn_qwen3")},
    "opt_post_norm": {"do_layer_norm_before": False},
    "opt_projected": {"word_embed_proj_dim": 40},
    "own_head": {},
    "gemma3_untied": {},
}


def make_family(root: Path, name: str, **more: Any) -> Path:
    """ROOT/NAME with the checkpoints of a family."""
    family, tied, num_kv_heads = FAMILIES[name]
    sizes = {"num_layers": NUM_LAYERS, "num_kv_heads": num_kv_heads, "changes": CHANGES.get(name)}
    made = make_checkpoints(root / name, family=family, tied=tied, **sizes | more)
    if name == "own_head":
        give_own_head(made / "policy")
    return made


KINDS = tuple(FAMILIES)[:7]  # of layers: other families have them under other names or with other flags
# Prompts of their own and prompts that samples share are both in every case.
AXES = {
    "kind": KINDS,
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "dp": (1, 2),
    "cp": (1, 2),
    "experts": ((1, None), (2, None), (4, None), (2, 2)),  # ranks that they are dealt to, and that share each
    "sp": (False, True),
    "recompute": ("none", "selective", "full"),
}
LAYOUT_AXES = tuple(AXES)[1:]
SPLIT = Case(tp=2, sequence_parallel=True, recompute="selective")  # norms' gradients are summed over the ranks of tp
STAGED = Case(pp=2, last=1, recompute="full")
MIXED = Case(tp=2, pp=2, sequence_parallel=True)
CONTEXT_IN_STAGES = Case(pp=2, cp=2, recompute="selective")
DEFAULT: dict[str, tuple[Case, ...]] = {
    "llama": (Case(tp=2), Case(dp=2, all_budgets=True), Case(pp=2, vpp=2, all_budgets=True)),
    "qwen3": (STAGED,),  # the tied weight lies in both stages
    "opt": (Case(pp=2, vpp=2),),
    "gemma3": (SPLIT,),
    "qwen3_5": (MIXED,),
    "glm4_moe": (Case(tp=2, ep=2), Case(dp=2, ep=2)),
    "deepseek_v3": (CONTEXT_IN_STAGES,),
    "qwen3_5_moe": (SPLIT,),  # a shared expert with a gate; the norm of gradients counts a rank's share of experts
}
REST: dict[str, tuple[Case, ...]] = {
    "llama": (
        # keys are kept where a layer is computed again; with larger micro-batches no row is cut
        Case(tp=2, cp=2, sequence_parallel=True, recompute="full", all_budgets=True),
        Case(pp=4, recompute="selective"),
        Case(tp=4),
    ),
    "qwen3": (
        Case(dp=2, recompute="full"),
        Case(tp=4),  # more ranks than key/value heads
        Case(tp=2, pp=2, vpp=2, sequence_parallel=True, recompute="selective"),
        Case(pp=4, cp=2),
    ),
    "opt": (
        Case(tp=2, pp=2, first=1),
        Case(pp=4, dp=2, recompute="selective"),
        Case(tp=4, cp=2, sequence_parallel=True, recompute="full"),
    ),
    "gemma3": (
        Case(pp=2, vpp=2),
        Case(cp=2, recompute="full"),
        Case(pp=4, recompute="full"),
        Case(tp=4, dp=2, recompute="full"),
        Case(cp=4),  # windows that reach past a neighbour's tokens
    ),
    "qwen3_5": (
        Case(tp=2),  # gradients of norms that heads share are summed without sequence parallelism too
        CONTEXT_IN_STAGES,
        Case(pp=2, vpp=2, dp=2, recompute="full"),
        Case(pp=4),
        Case(tp=4, recompute="full"),
        Case(cp=4),
    ),
    "glm4_moe": (
        Case(recompute="full"),
        Case(tp=2, pp=2, ep=2, sequence_parallel=True, recompute="selective"),  # stages get unlike numbers of tokens
        Case(tp=4, ep=2, etp=2, sequence_parallel=True, recompute="full"),
        Case(dp=2, cp=2, ep=4),
        Case(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True),
        Case(tp=4, pp=2, vpp=2, ep=4, sequence_parallel=True, recompute="selective"),
        Case(tp=2, pp=4, ep=2, sequence_parallel=True),
    ),
    "deepseek_v3": (
        Case(tp=2),  # megatron's own latent attention has other gradients there
        Case(tp=2, dp=2, ep=4, sequence_parallel=True, recompute="full"),
        Case(pp=2, vpp=2, cp=2, ep=2, recompute="full"),
        Case(tp=4, ep=2, recompute="full"),
        Case(tp=2, cp=2, sequence_parallel=True, recompute="full"),  # each rank turns its part of the keys
        Case(pp=4),
        Case(pp=2, vpp=2, dp=2, cp=2, ep=2, etp=2, recompute="selective"),
    ),
    # others whose weights ranks cut in a way of their own
    "mixtral": (
        SPLIT,
        Case(dp=2, etp=2),  # whole replicas share each expert: gradients of experts have a group of their own
    ),
    "opt_350m": (STAGED, Case(tp=2, pp=2, dp=2)),  # whole matrices at both ends, which one stage has
    "phi3": (MIXED,),  # fused projections
    "olmo3": (SPLIT,),  # norms over all heads
}


def listed(cases: dict[str, tuple[Case, ...]]) -> list[tuple[Case, str]]:
    return [(case, family) for family, own in cases.items() for case in own]


def elsewhere(family: str, known: list[tuple[Case, str]], *, shares_experts: bool = False) -> list[tuple[Case, str]]:
    """It in the layouts that others alone are in."""
    layouts = {case.name: replace(case, all_budgets=False) for case, _ in known}
    own = {case.name for case, other in known if other == family}
    found = [case for name, case in layouts.items() if name not in own]
    return [(case, family) for case in found if case.shares_experts_anew == shares_experts]


SHOWN = [*listed(DEFAULT), *listed(REST)]
WEEKLY = [*elsewhere("llama", SHOWN), *elsewhere("mixtral", SHOWN, shares_experts=True)]
CASES = [*SHOWN, *WEEKLY]
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
