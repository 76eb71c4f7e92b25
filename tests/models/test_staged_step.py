"""A step in parts from host memory is the whole step, bit for bit."""

import json

import pytest

from tests.checkpoint.layouts import MODELS
from tests.launch import run_ranks
from tests.models.staged_worker import CASES, PART_BYTES, PLACES, STEPS
from tests.tiny_models import make_checkpoints

pytestmark = pytest.mark.distributed
FIRST = ("tp2dp2ep4 adam bfloat16", "pp2dp2 adam whole float32")  # of the default set
cases = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in FIRST else pytest.mark.thorough) for name in CASES]
)


@pytest.fixture(scope="module")
def found(selected, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    root = tmp_path_factory.mktemp("staged")
    for model in sorted({*PLACES.values()}):
        kind, tied = MODELS[model]
        make_checkpoints(root / "models" / model, family=kind, tied=tied, num_layers=4)
    run_ranks(4, "tests.models.staged_worker", root / "models", root / "found", *sorted(selected("case")))
    return json.loads((root / "found.json").read_text())


@cases
def test_weights_main_weights_moments_and_norms_are_those_of_whole_steps(case: str, found: dict) -> None:
    for rank in found[case]:
        assert rank["differs"] == []
        assert rank["moved"] > 10, "there is something to compare"
        assert rank["norms"][0] == rank["norms"][1] and len(rank["norms"][0]) >= STEPS
        assert rank["norms again"][0] == rank["norms again"][1]
        assert rank["num_steps"][0] == rank["num_steps"][1]


@cases
def test_two_parts_are_on_the_device_and_no_more(case: str, found: dict) -> None:
    for rank in found[case]:
        assert rank["parts"] >= 3 and rank["host"] == [0, rank["parts"] * PART_BYTES]
        assert rank["bytes"][0] > 2 * PART_BYTES and rank["bytes"][1] == 0
        assert 2 * PART_BYTES <= rank["held"] < 2 * PART_BYTES + 1024, "with counts of steps"


@cases
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(case: str, found: dict) -> None:
    assert [rank["not finite"] for rank in found[case]] == [[]] * 4


@cases
def test_a_checkpoint_of_either_goes_on_as_the_other(case: str, found: dict) -> None:
    assert set(found[case][0]["saved"].values()) == {0.0}
    assert any("fp32_param" in key for key in found[case][0]["saved"]) == ("float32" not in case)
    for rank in found[case]:
        assert set(rank["resumed"]) == {"staged", "whole, then staged", "staged, then whole"}
        assert [*rank["resumed"].values()] == [[]] * 3
