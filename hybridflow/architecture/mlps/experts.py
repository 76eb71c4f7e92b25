"""A mixture of experts, and an expert beside them that every token goes through where the family has one.

With n of E experts a token, on tensor-parallel ranks whose tokens are spread evenly, the backward pass needs:

    experts         b n (3 f + h etp) / tp: gate and up, their product with the share; each expert's input.
                    `moe_act` computed again: 2 f in the place of 3 f. `moe`: nothing of the mixture
    shared expert   b 3 f / tp, and the output, h, where a gate multiplies it. `shared_experts`: nothing
    all tokens      b h where sequence-parallel ranks gather them: for a mixture that no other replica shares, and for a
                    shared expert that is not computed again
    router          4 E of scores; where scores are sigmoids, 4 h more in 16 bits: the logits are float32 products

While a layer runs: outputs of experts, by expert and by token, b n 2 h. Where rows are counted on the device alone
there is room for all copies of a token, not for the rank's part: b n (3 f / etp + h) (1 - 1 / ep) more.
"""

from collections.abc import Set
from dataclasses import replace

from hybridflow.architecture.family import ExpertTraits
from hybridflow.architecture.mlps.mlp import Mlp, SharedProduct, matrices
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight, in_layer
from hybridflow.parallel.layout import Cut

SCORE_BYTES = 4  # a router's, float32
STORED = "mlp.experts.experts."


def _router(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts, spec.hidden_size),)


def _router_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts,),)


def _gate_and_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),) * 2


def _down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.ffn_hidden_size),)


def _shared_gate_and_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.shared_ffn_hidden_size, spec.hidden_size),) * 2


def _shared_down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.shared_ffn_hidden_size),)


def _shared_gate(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.hidden_size),)


def _mixture(hf: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """hf: where HuggingFace and the engine have the mixture; gate, up, down: what an expert's matrices are called."""
    expert, engine = hf + ".experts.{expert}.", hf + ".experts.routed_experts."
    fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
    return (
        in_layer("mlp.router.weight", hf + ".gate.weight", Split.REPLICATED, _router),
        in_layer(
            "mlp.experts." + fc1,
            f"{expert}{gate}.weight {expert}{up}.weight",
            Split.GATED,
            _gate_and_up,
            engine=engine + "w13_weight",
            stored=STORED + fc1,
        ),
        in_layer(
            "mlp.experts." + fc2,
            f"{expert}{down}.weight",
            Split.COLUMNS,
            _down,
            engine=engine + "w2_weight",
            stored=STORED + fc2,
        ),
    )


def _shared(hf: str) -> tuple[Weight, ...]:
    """hf: where HuggingFace and the engine have the expert that every token goes through."""
    return (
        in_layer(
            "mlp.shared_experts.linear_fc1.weight",
            f"{hf}.gate_proj.weight {hf}.up_proj.weight",
            Split.GATED,
            _shared_gate_and_up,
            engine=f"{hf}.gate_up_proj.weight",
        ),
        in_layer("mlp.shared_experts.linear_fc2.weight", f"{hf}.down_proj.weight", Split.COLUMNS, _shared_down),
    )


MIXTURE = _mixture("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL = _mixture("block_sparse_moe", "w1", "w3", "w2")
FLOAT32_ROUTER = replace(MIXTURE[0], float32=True)
ROUTER_BIAS = in_layer(
    "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Split.REPLICATED, _router_bias, float32=True
)
SHARED_EXPERT = _shared("mlp.shared_experts")
GATED_SHARED_EXPERT = (
    *_shared("mlp.shared_expert"),
    in_layer("mlp.shared_experts.gate.weight", "mlp.shared_expert_gate.weight", Split.REPLICATED, _shared_gate),
)


class ExpertsMlp(Mlp):
    fuses_norm = False  # the router reads what the norm gives, too

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        traits = _traits(spec)
        router, *experts = MIXTRAL if traits.names == "mixtral" else MIXTURE
        if traits.sigmoid and not traits.router_in_dtype:
            router = FLOAT32_ROUTER
        bias = (ROUTER_BIAS,) if traits.sigmoid else ()
        shared = (GATED_SHARED_EXPERT if traits.shared_size_key else SHARED_EXPERT) if _shared_size(spec) else ()
        return (router, *experts, *bias, *shared)

    def products(self, spec: ModelSpec, *, tp: int, expert_tp: int) -> list[SharedProduct]:
        experts = matrices(spec, spec.ffn_hidden_size / expert_tp, expert_tp / tp) * spec.experts_per_token
        shared = matrices(spec, _shared_size(spec) / tp) if _shared_size(spec) else []
        return [(float(spec.hidden_size), float(spec.num_experts), 1.0), *experts, *shared]

    def activation_bytes(
        self, spec: ModelSpec, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
    ) -> float:
        if "moe" in again:
            return 0
        traits, tp, f = _traits(spec), cut.tp, _shared_size(spec)
        own = 2 if "moe_act" in again else 3
        experts = spec.experts_per_token * (own * spec.ffn_hidden_size + spec.hidden_size * cut.expert_tp) / tp
        keeps_shared = bool(f) and "shared_experts" not in again
        shared = 3 * f / tp + (spec.hidden_size if traits.shared_size_key else 0) if keeps_shared else 0
        split = tp if sequence_parallel else 1
        gathers = split > 1 and (keeps_shared or self.gathers(cut, sequence_parallel=sequence_parallel))
        gathered = spec.hidden_size if gathers else 0
        widened = spec.hidden_size if traits.sigmoid and itemsize < SCORE_BYTES else 0
        router = SCORE_BYTES * (spec.num_experts + widened) / (split if _of_replicas(cut) else 1)
        return itemsize * (experts + shared + gathered) + router

    def gathers(self, cut: Cut, *, sequence_parallel: bool) -> bool:
        return sequence_parallel and cut.tp > 1 and not _of_replicas(cut)

    def passing_bytes(self, spec: ModelSpec, *, cut: Cut, itemsize: int, counted: bool) -> float:
        spare = 0.0
        if counted and cut.expert_tp * cut.ep == cut.tp:
            spare = (3 * spec.ffn_hidden_size / cut.expert_tp + spec.hidden_size) * (1 - 1 / cut.ep)
        return itemsize * spec.experts_per_token * (2 * spec.hidden_size + spare)

    def runs_again(self, again: Set[str]) -> bool:
        """Experts have no adapters."""
        return bool(again & {"moe", "shared_experts"})


def _traits(spec: ModelSpec) -> ExpertTraits:
    assert spec.traits.experts is not None, f"{spec.family} has no experts"
    return spec.traits.experts


def _shared_size(spec: ModelSpec) -> int:
    return spec.mlp_size("experts")


def _of_replicas(cut: Cut) -> bool:
    """Whether several replicas share the experts: each rank then routes own tokens."""
    return cut.expert_tp * cut.ep > cut.tp
