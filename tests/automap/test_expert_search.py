"""Searches over mixtures of experts: sizes within a replica and over several, against the plan's table one by one."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.automap.options import everything
from hybridflow.automap.search import SearchRequest, search
from hybridflow.automap.sizes import expert_sizes
from hybridflow.automap.timing import predict
from hybridflow.cli.plan import main
from hybridflow.config import ExperimentConfig
from hybridflow.config.kinds import load_config
from hybridflow.errors import ConfigError
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import place
from tests.automap.round_profile import small_spec
from tests.automap.test_search import DEVICE, GRPO
from tests.test_plan import CONFIG

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 60,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the model's config.json and moe.yaml."""
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(MIXTURE))
    tree: dict[str, Any] = copy.deepcopy(CONFIG | GRPO)
    del tree["reference"]
    tree["algorithm"]["kl"] = {"use": "none"}
    (tmp_path / "moe.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(*overrides: str) -> ExperimentConfig:
    config = load_config("moe.yaml", list(overrides))
    assert isinstance(config, ExperimentConfig)
    return config


def test_sizes_are_those_of_a_replica_and_of_several() -> None:
    """Of 12 experts on 2 x 6 ranks; 8 does not divide 12, and 12 is more than 10 ranks. Parts of a replica: 2 of 4."""
    spec = small_spec(num_experts=12, experts_per_token=2)
    assert expert_sizes(spec, 1, 12, most=10) == [1, 2, 3, 4, 6]
    assert expert_sizes(spec, 2, 6, most=12) == [1, 2, 4, 6, 12]
    assert expert_sizes(spec, 2, 1, most=8) == [1, 2]
    assert expert_sizes(small_spec(), 2, 4, most=8) == [1]
    assert expert_sizes(small_spec(num_experts=16, experts_per_token=2), 8, 2, most=16) == [1, 2, 4, 8, 16]


@pytest.mark.thorough
def test_the_best_of_all_expert_sizes_placed_and_timed_one_by_one() -> None:
    """Within each memory that any of them takes."""
    values = {
        "actor.tensor_parallel_size": (1, 2, 4),
        "actor.expert_parallel_size": (1, 2, 4),
        "actor.sequence_parallel": (False, True),
        "rollout.tensor_parallel_size": (1, 2, 4),
    }
    base = ("actor.micro_batch_tokens=10", "rollout.kv_cache_gib=1e-4", "rollout.max_num_seqs=4")
    found: list[tuple[float, int, tuple[int, int]]] = []
    for chosen in itertools.product(*values.values()):
        overrides = [f"{key}={str(value).lower()}" for key, value in zip(values, chosen, strict=True)]
        try:
            run = place(config_of(*base, *overrides), 4)
        except ConfigError:
            continue
        found.append((predict(run, DEVICE).seconds, fullest(run).bytes, (chosen[0], chosen[1])))
    assert {(1, 4), (1, 2), (2, 4), (2, 2), (4, 4), (4, 2), (1, 1)} <= {sizes for *_, sizes in found}
    free = {
        name: frozenset(key.partition(".")[2] for key in values if key.startswith(f"{section}."))
        for name, section in (("actor", "actor"), ("engine", "rollout"))
    }
    for memory in sorted({size for _, size, _ in found}):
        request = SearchRequest(config_of(*base), 4, DEVICE, memory, free=free)
        plans = search(request).plans
        mine = [plan for plan in plans if plan.choice is not None]
        assert all(plan.choice.bytes == plan.fullest.bytes for plan in mine if plan.choice is not None)
        best = min(seconds for seconds, size, _ in found if size <= memory)
        assert plans[0].seconds == pytest.approx(best)


def test_whole_experts_over_replicas_are_among_the_plans() -> None:
    asked = SearchRequest(config_of("actor.tensor_parallel_size=1"), 4, DEVICE, 1 << 40, shown=40)
    free = {name: keys - {"tensor_parallel_size"} for name, keys in everything(asked.config).items()}
    found = search(SearchRequest(asked.config, 4, DEVICE, 1 << 40, shown=40, free=free)).plans
    assert {plan.placed.models["actor"].layout.ep for plan in found} >= {1, 2, 4}


@pytest.mark.parametrize("ranks", [8, 16])
def test_auto_on_experts_over_replicas(ranks: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """One GPU holds 16 of 128 experts a layer, whichever of the replicas it is."""
    monkeypatch.chdir(ROOT)
    layout = ("actor.tensor_parallel_size=1", "actor.sequence_parallel=false", "rollout.kv_cache_gib=auto")
    layout += ("actor.recompute=full", "actor.micro_batch_tokens=4096")
    how = ("--world-size", str(ranks), "--profile", "h100-sxm", "--json")
    assert main(["configs/qwen3_30b_a3b_8gpus.yaml", *layout, *how]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert (found["roles"][0]["ep"], found["roles"][0]["dp"]) == (8, ranks)
    assert found["verdict"]["fits"]
