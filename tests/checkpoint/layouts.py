"""Which checkpoints are written in which layout and read in which other: one description for worker and test."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.config.roles import LayoutConfig

# name: architecture, tied embeddings
MODELS = {
    "llama": ("llama", False),
    "qwen2": ("qwen2", True),
    "opt_350m": ("opt_350m", True),
    "glm4_moe": ("glm4_moe", False),
    "qwen3_5": ("qwen3_5", False),
    "deepseek_v3": ("deepseek_v3", False),
}


def layout(tp: int, pp: int, ranks: str | None, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "ranks": ranks, **more}


LAYOUTS = {
    "tp1": layout(1, 1, "3"),
    "tp2": layout(2, 1, "1-2"),
    "pp2": layout(1, 2, "0-1"),
    "dp2": layout(1, 1, "0,2"),
    "dp4": layout(1, 1, None),
    "tp2pp2": layout(2, 2, None),
    "tp2dp2": layout(2, 1, None),
    "pp2dp2": layout(1, 2, None),
    "tp4": layout(4, 1, None),
    "vpp2": layout(1, 2, "2-3", virtual_pipeline_parallel_size=2),
    "cp2": layout(1, 1, "0,2", context_parallel_size=2),
    "cp2dp2": layout(1, 1, None, context_parallel_size=2),
    # whole experts: within a replica, over two, over four of which two share each
    "tp2ep2": layout(2, 1, "1-2", expert_parallel_size=2),
    "dp2ep2": layout(1, 1, "0,2", expert_parallel_size=2),
    "dp4ep2etp2": layout(1, 1, None, expert_parallel_size=2, expert_tensor_parallel_size=2),
    "tp2dp2ep4": layout(2, 1, None, expert_parallel_size=4, sequence_parallel=True),
    "pp2dp2ep2": layout(1, 2, None, expert_parallel_size=2),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # a large eps: Adam turns rounding noise of near-zero gradients into steps
    "adam": {"name": "adam", "lr": 0.01, "eps": 0.1},
    "adam whole": {"name": "adam", "lr": 0.01, "eps": 0.1, "zero1": False},
    "momentum": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "sgd": {"name": "sgd", "lr": 0.05},
}


@dataclass(frozen=True)
class Case:
    model: str
    source_name: str
    target_name: str
    optimizer: str = "adam"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.model} {self.source_name} to {self.target_name} {self.optimizer} {self.dtype}"

    @property
    def values(self) -> dict[str, Any]:
        """By the names of `AXES`: of a layout, whether it cuts a model so."""
        found: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "dtype": self.dtype}
        for name, keys in (("source", self.source), ("target", self.target)):
            sizes = LayoutConfig.model_validate(keys).layout("actor", 4)
            found |= {f"{name}, {size}": getattr(sizes, size) > 1 for size in SIZES}
        return found

    @property
    def source(self) -> dict[str, Any]:
        return LAYOUTS[self.source_name]

    @property
    def target(self) -> dict[str, Any]:
        return LAYOUTS[self.target_name]


KINDS = ("qwen2", "qwen3_5", "glm4_moe", "deepseek_v3")
SIZES = ("tp", "pp", "dp")
AXES: dict[str, tuple[Any, ...]] = {
    "model": KINDS,
    "optimizer": tuple(OPTIMIZERS),
    "dtype": ("float32", "bfloat16"),
    **{f"{name}, {size}": (False, True) for name in ("source", "target") for size in SIZES},
}
# Any two of these values stand together, and each layout is written and read.
CASES = (
    Case("qwen2", "pp2", "tp2dp2"),
    Case("qwen2", "tp2pp2", "vpp2", "sgd", "bfloat16"),
    Case("qwen2", "tp2", "pp2", "adam whole", "bfloat16"),
    Case("qwen2", "dp2", "tp1", "momentum", "bfloat16"),
    Case("qwen2", "cp2", "tp2", "sgd"),
    Case("qwen3_5", "tp2dp2", "pp2dp2", dtype="bfloat16"),
    Case("qwen3_5", "vpp2", "tp4", "momentum"),
    Case("qwen3_5", "dp4", "dp2", "sgd"),
    Case("qwen3_5", "vpp2", "dp4", "adam whole"),
    Case("glm4_moe", "pp2dp2ep2", "tp2", dtype="bfloat16"),
    Case("glm4_moe", "tp2dp2ep4", "tp2ep2", "sgd", "bfloat16"),
    Case("glm4_moe", "tp2ep2", "pp2dp2ep2", "momentum"),
    Case("glm4_moe", "dp4ep2etp2", "tp2dp2ep4", "adam whole", "bfloat16"),
    Case("deepseek_v3", "cp2dp2", "dp2ep2"),
    Case("deepseek_v3", "dp2ep2", "cp2", "adam whole"),
    Case("deepseek_v3", "pp2dp2", "tp2pp2", "sgd", "bfloat16"),
    Case("deepseek_v3", "tp4", "dp4ep2etp2", "sgd"),
    Case("deepseek_v3", "tp1", "cp2dp2", "momentum", "bfloat16"),
    Case("opt_350m", "tp2pp2", "dp4"),  # whole matrices at both ends, which one stage has
)


def experiment(models: Path, layout: dict[str, Any], case: Case, *, all_ranks: str = "0-3") -> ExperimentConfig:
    optimizer = {"clip_grad": 0.5, **OPTIMIZERS[case.optimizer]}
    actor = {"model": str(models / "policy"), "dtype": case.dtype, "optimizer": optimizer, **layout}
    return ExperimentConfig.model_validate(
        {
            "name": "layouts",
            "num_iterations": 1,
            "data": {"train": "given", "prompts_per_iteration": 8, "max_prompt_length": 9},
            "sampling": {"max_response_length": 8},
            "actor": actor,
            "critic": {"model": str(models / "critic"), "optimizer": optimizer, "ranks": all_ranks},
            "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
            "algorithm": {"kl": {"use": "none"}},
        }
    )
