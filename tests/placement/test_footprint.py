"""The memory estimate: sums by hand, against the reshard plan's own count, and against a live model of one rank.

As a module (`python -m tests.placement.test_footprint MODEL`) it builds that model as an actor,
steps it, prints what it holds.
"""

import json
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest

from hybridflow.architecture.layer_kinds import DENSE, EXPERTS
from hybridflow.architecture.mlps.known import MLPS
from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import model_weights
from hybridflow.config import OptimizerConfig
from hybridflow.config.recompute import Recompute
from hybridflow.parallel.layout import Cut, Layout
from hybridflow.placement.footprint import (
    Footprint,
    chunks_in_flight,
    engine_activation_bytes,
    forward_activation_bytes,
    gradient_bytes,
    layer_bytes,
    model_elements,
    optimizer_bytes,
    output_bytes,
    sampler_bytes,
    stage_elements,
    together,
    training_activation_bytes,
)
from hybridflow.placement.kv_cache import CacheBlocks, KVCacheSize
from hybridflow.reshard.groups import rollout_layout
from hybridflow.reshard.plan import plan_reshard
from tests.tiny_models import make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
# a rank's padding: 64 elements a parameter and 128 a bucket, and a counter of 4 bytes a parameter in torch's Adam
PADDING, BUCKET_BYTES = 64, 1 << 30
OPTIMIZERS = {
    "adam": {"lr": 0.1},
    "adam, whole": {"lr": 0.1, "zero1": False},
    "sgd": {"name": "sgd", "lr": 0.1},
    "sgd with momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}


def small_spec(**changes: object) -> ModelSpec:
    fields = dict(
        path=Path("nowhere"),
        family="llama",
        head="lm",
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=60,  # padded to 64
        norm_eps=1e-6,
        tied=False,
        max_positions=64,
    )
    return ModelSpec(**{**fields, **changes})


def layout(tp: int, pp: int, dp: int, vpp: int = 1) -> Layout:
    return Layout(tp, pp, dp, tuple(range(tp * pp * dp)), vpp=vpp)


# ------------------------------------------------------------------------------------------------ weights

# a layer: 2 norms of 8, qkv 24 x 8, proj 8 x 8, fc1 32 x 8, fc2 8 x 16
WHOLE_LAYER, HALF_LAYER = 16 + 192 + 64 + 256 + 128, 16 + 96 + 32 + 128 + 64
EMBEDDING = 64 * 8


def test_elements_by_hand() -> None:
    spec = small_spec()
    assert model_elements(spec, "lm") == 2 * EMBEDDING + 2 * WHOLE_LAYER + 8
    assert model_elements(spec, "score") == EMBEDDING + 2 * WHOLE_LAYER + 8 + 8
    assert stage_elements(spec, "lm", layout(2, 2, 1)) == (EMBEDDING // 2 + HALF_LAYER, HALF_LAYER + 8 + EMBEDDING // 2)
    assert stage_elements(spec, "score", layout(2, 2, 3)) == (EMBEDDING // 2 + HALF_LAYER, HALF_LAYER + 8 + 8)


def test_projected_embeddings_by_hand() -> None:
    """Of 6 columns: a matrix in on the first stage, one out on the last, and a value head of 6.

    A layer: 2 norms of 8 + 8, qkv 24 x 8 + 24, proj 8 x 8 + 8, fc1 16 x 8 + 16, fc2 8 x 16 + 8; no norm after the last.
    """
    spec = small_spec(family="opt", tied=True, projected_size=6, post_norm=True)
    layer, positions = 32 + 216 + 72 + 144 + 136, 66 * 8
    first, last = 64 * 6 + 48 + positions + layer, layer + 48
    assert stage_elements(spec, "lm", layout(1, 2, 1)) == (first, last + 64 * 6)
    assert stage_elements(spec, "score", layout(1, 2, 1)) == (first, last + 6)
    assert model_elements(spec, "lm") == first + last
    plain = small_spec(family="opt", tied=True, post_norm=True)

    def more(stage: int, head: str) -> int:
        options = dict(head=head, itemsize=4, sequence_parallel=False, recompute="none", tokens=10, replica_tokens=100)
        found = [training_activation_bytes(s, layout(1, 2, 1), stage, **options) for s in (spec, plain)]
        return found[0] - found[1]

    assert more(0, "lm") == 4 * 2 * 10 * 6  # of two micro-batches under way
    assert more(1, "score") == 4 * 10 * 6
    assert more(1, "lm") == 4 * 10 * (6 + 6 - 8)  # the rows' gradient has 6 columns, too, in place of 8


def test_a_tied_model_has_one_embedding_and_its_last_stage_a_copy() -> None:
    spec = small_spec(tied=True)
    assert model_elements(spec, "lm") == EMBEDDING + 2 * WHOLE_LAYER + 8
    assert stage_elements(spec, "lm", layout(1, 2, 1)) == (EMBEDDING + WHOLE_LAYER, WHOLE_LAYER + 8 + EMBEDDING)
    # a critic that starts from it has a value head of its own
    assert stage_elements(spec, "score", layout(1, 2, 1)) == (EMBEDDING + WHOLE_LAYER, WHOLE_LAYER + 8 + 8)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 4, 2), (4, 2, 1, 2)], ids=str)
def test_elements_are_those_of_the_reshard_plan(sizes: tuple[int, ...], tied: bool) -> None:
    spec = small_spec(num_layers=8, num_heads=4, family="qwen2", tied=tied)
    train = layout(*sizes)
    plan = plan_reshard(spec, train, rollout_layout(train, 1, 1))
    elements = stage_elements(spec, "lm", train)
    for rank in train.ranks:
        held = sum(prod(shard_shape(weight, spec, train.cut)) for weight in plan.trained_weights(rank))
        assert held == elements[train.coordinates(rank).pp]


# ------------------------------------------------------------------------------------------------ a live model


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """memory_bytes after a step by "dtype/optimizer", and the model's directory."""
    model = make_checkpoints(tmp_path_factory.mktemp("footprint"), family="qwen2", tied=False) / "policy"
    command = [sys.executable, "-m", "tests.placement.test_footprint", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {"model": model} | json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_live_model_holds_what_is_estimated(live: dict, dtype: str, name: str) -> None:
    spec, optimizer = read_spec(live["model"]), OptimizerConfig(**OPTIMIZERS[name])
    (elements,) = stage_elements(spec, "lm", layout(1, 1, 1))
    num_parameters = len(list(model_weights(spec, "lm")))
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    expected = {
        "weights": itemsize * elements,
        "gradients": gradient_bytes(elements),
        "optimizer": optimizer_bytes(elements, optimizer, dtype=dtype, copies=1),
    }
    for kind, size in expected.items():
        slack = (PADDING * num_parameters + 128) * size // elements + 4 * num_parameters * (kind == "optimizer")
        assert size <= live[f"{dtype}/{name}"][kind] <= size + slack, kind


def measure(model: str) -> dict[str, dict[str, int]]:
    import torch.distributed as dist

    from hybridflow.config import TrainedRoleConfig
    from hybridflow.parallel import platform as platforms
    from hybridflow.parallel.exchange import Exchange
    from hybridflow.parallel.grid import ProcessGroups
    from hybridflow.roles.base import RunContext
    from hybridflow.roles.policy import Actor
    from tests.placing import place_model

    platform = platforms.start(seed=0)
    exchange = Exchange(dist.group.WORLD, platform.device)
    world = RunContext(platform, ProcessGroups(), exchange, bucket_bytes=BUCKET_BYTES)
    found = {}
    for dtype in ("bfloat16", "float32"):
        for name, optimizer in OPTIMIZERS.items():
            config = TrainedRoleConfig(model=model, dtype=dtype, optimizer=optimizer)
            actor = Actor(place_model("actor", config, 1), temperature=1.0, world=world)
            actor.training_model.zero_gradients()
            actor.training_model.step(0.1)
            found[f"{dtype}/{name}"] = actor.training_model.memory_bytes()
    platforms.stop()
    return found


# ------------------------------------------------------------------------------------------------ optimizer, cache


@pytest.mark.parametrize(
    ("optimizer", "dtype", "copies", "expected"),
    [
        (OPTIMIZERS["adam"], "bfloat16", 1, 12_000),
        (OPTIMIZERS["adam"], "bfloat16", 4, 3_000),
        (OPTIMIZERS["adam"], "float32", 4, 2_000),
        (OPTIMIZERS["adam, whole"], "bfloat16", 4, 12_000),
        (OPTIMIZERS["sgd"], "bfloat16", 4, 4_000),  # ZeRO-1 is Adam's alone
        (OPTIMIZERS["sgd"], "float32", 4, 0),
        (OPTIMIZERS["sgd with momentum"], "bfloat16", 4, 8_000),
        (OPTIMIZERS["sgd with momentum"], "float32", 4, 4_000),
    ],
)
def test_optimizer_bytes_by_hand(optimizer: dict, dtype: str, copies: int, expected: int) -> None:
    assert optimizer_bytes(1000, OptimizerConfig(**optimizer), dtype=dtype, copies=copies) == expected


def test_engine_stages_share_the_cache_by_their_layers() -> None:
    stages = ((0, 1, 2, 3), (4, 5))
    assert [KVCacheSize(1 << 30, 1, CacheBlocks(16, 1), True).of_stage(stages, stage) for stage in range(2)] == [
        1 << 30,
        1 << 29,
    ]


def test_models_of_a_rank_take_turns_to_compute() -> None:
    one, other = Footprint(1, 2, 3, activations=40, kv_cache=5), Footprint(10, activations=30)
    assert together([one, other]) == Footprint(11, 2, 3, activations=40, kv_cache=5)
    assert together([one, other]).total == 61


# ------------------------------------------------------------------------------------------------ activations


def layer(recompute: Recompute, tp: int = 1, sequence_parallel: bool = False) -> float:
    how = dict(sequence_parallel=sequence_parallel, recompute=recompute, itemsize=2)
    return layer_bytes(small_spec(), DENSE, cut=Cut(tp), **how)


def test_a_layers_activations_by_hand() -> None:
    # h = q = k = 8, f = 16, 2 heads: 4 h = 32, 3 q + 3 k + 3 f = 96, log-sum-exp 8 bytes
    assert layer("none") == 2 * (32 + 96) + 8
    assert layer("none", tp=2) == 2 * (32 + 48) + 4
    assert layer("none", tp=2, sequence_parallel=True) == 2 * (16 + 48) + 4
    assert layer("selective") == 2 * (32 + 32 + 48)
    assert layer("full") == 2 * 8
    assert layer("full", tp=2, sequence_parallel=True) == 2 * 4


def test_modules_of_a_dense_layer_by_hand() -> None:
    """An MLP keeps 3 f, a norm's output h; attention as `selective`."""
    assert layer(("core_attn",)) == layer("selective")
    assert layer("none") - layer(("mlp",)) == 2 * 48
    assert layer("none") - layer(("layernorm",)) == 2 * 16
    assert layer("none", 2, True) - layer(("layernorm",), 2, True) == 2 * 8
    assert layer(("core_attn", "layernorm", "mlp"), 2, True) == 2 * (2 * 8 / 2 + (2 * 8 + 2 * 8) / 2)


MIXTURE = dict(family="glm4_moe", num_experts=4, experts_per_token=2, shared_ffn_hidden_size=4)


def of_mixture(recompute: Recompute, cut: Cut = Cut(), **changes: object) -> float:  # noqa: B008
    """With two of four experts of 16 columns, and a shared one of 4; sequence parallel where there are ranks."""
    how = dict(cut=cut, sequence_parallel=cut.tp > 1, recompute=recompute, itemsize=2)
    return layer_bytes(small_spec(**MIXTURE | changes), EXPERTS, **how)


def test_modules_of_a_mixture_by_hand() -> None:
    """Scores are 4 bytes of each expert, and tokens in float32, which a sigmoid's logits are made of, 4 h."""
    mixing, router = layer("none") - 2 * (32 + 48), 4 * 4 + 4 * 8
    assert of_mixture("none") == mixing + 2 * (32 + 2 * (3 * 16 + 8) + 3 * 4) + router
    assert of_mixture("none") - of_mixture(("moe_act",)) == 2 * 2 * 16
    assert of_mixture("none") - of_mixture(("shared_experts",)) == 2 * 3 * 4
    assert of_mixture(("moe",)) == of_mixture(("moe", "moe_act", "shared_experts")) == mixing + 2 * 32
    gated = dict(family="qwen3_5_moe", delta=None)  # the output, h, is multiplied by a gate
    assert of_mixture("none", **gated) - of_mixture(("shared_experts",), **gated) == 2 * (3 * 4 + 8)


def test_a_mixture_on_two_ranks_keeps_the_tokens_that_it_gathers() -> None:
    """h of all tokens in the place of h / 2 of own ones; where replicas share experts, for the shared one alone."""
    mixing, router = layer("none", 2, True) - 2 * (16 + 24), 4 * 4 + 4 * 8
    within, over = Cut(2, 1, 2), Cut(2, 1, 4)
    experts = 2 * (2 * (3 * 16 + 8) / 2 + 3 * 4 / 2)
    assert of_mixture("none", within) == mixing + 2 * (3 * 4 + 8) + experts + router
    assert of_mixture("none", over) == mixing + 2 * (4 * 4 + 8) + experts + router / 2
    assert of_mixture("none", within) - of_mixture(("layernorm",), within) == 2 * 4
    assert of_mixture("none", over) - of_mixture(("layernorm",), over) == 2 * 8
    assert of_mixture("none", over) - of_mixture(("shared_experts",), over) == 2 * (3 * 4 / 2 + 8)
    assert of_mixture("none", within) - of_mixture(("shared_experts",), within) == 2 * 3 * 4 / 2
    assert of_mixture(("moe",), within) == mixing + 2 * 4 * 4


def test_rows_that_are_counted_on_the_device_have_room_for_all_copies() -> None:
    """Of two copies a token a rank of two with whole experts has one in the mean, and room for both."""
    spec = small_spec(family="mixtral", num_experts=4, experts_per_token=2, ffn_hidden_size=16)
    passing = partial(MLPS["experts"].passing_bytes, spec, itemsize=2)
    assert passing(cut=Cut(2, 1, 2), counted=False) == 2 * 2 * 2 * 8
    assert passing(cut=Cut(2, 1, 2), counted=True) == 2 * 2 * (2 * 8 + (3 * 16 + 8) / 2)
    assert passing(cut=Cut(4, 2, 2), counted=True) == 2 * 2 * (2 * 8 + (3 * 16 / 2 + 8) / 2)
    for all_sizes_known in (Cut(2, 2, 1), Cut(1, 1, 2)):
        assert passing(cut=all_sizes_known, counted=True) == 2 * 2 * 2 * 8
    assert MLPS["dense"].passing_bytes(spec, cut=Cut(2, 1, 2), itemsize=2, counted=True) == 0


def test_micro_batches_in_flight() -> None:
    assert [chunks_in_flight(layout(1, 4, 1), stage) for stage in range(4)] == [4, 3, 2, 1]
    # pp v + pp - 1 on the first stage, and pp v - (pp - 1) on the last
    assert [chunks_in_flight(layout(1, 4, 1, 2), stage) for stage in range(4)] == [11, 9, 7, 5]


def activations(stage: int, *, recompute: Recompute = "none", replica_tokens: int = 1000, head: str = "lm") -> int:
    return training_activation_bytes(
        small_spec(),
        layout(1, 2, 1),
        stage,
        head=head,
        itemsize=2,
        sequence_parallel=False,
        recompute=recompute,
        tokens=10,
        replica_tokens=replica_tokens,
    )


def test_training_activations_by_hand() -> None:
    assert activations(0) == 2 * 10 * 264  # two micro-batches of 10 tokens, one layer
    # one, the last norm's input and output, the logits, of which three float32 copies, and the gradient of their rows
    norm, outputs = 10 * 2 * 2 * 8, 10 * 2 * (8 + 64 + 8) + 3 * 4 * 10 * 64
    assert activations(1) == 10 * 264 + norm + outputs
    assert activations(1, head="score") == 10 * 264 + norm + 10 * (2 * 8 + 4 * 8 + 4)  # the rows in float32 too
    # run again when the outputs are gone: the larger of the two
    assert activations(1, head="score", recompute="full") == 10 * 16 + 10 * 264
    assert activations(1, recompute="full") == 10 * 16 + norm + outputs
    assert output_bytes(small_spec(), "score", tp=2, itemsize=4, rows=10) == 10 * (4 * 8 + 4)
    assert activations(0, replica_tokens=15) == 15 * 264  # there are no two full micro-batches
    assert activations(0, recompute="full") == 2 * 10 * 16 + 10 * 264
    # an MLP by itself, 96 bytes; with it the output of the norm that it reads
    assert activations(0, recompute=("mlp",)) == 2 * 10 * (264 - 96) + 10 * 96
    assert activations(0, recompute=("layernorm", "mlp")) == 2 * 10 * (264 - 96 - 32) + 10 * (96 + 16)


def test_activations_without_gradients_by_hand() -> None:
    spec = small_spec()
    sizes = {"head": "lm", "itemsize": 2, "sequence_parallel": False, "tokens": 10}
    assert forward_activation_bytes(spec, layout(1, 2, 1), 0, **sizes) == 10 * 264
    wide = small_spec(vocab_size=1000)  # padded to 1024
    assert output_bytes(wide, "lm", tp=2, itemsize=2, rows=10) == 10 * (2 * 8 + 2 * 512 + 2 * 4 * 512)
    assert forward_activation_bytes(wide, layout(2, 1, 1), 0, **sizes) == 10 * (2 * 8 + 2 * 512 + 2 * 4 * 512)
    # of more rows than a chunk on a GPU, the copies are of a chunk; of more than 2^28 logits, those are made
    assert output_bytes(wide, "lm", tp=2, itemsize=2, rows=2**18) == 2**18 * 2 * (8 + 512) + 2 * 4 * 2**26
    assert output_bytes(wide, "lm", tp=2, itemsize=2, rows=2**20) == 2**20 * 2 * 8 + 2**28 * 2 + 2 * 4 * 2**26
    # of few rows the gradient of the weight is larger than the copies, of which there are three
    few = {"tp": 2, "itemsize": 2, "backward": True}
    assert output_bytes(wide, "lm", rows=1, **few) == 2 * (8 + 512) + 2 * 8 + 2 * 8 * 512
    assert output_bytes(wide, "lm", rows=10, **few) == 10 * (2 * (8 + 512) + 2 * 8 + 3 * 4 * 512)
    assert engine_activation_bytes(spec, cut=Cut(1), itemsize=2, tokens=10, sequences=2) == 10 * 264
    assert engine_activation_bytes(wide, cut=Cut(2), itemsize=2, tokens=10, sequences=2) == 4 * 2 * 1024


def test_what_a_sampler_keeps_by_hand() -> None:
    assert sampler_bytes(small_spec(vocab_size=100), sequences=3) == 3 * (4 * 100 + 4 * 4)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
