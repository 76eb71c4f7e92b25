"""The learning rate of every iteration, by hand."""

import pytest

from hybridflow.config import OptimizerConfig
from hybridflow.models.optimizer import learning_rate


def rates(num_iterations: int, **fields: object) -> list[float]:
    config = OptimizerConfig(**fields)
    return [learning_rate(config, iteration, num_iterations) for iteration in range(1, num_iterations + 1)]


HALF_ROOT = 0.7071067811865476  # cos(pi / 4)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant"}, [8.0] * 6),
        ({"schedule": "constant", "min_lr": 3.0}, [8.0] * 6),
        ({"schedule": "constant", "warmup_iterations": 4}, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        ({"schedule": "linear"}, [8.0, 6.4, 4.8, 3.2, 1.6, 0.0]),
        ({"schedule": "linear", "min_lr": 3.0}, [8.0, 7.0, 6.0, 5.0, 4.0, 3.0]),
        ({"schedule": "linear", "warmup_iterations": 2}, [4.0, 8.0, 8.0, 16 / 3, 8 / 3, 0.0]),
        (
            {"schedule": "cosine", "min_lr": 2.0, "warmup_iterations": 1},
            [8.0, 8.0, 5.0 + 3.0 * HALF_ROOT, 5.0, 5.0 - 3.0 * HALF_ROOT, 2.0],
        ),
        ({"schedule": "cosine", "warmup_iterations": 3}, [8 / 3, 16 / 3, 8.0, 8.0, 4.0, 0.0]),
    ],
)
def test_six_iterations(fields: dict[str, object], expected: list[float]) -> None:
    assert rates(6, lr=8.0, **fields) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    ("num_iterations", "warmup", "expected"),
    [
        (1, 0, [8.0]),  # a run of one iteration is at its start, not at its end
        (1, 1, [8.0]),
        (2, 1, [8.0, 8.0]),
        (3, 3, [8 / 3, 16 / 3, 8.0]),
        (2, 4, [2.0, 4.0]),  # a warm-up longer than the run is not completed
    ],
)
def test_short_runs(schedule: str, num_iterations: int, warmup: int, expected: list[float]) -> None:
    found = rates(num_iterations, lr=8.0, schedule=schedule, warmup_iterations=warmup)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_iteration_is_at_min_lr(schedule: str) -> None:
    for num_iterations in (2, 7, 1000):
        last = rates(num_iterations, lr=1e-5, min_lr=1e-6, schedule=schedule, warmup_iterations=0)[-1]
        assert last == pytest.approx(1e-6, rel=1e-12)
