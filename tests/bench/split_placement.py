"""Actor and critic on ranks of their own: what updating and scoring at the same time saves.

    torchrun --nproc-per-node 2 -m tests.bench.split_placement [--size small] [--dtype float32] [--iterations 3]

Actor, reference and rollout lie on the first half of the ranks, critic and reward model on the second, with the models
and prompts of tests.bench.iteration. Iterations as the trainer runs them take turns with others of this same run in
which a barrier after each role's work lets only one role compute at a time: how much slower both get when they share
the machine is the difference between the two. Seconds are the largest of any rank, medians over the iterations.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.recording.recorder import Recorder
from hybridflow.trainers.online import OnlineTrainer
from tests.bench.iteration import SIZES, Shape, config, inputs

SHAPE = Shape(prompts=64, prompt_length=64, response_length=128, mini_batches=4)
PHASES = {  # name: (what the critic's ranks do, what the actor's ranks do, both)
    "update": (("critic_update",), ("actor_update",), "update"),
    "scoring": (("reward", "values"), ("log_probs", "reference"), "estimate"),
}
Seconds = dict[str, float]


@dataclass(frozen=True)
class Overlap:
    """One phase of one iteration, in seconds."""

    critic: float
    actor: float
    both: float

    @property
    def of_longer(self) -> float:
        return self.both / max(self.critic, self.actor)

    @property
    def of_sum(self) -> float:
        return self.both / (self.critic + self.actor)


def main() -> None:
    options = parse()
    with inputs([options.size], SHAPE) as directory:
        _, world_size = torchrun.torchrun_rank()
        trainer = OnlineTrainer(split(config(directory / options.size, options.dtype, SHAPE, 1, 1), world_size))
        together, in_turn = measure(trainer, options.iterations)
        if trainer.platform.rank == 0:
            report(f"{options.size}, {options.dtype}, {world_size} ranks", together, in_turn)
    platforms.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--iterations", type=int, default=3, help="of each kind, after one that does not count")
    return parser.parse_args()


def split(experiment: ExperimentConfig, world_size: int) -> ExperimentConfig:
    """The actor's roles on the first half of the ranks, the critic's on the second."""
    tree, half = experiment.model_dump(), world_size // 2
    for role in (tree["actor"], tree["reference"]):
        role["ranks"] = f"0-{half - 1}"
    for role in (tree["critic"], *tree["reward"]["models"]):
        role["ranks"] = f"{half}-{world_size - 1}"
    return ExperimentConfig.model_validate(tree)


def measure(trainer: OnlineTrainer, iterations: int) -> tuple[list[Seconds], list[Seconds]]:
    """The metrics of iterations at the same time and one after the other, by turns; the first pair does not count."""
    together: list[Seconds] = []
    in_turn: list[Seconds] = []
    for _ in range(iterations + 1):
        together.append(iterate(trainer))
        waiting = {role: one_at_a_time(trainer, role, names) for role, names in work_of(trainer)}
        in_turn.append(iterate(trainer))
        for role, names in waiting.items():
            for name in names:
                delattr(role, name)
    return together[1:], in_turn[1:]


def work_of(trainer: OnlineTrainer) -> list[tuple[Any, tuple[str, ...]]]:
    return [
        (trainer.roles.scorer, ("scores",)),
        (trainer.roles.reference, ("log_probs",)),
        (trainer.roles.actor, ("log_probs", "update")),
        (trainer.roles.critic, ("values", "update")),
    ]


def one_at_a_time(trainer: OnlineTrainer, role: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Let all ranks wait for the end of what `role` does; counted as idle, like the wait in an exchange."""

    def then_wait(work: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            result, started = work(*args, **kwargs), time.perf_counter()
            dist.barrier(group=dist.group.WORLD)
            trainer.exchange.seconds += time.perf_counter() - started
            return result

        return run

    for name in names:
        setattr(role, name, then_wait(getattr(role, name)))
    return names


def iterate(trainer: OnlineTrainer) -> Seconds:
    dist.barrier(group=dist.group.WORLD)
    return {name: float(value) for name, value in trainer.iterate(1, 10**6, Recorder()).metrics.items()}


# ------------------------------------------------------------------------------------------------------ reports


def overlaps(phase: str, metrics: list[Seconds]) -> list[Overlap]:
    critic, actor, both = PHASES[phase]

    def seconds(row: Seconds, names: tuple[str, ...]) -> float:
        return sum(row[f"time/{name}_seconds"] for name in names)

    return [Overlap(seconds(row, critic), seconds(row, actor), seconds(row, (both,))) for row in metrics]


def median(rows: list[Overlap], name: str) -> float:
    return statistics.median(getattr(row, name) for row in rows)


def report(title: str, together: list[Seconds], in_turn: list[Seconds]) -> None:
    table = Table(title=f"{title}: seconds, medians of {len(together)} iterations")
    for column in ("phase", "", "critic's", "actor's", "sum", "longer", "phase", "of the longer", "of the sum"):
        table.add_column(column, justify="left" if column in ("phase", "") and len(table.columns) < 2 else "right")
    for phase in PHASES:
        for how, metrics in (("at the same time", together), ("one after the other", in_turn)):
            rows = overlaps(phase, metrics)
            critic, actor = median(rows, "critic"), median(rows, "actor")
            numbers = [critic, actor, critic + actor, max(critic, actor), median(rows, "both")]
            ratios = [median(rows, "of_longer"), median(rows, "of_sum")]
            table.add_row(phase, how, *(f"{x:.3f}" for x in numbers), *(f"{x:.2f}" for x in ratios))
    console = Console(width=120, highlight=False)
    console.print(table)
    same, other = overlaps("update", together), overlaps("update", in_turn)
    idle = [statistics.median(row["time/idle_fraction"] for row in rows) for rows in (together, in_turn)]
    slower = [median(same, role) / median(other, role) for role in ("critic", "actor")]
    console.print(f"time/idle_fraction: {idle[0]:.3f} at the same time, {idle[1]:.3f} one after the other")
    console.print(f"beside the other an update takes: critic {slower[0]:.2f}x, actor {slower[1]:.2f}x as long as alone")
    console.print(
        f"With critic and actor on ranks of their own the update phase takes {median(same, 'of_longer'):.2f}x the "
        f"longer of the two updates, {median(same, 'of_sum'):.2f}x their sum, and is "
        f"{median(other, 'both') / median(same, 'both'):.2f}x as fast as one after the other"
    )


if __name__ == "__main__":
    main()
