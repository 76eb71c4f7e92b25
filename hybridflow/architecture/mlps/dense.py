"""A dense MLP: SwiGLU and the like (Shazeer 2020, arXiv 2002.05202), or two layers with an activation between them.

products      2 f columns of hidden, or f without a gate; hidden columns of f
activations   b 3 f / tp: gate and up, and their product; 2 f without a gate. `mlp` computed again: nothing
"""

from collections.abc import Set
from dataclasses import replace

from hybridflow.architecture.mlps.mlp import Mlp, SharedProduct, matrices
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight, hidden, in_layer, with_bias
from hybridflow.parallel.layout import Cut


def _gate_and_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.mlp_size("dense"), spec.hidden_size),) * 2


def _gate_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((2 * spec.mlp_size("dense"), spec.hidden_size),)


def _up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.mlp_size("dense"), spec.hidden_size),)


def _up_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.mlp_size("dense"),),)


def _down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.mlp_size("dense")),)


GATE_AND_UP = in_layer(
    "mlp.linear_fc1.weight",
    "mlp.gate_proj.weight mlp.up_proj.weight",
    Split.GATED,
    _gate_and_up,
    engine="mlp.gate_up_proj.weight",
)
GATE_UP = in_layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", Split.GATED, _gate_up)
GATE_UP_BY_ROWS = replace(GATE_UP, engine_split=Split.ROWS)  # vLLM 0.32.0 runs the class of transformers for GLM-4
DOWN = in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", Split.COLUMNS, _down)
OPT_MLP = (
    *with_bias("mlp.linear_fc1", "fc1", (Split.ROWS, _up), (Split.ROWS, _up_bias)),
    *with_bias("mlp.linear_fc2", "fc2", (Split.COLUMNS, _down), (Split.REPLICATED, hidden)),
)


class DenseMlp(Mlp):
    fuses_norm = True

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        if spec.traits.linear_bias:
            return OPT_MLP
        return {"": GATE_AND_UP, "gated": GATE_UP, "rows": GATE_UP_BY_ROWS}[spec.traits.mlp.fused], DOWN

    def products(self, spec: ModelSpec, *, tp: int, expert_tp: int) -> list[SharedProduct]:
        return matrices(spec, spec.mlp_size("dense") / tp)

    def activation_bytes(
        self, spec: ModelSpec, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
    ) -> float:
        if "mlp" in again:
            return 0
        return itemsize * (3 if spec.traits.mlp.gated else 2) * spec.mlp_size("dense") / cut.tp

    def gathers(self, cut: Cut, *, sequence_parallel: bool) -> bool:
        return False

    def passing_bytes(self, spec: ModelSpec, *, cut: Cut, itemsize: int, counted: bool) -> float:
        return 0

    def runs_again(self, again: Set[str]) -> bool:
        return "mlp" in again
