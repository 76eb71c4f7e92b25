"""Which model runner an engine gets: ours to say, and V2 only where it can do what is asked."""

import ast
import functools
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.triton_utils import HAS_TRITON

from hybridflow.config import SamplingConfig
from hybridflow.rollout import runner

PLAIN = SamplingConfig(max_response_length=8)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner.VARIABLE, "")  # so that what the test leaves goes with it
    monkeypatch.delenv(runner.VARIABLE)
    monkeypatch.setattr(runner, "_wish", runner._wish.__wrapped__)


def chosen(
    sampling: SamplingConfig = PLAIN,
    *,
    cuda: bool = True,
    triton: bool = True,
    pp: int = 1,
    cuts_routes: bool = False,
) -> str:
    runner.choose_runner(sampling, cuda=cuda, triton=triton, pp=pp, cuts_routes=cuts_routes)
    return os.environ[runner.VARIABLE]


def test_v2_where_it_can() -> None:
    assert chosen() == "1"
    assert [chosen(cuda=False), chosen(triton=False), chosen(pp=2), chosen(cuts_routes=True)] == ["0"] * 4


@pytest.mark.parametrize(
    ("key", "most", "more"),
    [
        ("allowed_token_ids", tuple(range(1024)), tuple(range(1025))),
        ("logit_bias", {i: 0.5 for i in range(1024)}, {i: 0.5 for i in range(1025)}),
        ("stop_token_ids", tuple(range(96)), tuple(range(97))),  # 32 are left for the ends of the model
    ],
)
def test_v1_where_v2_has_no_room(key: str, most: object, more: object) -> None:
    assert chosen(PLAIN.model_copy(update={key: most})) == "1"
    assert chosen(PLAIN.model_copy(update={key: more})) == "0"


def test_a_user_may_ask_for_v1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner.VARIABLE, "0")
    assert chosen() == "0"
    monkeypatch.setenv(runner.VARIABLE, "1")
    assert [chosen(), chosen(pp=2)] == ["1", "0"]


def test_our_own_word_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_wish", functools.cache(runner._wish))
    assert [chosen(pp=2), chosen()] == ["0", "1"]


def test_vllm_takes_our_word(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(cuda=False)
    envs.disable_envs_cache()
    assert VllmConfig().use_v2_model_runner is False
    monkeypatch.delenv(runner.VARIABLE)
    assert chosen() == "1"
    if HAS_TRITON:
        assert VllmConfig().use_v2_model_runner
    else:
        with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
            VllmConfig()


def test_the_sizes_of_the_tables_are_vllms() -> None:
    source = Path(find_spec("vllm").origin).parent / "v1" / "worker" / "gpu" / "sample" / "logit_bias.py"
    found = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    assert found == {
        "MAX_NUM_ALLOWED_TOKEN_IDS": runner.MOST_ALLOWED_TOKEN_IDS,
        "MAX_NUM_LOGIT_BIAS_TOKENS": runner.MOST_LOGIT_BIASES,
        "MAX_NUM_STOP_TOKEN_IDS": runner.MOST_STOPS,
    }
