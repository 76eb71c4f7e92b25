"""The lists of layouts are covering arrays: two values that no case has together are refused, as is shown here, or need
more ranks than a test starts."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError
from hybridflow.placement.placed import place
from tests.covering import pair, uncovered
from tests.distributed import algorithm_cases, fixed_cases, lora_cases, pairs
from tests.distributed.cases import ALGORITHM, AXES, NUM_LAYERS, SGD, SHOWN, Case
from tests.distributed.parity_worker import experiment
from tests.tiny_models import make_checkpoints

CUTS = {axis: (1, 2) for axis in ("tp", "pp", "dp", "cp")}
MIXTURES = ("glm4_moe", "qwen3_moe", "deepseek_v3")
# two axes, the least layout with the two values, the rollout, what is said
REFUSED: list[tuple[tuple[str, str], Case, dict[str, Any], str]] = [
    (("tp", "sp"), Case(sequence_parallel=True), {}, "sequence_parallel needs tensor_parallel_size > 1"),
    (("pp", "vpp"), Case(vpp=2), {}, "virtual_pipeline_parallel_size = 2 cannot go with pipeline_parallel_size = 1"),
    (("pp", "vpp"), Case(pp=4, vpp=2), {}, "the 1 layers of pipeline stage 0 cannot be cut into 2 model chunks"),
    *((("kind", "experts"), Case(dp=4, ep=ep, etp=etp), {}, "has no experts") for ep, etp in AXES["experts"][1:]),
    (("kind", "whole"), Case(tp=2), {"enable_expert_parallel": True}, "rollout.enable_expert_parallel = 2: .* has no"),
]
MOST_RANKS = 8  # that a test starts
TOO_MANY_RANKS = [
    (("tp", "pp"), Case(tp=4, pp=4)),
    *((("pp", "experts"), Case(pp=4, dp=4, ep=ep, etp=etp)) for ep, etp in AXES["experts"][2:]),
]


def values(cases: list[tuple[Case, str]]) -> list[dict[str, Any]]:
    return [{"kind": family, **case.values} for case, family in cases]


@pytest.mark.parametrize(
    ("axes", "cases"),
    [
        (AXES, values(SHOWN)),
        (lora_cases.LORA_AXES, values(lora_cases.SHOWN)),
        (pairs.PAIR_AXES, [each.values for each in (*pairs.DEFAULT, *pairs.REST)]),
        (
            {"name": algorithm_cases.ALGORITHMS, **CUTS},
            [{"name": name, **case.values} for case, names in algorithm_cases.RUN.items() for name in names],
        ),
        (CUTS, [case.values for case, _ in fixed_cases.LAYOUTS]),  # each with all algorithms
    ],
    ids=["parity", "adapters", "hand-offs", "algorithms", "fixed data"],
)
def test_any_two_values_stand_together_but_for_those_that_are_refused(axes: dict, cases: list) -> None:
    plain = [kind for kind in axes.get("kind", ()) if kind not in MIXTURES]
    least = [(both, {"kind": kind, "whole": True, **case.values}) for both, case, *_ in REFUSED for kind in plain]
    assert all(case.num_ranks > MOST_RANKS for _, case in TOO_MANY_RANKS)
    refused = {pair(case, *both) for both, case in least} | {pair(case.values, *both) for both, case in TOO_MANY_RANKS}
    assert uncovered(axes, cases) == {both for both in refused if all(x in axes.get(axis, ()) for axis, x in both)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return make_checkpoints(root, family="llama", tied=False, num_layers=NUM_LAYERS, num_kv_heads=4)


@pytest.mark.parametrize(("case", "rollout", "said"), [each[1:] for each in REFUSED])
def test_what_no_case_has_is_refused(case: Case, rollout: dict, said: str, models: Path) -> None:
    with pytest.raises((ConfigError, ValidationError), match=said):
        config = experiment(ALGORITHM, case, models, SGD, 64)
        place(ExperimentConfig.model_validate(config.model_dump() | {"rollout": rollout}), case.num_ranks)
