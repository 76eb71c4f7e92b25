"""A checkpoint loads at any layout: every element of weights, moments and main weights is where it was, the step count
too, and the next step is the same.
"""

import json

import pytest

from tests.checkpoint.layouts import AXES, CASES, LAYOUTS, MODELS, Case
from tests.covering import uncovered
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NAMES = [case.name for case in CASES]
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",), "sgd": ()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    root = tmp_path_factory.mktemp("layouts")
    for name in sorted({case.model for case in CASES}):
        family, tied = MODELS[name]
        make_checkpoints(root / name, family=family, tied=tied, num_layers=4)
    run_ranks(4, "tests.checkpoint.layouts_worker", root, root / "out")
    return json.loads((root / "out" / "found.json").read_text())


def test_any_two_values_stand_together() -> None:
    assert uncovered(AXES, [case.values for case in CASES]) == set()
    assert {case.source_name for case in CASES} == {case.target_name for case in CASES} == set(LAYOUTS)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_element_is_where_it_was(case: Case, found: dict) -> None:
    assert set(found[case.name]["after loading"].values()) == {0.0}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_one_rank_reads_what_describes_the_checkpoint(case: Case, found: dict) -> None:
    """With thousands of ranks each would parse tens of thousands of chunks, from one file."""
    assert found[case.name]["metadata was read"] == [[f"{case.name}/first/step_000001/actor"], [], [], []]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_next_step_is_the_same(case: Case, found: dict) -> None:
    """Sums in another order: float32 to 1e-5; in bfloat16 the squares of gradients that have 8 bits."""
    allowed = 1e-5 if case.dtype == "float32" else 0.1
    allowed *= 10 if case.model.startswith("qwen3_5") else 1  # see `TOLERANCES` of tests/distributed/test_parity.py
    assert max(found[case.name]["after a step"].values()) < allowed
    assert found[case.name]["after a step"]["optimizer.num_steps"] == 0.0
    moved = found[case.name]["moved"]
    matrices = {key for key in moved if "linear" in key and "layer_norm" not in key}
    assert all(moved[key] > 0 for key in matrices), "there is something to keep"


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_all_of_the_optimizer_is_there(case: Case, found: dict) -> None:
    keys = set(found[case.name]["after loading"])
    weights = {key for key in keys if not key.startswith("optimizer.")}
    moments = MOMENTS[case.optimizer.split()[0]]
    trained = {key for key in weights if not key.endswith("router.expert_bias")}
    states = {f"optimizer.state.{name}.{key}" for name in moments for key in trained}
    # float32 in any model: the routers of GLM-4.5, and what decays a state
    halves = {key for key in trained if case.model != "glm4_moe" or "router" not in key}
    halves -= {key for key in trained if key.endswith("A_log")}
    states |= {f"optimizer.state.fp32_param.{key}" for key in halves if case.dtype == "bfloat16"}
    assert keys == weights | states | {"optimizer.num_steps"}
