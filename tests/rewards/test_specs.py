"""Functions as a config asks for them: names, weights, limits, and arguments that fit."""

import os

import pytest
from pydantic import ValidationError

from hybridflow.config import ExperimentConfig, MetricsConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.specs import function_names, function_weights, judging_weights, pool_limits, pool_specs


def scoring(*functions: dict, **keys: object) -> ScoringConfig:
    return ScoringConfig(functions=functions, **keys)


def of_run(config: ScoringConfig, eval_reward: str | dict | None = None) -> ExperimentConfig:
    """What of a run's config functions are asked of."""
    metrics = MetricsConfig(eval_reward=eval_reward)
    return ExperimentConfig.model_construct(reward=config, metrics=metrics)


def test_a_function_is_asked_for_as_the_config_says() -> None:
    config = scoring(
        {"function": "tests.rewards.misbehaving:waits", "timeout_seconds": 2.0, "concurrency": 5},
        {"function": "hybridflow.rewards:matches", "arguments": {"pattern": "a*"}, "per": "batch"},
        {
            "function": "tests.rewards.misbehaving:length_parts",
            "arguments": {"most": 3},
            "parts": {"rank": 2.0, "of_most": 0.5},
            "weight": 3.0,
            "per": "group",
        },
        timeout_seconds=7.0,
        remote=[{"url": "http://x/score", "weight": -1.0, "request_seconds": 10.0, "retries": 2}],
    )
    waits, regular, length, remote = pool_specs(of_run(config))
    assert (waits.awaited, waits.concurrency, waits.timeout_seconds, waits.per) == (True, 5, 2.0, "row")
    assert (regular.awaited, regular.timeout_seconds, regular.arguments) == (False, 7.0, {"pattern": "a*"})
    assert waits.background and not regular.background
    assert (length.parts, length.arguments) == (("rank", "of_most"), {"most": 3})
    assert (remote.path, remote.awaited, remote.concurrency) == ("hybridflow.rewards.remote:json_score", True, 32)
    assert remote.timeout_seconds == 3 * 10.0 + (1.0 + 2.0) + 5.0
    assert function_names(config) == ("waits", "matches", "length_parts", "remote_0")
    assert function_weights(config) == ((1.0,), (1.0,), (6.0, 1.5), (-1.0,))


MATCH = "hybridflow.rewards:numeric_match"


@pytest.mark.parametrize(
    ("eval_reward", "given", "expected"),
    [
        (MATCH, [{"answer": "ground_truth"}], {"answer": "ground_truth"}),
        (MATCH, [{"answer": "a"}, {"answer": "a"}], {"answer": "a"}),
        (MATCH, [{"answer": "a"}, {"answer": "b"}], {}),
        (MATCH, [], {}),
        ("hybridflow.rewards:exact_match", [{"answer": "a"}], {}),
        ({"function": MATCH}, [{"answer": "a"}], {"answer": "a"}),
        ({"function": MATCH, "arguments": {}}, [{"answer": "a"}], {}),
        ({"function": MATCH, "arguments": {"answer": "b"}}, [{"answer": "a"}], {"answer": "b"}),
    ],
)
def test_what_judges_evaluations_has_arguments_too(eval_reward: str | dict, given: list[dict], expected: dict) -> None:
    functions = [{"function": MATCH, "arguments": arguments} for arguments in given]
    config = of_run(scoring(*functions), eval_reward)
    assert pool_specs(config)[-1].arguments == expected
    assert MetricsConfig(**config.metrics.model_dump(mode="json")) == config.metrics
    as_text = isinstance(eval_reward, str) or "arguments" not in eval_reward
    assert config.metrics.model_dump()["eval_reward"] == (
        config.metrics.eval_reward.function if as_text else eval_reward
    )


def test_a_penalty_of_length_says_nothing_on_what_is_right() -> None:
    length = {"function": "hybridflow.rewards:length_penalty", "weight": 0.1, "arguments": {"best": 4, "most": 8}}
    config = scoring({"function": "hybridflow.rewards:exact_match"}, length)
    assert (function_weights(config), judging_weights(config)) == (((1.0,), (0.1,)), ((1.0,), (0.0,)))


def test_arguments_of_what_judges_evaluations_are_refused_as_others_are() -> None:
    with pytest.raises(RewardError, match=f"{MATCH}: .*unexpected keyword argument 'column'"):
        pool_specs(of_run(scoring(), {"function": MATCH, "arguments": {"column": "b"}}))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [None, 0.0, None, 0.0]),
        ({"on_error": "stop"}, [None] * 4),
        ({"on_error": "score", "error_score": -1.0}, [None] * 4),  # which is the score of all
    ],
)
def test_rows_that_are_lost_are_wrong_to_shipped_functions_alone(keys: dict, expected: list) -> None:
    functions = ({"function": "tests.rewards.misbehaving:right"}, {"function": "hybridflow.rewards:exact_match"})
    config = scoring(*functions, remote=[{"url": "http://x/score"}], **keys)
    specs = pool_specs(of_run(config, "hybridflow.rewards.numeric:numeric_match"))
    assert [spec.lost_score for spec in specs] == expected


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (
            "exact_match",
            {"pattern": "a"},
            "got an unexpected keyword argument 'pattern'; .* here pattern; its signature",
        ),
        ("matches", {}, "missing a required argument: 'pattern'; .* here none; its signature"),
        ("matches", {"pattern": "("}, r"arguments \{'pattern': '\('\}: pattern '\(' is no regular expression"),
        ("length_penalty", {"start": 4, "limit": 4}, "arguments .*: start = 4 and limit = 4: 0 <= start < limit"),
        ("length_penalty", {"start": "a", "limit": 4}, "arguments .*: '<=' not supported"),
        ("passes_tests", {"cpu_seconds": 0}, "arguments .*: cpu_seconds, memory_mib and file_mib = "),
        ("math_equal", {"prompts": []}, "multiple values for argument 'prompts'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_the_run(function: str, arguments: dict, expected: str) -> None:
    with pytest.raises(RewardError, match=rf"reward function hybridflow.rewards:{function}: .*{expected}"):
        pool_specs(of_run(scoring({"function": f"hybridflow.rewards:{function}", "arguments": arguments})))


def test_workers_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    assert [pool_limits(ScoringConfig(), ranks).num_workers for ranks in (1, 2, 4, 8, 64)] == [8, 8, 6, 3, 1]
    limits = pool_limits(ScoringConfig(num_workers=30, memory_gib=0.5, max_processes=9), 8)
    assert (limits.num_workers, limits.memory_bytes, limits.max_processes) == (30, 1 << 29, 9)
    assert pool_limits(ScoringConfig(memory_gib=None), 8).memory_bytes is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"on_error": "score"}, "on_error = score cannot go with error_score = null: set error_score"),
        ({"error_score": 0.0}, "error_score = 0.0 cannot go with on_error = auto"),
        ({"timeout_seconds": 0.0}, "greater than 0"),
        ({"num_workers": 0}, "greater than 0"),
        ({"functions": [{"function": "a:b", "parts": {"a b": 1.0}}]}, "should match pattern"),
        ({"functions": [{"function": "a:b", "per": "prompt"}]}, "'row', 'group' or 'batch'"),
    ],
)
def test_what_does_not_hold_is_refused(keys: dict, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        ScoringConfig(**keys)
