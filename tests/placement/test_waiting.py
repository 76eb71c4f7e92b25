"""Which models compute ahead, by layout and algorithm."""

from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.placement.overlapped_scoring import asks_for, blocks_within, overlapped_models
from hybridflow.placement.placed import place
from tests.distributed.tiny_experiment import make_inputs, write_config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    return write_config(root / "config.yaml", make_inputs(root))


ALL = ("reward.models.0", "actor", "critic", "reference")
TP1 = ("actor.tensor_parallel_size=1", "algorithm.update.mini_batch_size=4")
GROUPS = ("sampling.samples_per_prompt=2", "critic=null", *TP1[:1])


@pytest.mark.parametrize(
    ("expected", "overrides"),
    [
        (ALL, TP1),
        (ALL, ("algorithm.update.mini_batch_size=4",)),
        ((), ("actor.tensor_parallel_size=4", "algorithm.update.mini_batch_size=4")),  # one engine replica
        ((), (*TP1, "rollout.score_while_waiting=false")),
        (ALL[:1] + ALL[2:], (*TP1, "algorithm.policy.old_log_probs=engine")),
        (ALL[:3], (*TP1, "reference.tensor_parallel_size=4")),  # over several engine replicas
        (ALL[:2], (*GROUPS, "reference=null", "algorithm={name: grpo, kl: {use: none}, update: {mini_batch_size: 4}}")),
        (ALL[:1], (*GROUPS, "reference=null", "algorithm={name: grpo, kl: {use: none}}")),  # the only step tells them
        (
            ALL[:1],  # the others are asked of the groups that are kept
            (
                *GROUPS,
                "algorithm={name: grpo, dynamic_sampling: {max_generation_rounds: 2}, update: {mini_batch_size: 4}}",
            ),
        ),
        ((), (*TP1[:1], "critic=null", "algorithm={name: remax, update: {mini_batch_size: 4}}")),
        (
            ("reward.models.0", "reference"),
            (
                *GROUPS,
                "algorithm={name: custom, flow: 'a:b', roles: [actor, reference, reward]}",
            ),
        ),
    ],
)
def test_models_that_wait(config: Path, expected: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    assert overlapped_models(place(ExperimentConfig.from_yaml(config, list(overrides)), 4, cuda=False)) == expected


def test_an_actor_that_replays_routing_does_not_wait(config: Path) -> None:
    """Replicas tell each other tokens, not experts."""
    replays = ExperimentConfig.from_yaml(config, [*TP1, "algorithm.policy.replay_routing=true"])
    assert [name for name in ALL if asks_for(replays, name)] == ["reward.models.0", "critic", "reference"]


@pytest.mark.parametrize(
    ("layout", "replicas", "expected"),
    [
        (Layout(1, 1, 4, (0, 1, 2, 3)), ((0, 1), (2, 3)), {0: [(0,), (1,)], 1: [(2,), (3,)]}),
        (Layout(2, 1, 2, (0, 1, 2, 3)), ((0, 1), (2, 3)), {0: [(0, 1)], 1: [(2, 3)]}),
        (Layout(2, 1, 2, (0, 1, 2, 3)), ((0, 2), (1, 3)), {}),
        (Layout(1, 2, 2, (0, 1, 2, 3)), ((0, 2), (1, 3)), {0: [(0, 2)], 1: [(1, 3)]}),  # tp, dp, then pp
        (Layout(1, 1, 3, (1, 2, 3)), ((0,), (1,)), {1: [(1,)]}),
        (
            Layout(1, 1, 2, (0, 1, 2, 3), cp=2),
            ((0, 1), (2, 3)),
            {0: [(0, 1)], 1: [(2, 3)]},
        ),  # of ranks that share tokens
        (Layout(1, 1, 2, (0, 1, 2, 3), cp=2), ((0,), (1,), (2,), (3,)), {}),
        (Layout(1, 2, 1, (0, 1, 2, 3), cp=2), ((0, 1, 2, 3),), {0: [(0, 1, 2, 3)]}),
        (Layout(1, 1, 1, (0, 1), ep=2, cp=2), ((0, 1), (2, 3)), {}),  # copies that share experts
    ],
)
def test_blocks_within(layout: Layout, replicas: tuple[tuple[int, ...], ...], expected: dict[int, Any]) -> None:
    assert blocks_within(layout, RolloutLayout(len(replicas[0]), 1, replicas)) == expected
