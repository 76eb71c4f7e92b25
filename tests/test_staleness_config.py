"""Which configs may have stale rollouts, and the correction that they have by default."""

from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.staleness import partial_notes
from hybridflow.errors import ConfigError

MODEL = {"model": "m", "ranks": "0-1"}
BASE: dict[str, Any] = {
    "name": "x",
    "num_iterations": 4,
    "data": {"train": "t.jsonl", "prompts_per_iteration": 4, "max_prompt_length": 8},
    "sampling": {"max_response_length": 8, "samples_per_prompt": 2},
    "actor": {**MODEL, "optimizer": {"lr": 1e-5}},
    "reference": MODEL,
    "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
    "rollout": {"ranks": "2", "max_staleness": 1},
    "algorithm": {"name": "grpo"},
}
PARTIAL = {"max_staleness": 1, "partial": {}}


def config(**changes: Any) -> ExperimentConfig:
    tree = {
        key: {**value, **changes[key]}
        if isinstance(changes.get(key), dict) and isinstance(value, dict)
        else changes.get(key, value)
        for key, value in BASE.items()
    }
    return ExperimentConfig.from_tree(tree | {key: changes[key] for key in changes if key not in BASE}, "config.yaml")


def test_stale_rollouts_have_importance_weights_unless_the_config_speaks_of_them() -> None:
    found = config().algorithm.policy.importance
    assert found is not None and (found.kind, found.cap) == ("token", 2.0)
    for policy, cap in (({"importance": None}, None), ({"importance": {"cap": 5.0}}, 5.0)):
        given = config(algorithm={"policy": policy}).algorithm.policy.importance
        assert (None if given is None else given.cap) == cap
    assert config(algorithm={"policy": {"old_log_probs": "engine"}}).algorithm.policy.importance is None
    assert config(rollout={"max_staleness": 0}).algorithm.policy.importance is None
    written = config(algorithm={"policy": {"importance": None}}).model_dump(mode="json")
    assert ExperimentConfig.from_tree(written, "config.yaml").algorithm.policy.importance is None


def test_rows_under_way_count_for_the_engine() -> None:
    assert config(rollout={"max_staleness": 0}).rows_of_replica(2) == 4
    assert config(rollout={**PARTIAL, "partial": {"oversample": 2.0}}).rows_of_replica(2) == 8


def test_a_slow_engine_of_partial_rollouts_is_told_on_gpus() -> None:
    replays = config(rollout=PARTIAL, algorithm={"policy": {"replay_routing": True}})
    [note] = partial_notes(replays, cuda=True)
    assert note.startswith("rollout.partial with algorithm.policy.replay_routing: the engine runs without CUDA graphs")
    assert partial_notes(replays, cuda=False) == partial_notes(config(rollout=PARTIAL), cuda=True) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"ranks": None}}, "rollout.max_staleness = 1 cannot go with rollout.ranks = null"),
        ({"rollout": {"ranks": "0"}}, "rollout.ranks = 0 has rank 0"),
        ({"actor": {"ranks": None}}, "rollout.max_staleness = 1 cannot go with actor.ranks = null"),
        ({"reference": {"ranks": "2"}}, "reference.ranks = 2 and rollout.ranks = 2 share 2"),
        ({"rollout": {"max_staleness": 2}}, "rollout.max_staleness = 2 cannot go with rollout.partial = null"),
        (
            {"rollout": {"score_while_waiting": True}},
            "rollout.max_staleness = 1 cannot go with rollout.score_while_waiting = true",
        ),
        (
            {"checkpoint": {"save_rollout": True}},
            "rollout.max_staleness = 1 cannot go with checkpoint.save_rollout = true",
        ),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9"),
        ({"algorithm": {"name": "remax"}}, "rollout.max_staleness = 1 cannot go with algorithm.name = remax"),
        (
            {"algorithm": {"name": "opo"}, "reference": None},
            "rollout.max_staleness = 1 cannot go with algorithm.name = opo",
        ),
        ({"rollout": {"max_staleness": 0, "partial": {}}}, "rollout.partial cannot go with rollout.max_staleness = 0"),
        ({"rollout": {"max_staleness": 1, "partial": {"oversample": 2.5}}}, "oversample is 1 + max_staleness at most"),
        ({"rollout": PARTIAL, "sampling": {"presence_penalty": 0.5}}, "sampling.presence_penalty = 0.5"),
        ({"rollout": PARTIAL, "sampling": {"stop": ["x"]}}, "sampling.stop = "),
    ],
)
def test_what_stale_rollouts_cannot_go_with_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**changes)
    assert said in str(raised.value)
