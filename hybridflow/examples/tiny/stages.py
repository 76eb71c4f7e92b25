"""From nothing to a better policy, each stage by `hybridflow train`; how much is right after each.

    python -m tools.stages OUT [--seeds 1 2 3]

start          the rows of the quickstarts' task and a model with random weights      OUT/seed_N
sft            fine-tuned on answers, ended while much is still wrong                  OUT/seed_N/runs/sft
reward_model   from sft, on pairs of a right and a wrong answer                        OUT/seed_N/runs/reward_model
dpo            from sft, on the same pairs, with sft as the reference                  OUT/seed_N/runs/dpo

Each stage is one of configs/quickstart_*.yaml with overrides; the command is shown. Right is an answer without a wrong
character, decoded greedily, to held-out prompts that no stage has seen; of the reward model, a held-out pair.
The table is in OUT/stages.json too. Two ranks of one thread each; what stands in OUT/seed_N is made anew.
"""

import json
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from hybridflow.cli.command import argument_parser, print_error
from hybridflow.examples.tiny.models import Policy, Settings, write_start
from hybridflow.examples.tiny.runs import HALF_TRAINED, RunFailed, Runs, Train, by_command, last_of, rows
from hybridflow.examples.tiny.task import Problem, split_problems, write_answers, write_judged, wrong_answer


@dataclass(frozen=True)
class Reached:
    """By one seed: shares of held-out prompts that are right, and of held-out pairs by the reward model."""

    seed: int
    start: float
    sft: float
    pairs: float
    dpo: float
    seconds: float


class Stages:
    """Those of one seed, in a directory that is made anew."""

    def __init__(self, directory: Path, seed: int, train: Train, overrides: tuple[str, ...] = ()) -> None:
        """overrides: further ones of each config."""
        shutil.rmtree(directory, ignore_errors=True)
        self._directory, self._settings = directory, Settings()
        self._runs = Runs(directory, seed, train, directory / "logs", overrides)
        write_start(directory / "start", self._settings, seed)
        self._heldout = self._write_rows(random.Random(seed))

    def run(self) -> Reached:
        """All of them. Errors: RunFailed."""
        begin, own, start = time.perf_counter(), self._directory, self._directory / "start"
        answers = rows(own / "sft.jsonl", own / "validation.jsonl")
        pairs = rows(own / "preferences.jsonl", own / "preferences_heldout.jsonl")
        policy = self._runs.run("sft", "sft", f"actor.model={start}", *answers, *HALF_TRAINED) / "hf"
        reward = self._runs.run("reward_model", "reward_model", f"reward_model.model={policy}", *pairs)
        dpo = self._runs.run("dpo", "dpo", f"actor.model={policy}", f"reference.model={policy}", *pairs)
        return Reached(
            self._runs.seed,
            start=self._right(start),
            sft=self._right(policy),
            pairs=last_of(reward, "eval/reward_accuracy"),
            dpo=self._right(dpo / "hf"),
            seconds=round(time.perf_counter() - begin, 1),
        )

    def _write_rows(self, source: random.Random) -> list[Problem]:
        """For all stages; the problems that none of them sees."""
        settings, own = self._settings, self._directory
        split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
        write_answers(own / "sft.jsonl", split.train)
        write_answers(own / "validation.jsonl", split.validation)
        for name, problems in (("", split.train), ("_heldout", split.heldout)):
            write_judged(own, name, problems, [wrong_answer(source, problem.answer) for problem in problems])
        return split.heldout

    def _right(self, model: Path) -> float:
        """The share of the held-out prompts that a model answers right."""
        return Policy.load(model, self._settings).share_right(self._heldout)


def table(reached: list[Reached]) -> Table:
    """A row a seed."""
    made = Table(title="right on held-out prompts; by the reward model, of held-out pairs", title_justify="left")
    for column in ("seed", "random weights", "sft", "reward model: pairs", "dpo", "seconds"):
        made.add_column(column, justify="right")
    for one in reached:
        shares = (f"{share:.1%}" for share in (one.start, one.sft, one.pairs, one.dpo))
        made.add_row(str(one.seed), *shares, f"{one.seconds:.0f}")
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("tools.stages", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a run through all stages each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    reached: list[Reached] = []
    for seed in options.seeds:
        try:
            reached.append(Stages(options.out / f"seed_{seed}", seed, by_command).run())
        except RunFailed as error:
            print_error(error, "tools.stages")
            return 1
        (options.out / "stages.json").write_text(
            json.dumps([asdict(one) for one in reached], indent=2) + "\n", encoding="utf-8"
        )
    Console(width=100).print(table(reached))
    return 0
