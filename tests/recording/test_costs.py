"""What an iteration cost, by hand."""

import pytest
import torch

from hybridflow.recording.costs import MOST_RANKS, speed_metrics, wait_metrics
from hybridflow.recording.measure import Stopwatch


def test_the_rank_that_waits_least_is_the_one_that_others_wait_for() -> None:
    """Of three ranks in two stages: rank 2 is 6 s late in the second, and rank 0 is 1 s late in the first."""
    waited = torch.tensor([[0.5, 6.5], [1.5, 6.5], [1.5, 0.5]], dtype=torch.float64)
    found = wait_metrics(waited, torch.full((3,), 10.0, dtype=torch.float64))
    assert found == pytest.approx(
        {
            "time/wait_fraction_mean": (0.7 + 0.8 + 0.2) / 3,
            "time/wait_fraction_max": 0.8,
            "time/wait_fraction_rank_0": 0.7,
            "time/wait_fraction_rank_1": 0.8,
            "time/wait_fraction_rank_2": 0.2,
            "time/slowest_rank": 2,
            "time/slowest_rank_seconds": 6.0,
        }
    )


def test_one_rank_waits_for_nobody_and_many_ranks_have_no_column_each() -> None:
    assert wait_metrics(torch.zeros(1, 3), torch.ones(1)) == {}
    many = wait_metrics(torch.zeros(MOST_RANKS + 1, 3), torch.ones(MOST_RANKS + 1))
    assert not any(name.startswith("time/wait_fraction_rank") for name in many)


def test_speeds_are_of_the_ranks_that_work() -> None:
    """A critic on the second of two ranks, of a device with 10 TFLOP/s; an actor on both."""
    flops = {"actor_update": torch.tensor([4e12, 8e12]), "values": torch.tensor([0.0, 2e12]), "reward": torch.zeros(2)}
    seconds = {"actor_update": 2.0, "values": 1.0, "reward": 3.0}
    ideal = {name: each / 1e13 for name, each in flops.items()}
    assert speed_metrics(flops, ideal, seconds, 6.0) == pytest.approx(
        {
            "speed/actor_update_tflops": 3.0,
            "speed/actor_update_mfu": 0.3,
            "speed/values_tflops": 2.0,
            "speed/values_mfu": 0.2,
            "speed/iteration_tflops": 7 / 6,
            "speed/iteration_mfu": 0.7 / 6,
        }
    )


def test_without_a_known_peak_there_is_no_mfu() -> None:
    found = speed_metrics({"values": torch.tensor([2.0**42])}, {"values": torch.zeros(1)}, {"values": 2.0}, 4.0)
    assert found == {"speed/values_tflops": 2**41 / 1e12, "speed/iteration_tflops": 2**40 / 1e12}


def test_a_watch_counts_operations_and_waiting_of_the_phase_that_is_open() -> None:
    waited = [0.0]
    watch = Stopwatch(waiting=lambda: waited[0])
    watch.count(1.0, "float32")  # in no phase
    with watch.phase("update"):
        watch.count(2.0, "float32")
        waited[0] += 1.0
        with watch.phase("actor_update"):
            watch.count(3.0, "float32")
            watch.wait(0.5)
            waited[0] += 2.0
    assert watch.flops == {"update": 2.0, "actor_update": 3.0}
    assert watch.waited == {"update": 3.5, "actor_update": 2.5}
    assert watch.ideal_seconds == {"update": 0.0, "actor_update": 0.0}  # the peak of a CPU is not known
