"""Context parallelism before a run: what is refused, and what a rank holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.architecture.spec import read_spec
from hybridflow.cli.plan import main
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Layout
from hybridflow.placement.context_parallel import check_context, context_bytes
from hybridflow.placement.footprint import forward_activation_bytes, training_activation_bytes
from tests.bench.long_context import MODELS as LONG
from tests.bench.long_context import YARN, config_of

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "configs" / "shapes"
NAMES = ("qwen3-8b", "gemma-3-4b", "qwen3.5-4b", "deepseek-v3")
QWEN, GEMMA, DELTA, DEEPSEEK = (read_spec(SHAPES / name) for name in NAMES)


def role(**given: object) -> RoleConfig:
    return RoleConfig.model_validate({"model": "m", "context_parallel_size": 2, **given})


@pytest.mark.parametrize(
    ("given", "spec", "cuda", "message"),
    [
        (
            {"context_parallel_size": 3},
            DELTA,
            False,
            r"context_parallel_size = 3: .*qwen3.5-4b has gated delta nets, of whose 16 key heads "
            r".* Set actor.context_parallel_size=1, 2, 4, 8 or 16$",
        ),
        (
            {"context_parallel_size": 16, "tensor_parallel_size": 2},
            DELTA,
            False,
            r"context_parallel_size = 16: .* of whose 8 key heads .* Set actor.context_parallel_size=1, 2, 4 or 8$",
        ),
        (
            {"dtype": "float32"},
            QWEN,
            True,
            r"context_parallel_size = 2 needs dtype = bfloat16 on GPUs, it is float32",
        ),
    ],
)
def test_what_ranks_cannot_share(given: dict, spec: object, cuda: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_context("actor", role(**given), spec, cuda=cuda)
    check_context("actor", role(**given | {"context_parallel_size": 1}), spec, cuda=cuda)


def test_what_they_can() -> None:
    for given, cuda in (({}, True), ({"dtype": "float32"}, False)):
        for spec in (QWEN, GEMMA, DELTA):
            check_context("actor", role(**given), spec, cuda=cuda)


def test_gathered_keys_and_values_by_hand() -> None:
    """Of 2 ranks with 100 tokens each, 8 key/value heads of 128 on 2 tensor-parallel ranks, in 16 bits."""
    one, two = Layout(2, 1, 2, (0, 1, 2, 3)), Layout(2, 1, 1, (0, 1, 2, 3), cp=2)
    whole = 2 * (2 * 100) * 2 * 4 * 128
    assert context_bytes(QWEN, two, itemsize=2, tokens=100) == 2 * whole
    expanded = 2 * (2 * 100) * 2 * 16 * 128  # gradients of keys and values for each of 32 query heads
    assert context_bytes(QWEN, two, itemsize=2, tokens=100, backward=True) == 4 * whole + expanded
    assert context_bytes(QWEN, one, itemsize=2, tokens=100) == 0
    few = replace(QWEN, num_kv_heads=1, num_heads=2, head_dim=8)  # one key/value head on each of two ranks
    assert context_bytes(few, two, itemsize=2, tokens=1) == 2 * (2 * 2 * 2 * 8)


def test_what_other_mixers_have_of_other_ranks_by_hand() -> None:
    """Of 2 ranks with 100 tokens each, on 2 tensor-parallel ranks, in 16 bits."""
    two = Layout(2, 1, 1, (0, 1, 2, 3), cp=2)
    # 64 heads of 192 on each rank, made of vectors of 512 + 64
    assert MIXERS["latent"].context_columns(DEEPSEEK, 2) == 576
    assert context_bytes(DEEPSEEK, two, itemsize=2, tokens=100) == 3 * 2 * (2 * 100) * 2 * 64 * 192
    assert context_bytes(DEEPSEEK, two, itemsize=2, tokens=100, backward=True) == 6 * 2 * (2 * 100) * 2 * 64 * 192
    # 16 and 32 heads of 128: queries, keys, values, gates, two numbers a value head; outputs
    assert MIXERS["delta_net"].context_columns(DELTA, 2) == (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) // 2
    only = replace(DELTA, num_layers=1, mixers=("delta_net",))
    assert context_bytes(only, two, itemsize=2, tokens=100, backward=True) == 2 * 2 * 2 * 100 * 8224
    # 2 of 4 key/value heads of 256: own ones and copies, in float32 and in 16 bits; ends of 1,023 tokens of two pieces
    only = replace(GEMMA, num_layers=1, mixers=("window",))
    whole = 2 * (4 + 2) * 9000 + (4 + 2 * 2) * 2 * 1023
    assert context_bytes(only, two, itemsize=2, tokens=9000) == 2 * 2 * 256 * whole
    # layers without windows: two copies of the keys and values of all ranks, and gradients of 4 query heads
    both = context_bytes(GEMMA, two, itemsize=2, tokens=9000, backward=True)
    assert both == max(2 * 2 * 2 * 256 * whole, 2 * 2 * 9000 * (4 * 2 * 2 * 256 + 2 * 4 * 256))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_those_of_a_ranks_tokens_and_what_is_gathered(recompute: str) -> None:
    one, two = Layout(2, 1, 2, (0, 1, 2, 3)), Layout(2, 1, 1, (0, 1, 2, 3), cp=2)
    sizes = {"head": "lm", "itemsize": 2, "sequence_parallel": True}
    found = [
        training_activation_bytes(QWEN, layout, 0, **sizes, recompute=recompute, tokens=16384, replica_tokens=1 << 20)
        for layout in (one, two)
    ]
    gathered = context_bytes(QWEN, two, itemsize=2, tokens=16384, backward=True)
    assert found[0] <= found[1] <= found[0] + gathered
    passes = [forward_activation_bytes(QWEN, layout, 0, **sizes, tokens=16384) for layout in (one, two)]
    assert passes[0] <= passes[1] <= passes[0] + gathered


def test_a_plan_tells_of_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = ["actor.data_parallel_size=null", "actor.context_parallel_size=2"]
    held = []
    for some in (changes[:1], changes):
        assert main(["configs/llama3_8b_8gpus.yaml", "--json", "--world-size", "8", *some]) == 0
        found = json.loads(capsys.readouterr().out)
        held.append(found["memory"]["training"]["worst_rank"])
    actor = found["roles"][0]
    assert (actor["tp"], actor["cp"], actor["dp"]) == (4, 2, 1)
    assert actor["groups_of_first_rank"] == {"tp": [0, 1, 2, 3], "pp": [0], "cp": [0, 4], "dp": [0]}
    assert held[0]["optimizer"] == held[1]["optimizer"] and held[0]["weights"] == held[1]["weights"]
    assert main(["configs/llama3_8b_8gpus.yaml", *changes]) == 0
    assert "tp 4 sp x pp 1 x cp 2 x dp 1" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "cp", "takes"), [(32768, 1, 2), (65536, 4, 1)])
def test_auto_shares_tokens_where_memory_or_seconds_ask_for_it(
    tokens: int, cp: int, takes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-30B-A3B on 8 GPUs of 80 GB: 65,536 tokens fit with 4 ranks alone. `takes`: sizes that fit."""
    tree = json.loads((SHAPES / "qwen3-30b-a3b" / "config.json").read_text())
    longer = {"rope_scaling": YARN, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(tree | longer))
    config = config_of(tmp_path, LONG["qwen3-30b-a3b"], tokens, cp=1)
    config["actor"] |= {"context_parallel_size": "auto"}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(config))
    assert main([str(tmp_path / "long.yaml"), "--world-size", "8", "--profile", "h100-sxm"]) == 0
    said = capsys.readouterr().out
    assert f"actor.context_parallel_size = {cp}  (auto)" in said
    assert ("the next best layout of other sizes" in said) == (takes > 1)
    if tokens > 32768:
        takes = "One of the longest sequences takes 3 GiB of each of the 2 tensor-parallel ranks"
        assert takes in " ".join(said.split())
