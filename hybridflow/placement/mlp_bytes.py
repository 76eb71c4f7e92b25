"""What norms and the MLP, or the mixture of experts, of a layer keep of a token for the backward pass. Pure."""

from collections.abc import Set

from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.spec import ModelSpec
from hybridflow.parallel.layout import Cut

SCORE_BYTES = 4  # a router's, float32


def norm_bytes(
    spec: ModelSpec, kind: LayerKind, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
) -> float:
    """With h = hidden size, sp = tp with sequence parallelism, else 1:

    b 4 h / sp     inputs and outputs of both norms; 6 h with the inputs of norms behind. Less:
    h / sp         of a mixture whose ranks gather all tokens: what they gather is in `mlp_bytes`, unless `moe` is in it
    2 h / sp       layernorm: the outputs of the norms in front
    """
    kept = 6 if spec.traits.norms == "around" else 4
    is_kept = "moe" in again or not _gathers(kind, cut, sequence_parallel)  # what the MLP reads
    kept -= 0 if is_kept else 1
    if "layernorm" in again and has_norms_in_front(spec):
        kept -= 2 if is_kept else 1
    return itemsize * kept * spec.hidden_size / _split(cut, sequence_parallel)


def mlp_bytes(
    spec: ModelSpec, kind: LayerKind, *, cut: Cut, sequence_parallel: bool, again: Set[str], itemsize: int
) -> float:
    """With f = ffn size, n experts a token, E experts, on tensor-parallel ranks whose tokens are spread evenly:

    dense           b 3 f / tp: gate and up, and their product; 2 f without a gate. mlp: nothing
    experts         b n (3 f + h etp) / tp: gate and up, their product with the share; each expert's input.
                    moe_act: 2 f in the place of 3 f. moe: nothing of the mixture
    shared expert   b 3 f / tp, and the output, h, where a gate multiplies it. shared_experts: nothing
    all tokens      b h where sequence-parallel ranks gather them: for a mixture that no other replica shares, and for a
                    shared expert that is not computed again
    router          4 E of scores; where scores are sigmoids, 4 h more in 16 bits: the logits are float32 products
    """
    tp, f = cut.tp, spec.mlp_size(kind.mlp)
    if kind.mlp == "dense":
        return 0 if "mlp" in again else itemsize * (3 if spec.traits.gated else 2) * f / tp
    if "moe" in again:
        return 0
    own = 2 if "moe_act" in again else 3
    experts = spec.experts_per_token * (own * spec.ffn_hidden_size + spec.hidden_size * cut.expert_tp) / tp
    keeps_shared = bool(f) and "shared_experts" not in again
    shared = 3 * f / tp + (spec.hidden_size if spec.traits.shared_size_key else 0) if keeps_shared else 0
    split = _split(cut, sequence_parallel)
    gathers = split > 1 and (keeps_shared or _gathers(kind, cut, sequence_parallel))
    gathered = spec.hidden_size if gathers else 0
    widened = spec.hidden_size if spec.traits.sigmoid_router and itemsize < SCORE_BYTES else 0
    router = SCORE_BYTES * (spec.num_experts + widened) / (split if _of_replicas(cut) else 1)
    return itemsize * (experts + shared + gathered) + router


def has_norms_in_front(spec: ModelSpec) -> bool:
    """Of attention and MLP, which `layernorm` computes again."""
    return not spec.post_norm and spec.traits.norms != "behind"


def _gathers(kind: LayerKind, cut: Cut, sequence_parallel: bool) -> bool:
    """Whether a mixture reads the tokens of all tensor-parallel ranks, which have their own alone."""
    return kind.mlp == "experts" and _split(cut, sequence_parallel) > 1 and not _of_replicas(cut)


def _of_replicas(cut: Cut) -> bool:
    """Whether several replicas share the experts: each rank then routes own tokens."""
    return cut.expert_tp * cut.ep > cut.tp


def _split(cut: Cut, sequence_parallel: bool) -> int:
    return cut.tp if sequence_parallel else 1
