"""Layouts, families and lists of modules that the worker runs and the test compares: one description for both."""

from dataclasses import dataclass

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config.recompute import Recompute
from hybridflow.placement.recomputation import modules_in
from tests.distributed.cases import Case

BUDGET = 24  # tokens of a micro-batch: of several, so that others have been in a layer before it runs again
NUM_LAYERS = 2


ONE = Case()


@dataclass(frozen=True)
class Again:
    """A model in a layout; adapters: in place of all weights."""

    family: str
    case: Case = ONE
    adapters: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}-{self.case.name.removesuffix('-none')}{'-adapters' * self.adapters}"


SPLIT, OVER, STAGES = Case(tp=2, sequence_parallel=True), Case(dp=2, ep=2), Case(pp=2)
WHOLE = Case(tp=2, ep=2, sequence_parallel=True)
RUNS = (
    Again("llama"),
    Again("qwen3"),
    Again("gemma3"),  # norms around attention and MLP
    Again("olmo3"),  # norms behind them
    Again("opt"),  # no gates, biases
    Again("glm4_moe"),  # a dense layer, then a mixture with a shared expert
    Again("glm4_moe_lite"),  # latent attention
    Again("qwen3_5_moe"),  # delta nets, gated attention, a shared expert with a gate
    Again("llama", adapters=True),
    Again("glm4_moe", adapters=True),
    Again("llama", SPLIT),
    Again("glm4_moe", SPLIT),
    Again("glm4_moe", WHOLE),
    Again("deepseek_v3", SPLIT),
    Again("glm4_moe", SPLIT, adapters=True),
    Again("glm4_moe", OVER),
    Again("glm4_moe", STAGES),
    Again("glm4_moe", Case(tp=2, dp=2, ep=4, sequence_parallel=True)),
)


def values(spec: ModelSpec) -> list[Recompute]:
    """Each module by itself, all but whole mixtures, all."""
    every = modules_in(spec)
    parts = tuple(module for module in every if module != "moe")
    lists = [*((module,) for module in every), parts, every]
    return ["selective", *dict.fromkeys(lists), "full"]
