"""Modules that are computed again change neither a loss nor a gradient, and free what the plan says."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.config.recompute import Recompute, shown
from hybridflow.parallel.layout import Cut, expert_tensor_parallel
from hybridflow.placement.footprint import layer_bytes
from tests.distributed.cases import Case, make_family
from tests.distributed.recompute_cases import NUM_LAYERS, RUNS, Again, values
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

ITEM = 4  # bytes of float32
DEFAULT = {
    "llama-tp1pp1dp1vpp1",
    "glm4_moe-tp1pp1dp1vpp1",
    "glm4_moe-tp2pp1dp1vpp1sp",
    "glm4_moe-tp1pp1dp1vpp1-adapters",
}
MARKED = [pytest.param(run, marks=() if run.name in DEFAULT else pytest.mark.thorough) for run in RUNS]
COUNTED = [  # frozen weights keep less, and a ReLU keeps its output alone
    pytest.param(run, marks=() if run.name in DEFAULT else pytest.mark.thorough)
    for run in RUNS
    if not run.adapters and run.family != "opt" and run.case.pp == 1
]


@pytest.fixture(scope="module")
def checkpoints(selected, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in sorted({run.family for run in selected("run")}):
        make_family(root, name, num_layers=NUM_LAYERS)
    return root


@pytest.fixture(scope="module")
def results(checkpoints, selected, tmp_path_factory) -> Path:
    out, wanted = tmp_path_factory.mktemp("results"), selected("run")
    for num_ranks in sorted({run.case.num_ranks for run in wanted}):
        names = sorted({run.name for run in wanted if run.case.num_ranks == num_ranks})
        run_ranks(num_ranks, "tests.distributed.recompute_worker", checkpoints, out, *names)
    return out


def load(results: Path, run: Again) -> list[dict[str, dict[str, Any]]]:
    """Of each rank, by value."""
    return json.loads((results / f"{run.name}.json").read_text())


@pytest.mark.parametrize("run", MARKED, ids=lambda run: run.name)
def test_loss_and_gradients_are_the_same_to_the_bit(run: Again, checkpoints: Path, results: Path) -> None:
    ranks = load(results, run)
    assert ranks[0].keys() == {"none", *map(shown, values(spec_of(run, checkpoints)))}
    for found in ranks:
        assert found.pop("none")["largest"] > 1e-3
        assert {value: (of["same_loss"], of["difference"]) for value, of in found.items()} == dict.fromkeys(
            found, (True, 0.0)
        )


def spec_of(run: Again, checkpoints: Path) -> ModelSpec:
    return read_spec(checkpoints / run.family / "policy")


@pytest.mark.parametrize("run", COUNTED, ids=lambda run: run.name)
def test_what_is_kept_no_more_is_what_the_plan_says(run: Again, checkpoints: Path, results: Path) -> None:
    """Of all ranks, in bytes. On CPUs experts keep one product more: that of gate and up, before its share.

    Beside it the plan leaves out the roots of norms, the shared expert's gate, and numbers of a few experts a token.
    """
    spec, ranks = spec_of(run, checkpoints), load(results, run)
    mixtures = sum(spec.layer_kind(layer).mlp == "experts" for layer in range(NUM_LAYERS))
    tp = run.case.tp
    roots = 2 * NUM_LAYERS * ITEM / (tp if run.case.sequence_parallel else 1)
    product = mixtures * ITEM * spec.experts_per_token * spec.ffn_hidden_size / tp
    gates = mixtures * ITEM * (2 if spec.traits.experts and spec.traits.experts.shared_size_key else 0)
    numbers = mixtures * (64 + 56 * spec.experts_per_token)
    more = {
        "layernorm": (roots, roots),
        "mlp": (0, 0),
        "moe_act": (product, product + numbers),
        "shared_experts": (0, gates),
        "moe": (product, product + numbers),
    }
    tested = [value for value in values(spec) if not isinstance(value, str) and value[0] in more and len(value) == 1]
    assert len(tested) >= 1 + bool(spec.num_experts)
    for value in tested:
        freed = sum(found["none"]["bytes"] - found[shown(value)]["bytes"] for found in ranks)
        planned = sum(found["none"]["tokens"] for found in ranks) * (
            kept(spec, run.case, "none") - kept(spec, run.case, value)
        )
        least, most = (sum(found["none"]["tokens"] for found in ranks) * each for each in more[value[0]])
        assert planned + least <= freed <= planned + most, value
        assert planned > 0


@pytest.mark.parametrize("run", COUNTED, ids=lambda run: run.name)
def test_modules_together_free_more_than_each(run: Again, checkpoints: Path, results: Path) -> None:
    """But that `moe` has the other two modules of a mixture in it."""
    every = values(spec_of(run, checkpoints))[-2]
    for found in load(results, run):
        alone = [of["bytes"] for value, of in found.items() if value not in ("full", shown(every))]
        assert found[shown(every)]["bytes"] < min(alone)


def kept(spec: ModelSpec, case: Case, value: Recompute) -> float:
    """Bytes a token, of a rank."""
    cut = Cut(case.tp, expert_tensor_parallel(case.tp, case.ep, case.etp), case.ep)
    how = {"cut": cut, "sequence_parallel": case.sequence_parallel, "recompute": value, "itemsize": ITEM}
    return sum(layer_bytes(spec, spec.layer_kind(layer), **how) for layer in range(NUM_LAYERS))
