"""From nothing to a better policy, every stage by `hybridflow.train`; how many sums are right after each.

    python -m tools.stages OUT [--seeds 0 1 2]

    start          data of the quickstarts' task, and a model with random weights       OUT/seed_N/
    sft            fine-tuned on given answers, ended while much is still wrong          OUT/seed_N/runs/sft
    adder          the same, trained on: to judge an answer takes nearly as much         OUT/seed_N/runs/adder
    reward_model   the adder's layers and two more, on pairs, the sft's mistakes in them OUT/seed_N/runs/reward_model
    ppo            from sft and the reward model                                         OUT/seed_N/runs/ppo
    dpo            from sft and pairs of right answers and its own mistakes              OUT/seed_N/runs/dpo
    distill        from sft, with the adder as the teacher of its own answers            OUT/seed_N/runs/distill

Each is one of configs/quickstart*.yaml with overrides, and its command is printed. Right is an answer that is right to
the last character, decoded greedily, to held-out prompts that no stage has seen. The table is in OUT/stages.json too.
Two ranks of one thread each; what stands in OUT/seed_N is made anew.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hybridflow.command import program
from tools.tiny_reward import Mistakes, on_top_of, policy_mistakes
from tools.tiny_task import (
    Problem,
    Split,
    split_problems,
    write_fixed_data,
    write_lines,
    write_prompts,
    write_tokenizer,
)
from tools.tiny_training import Settings, llama_config, pick_greedy, respond, say, share_right

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NUM_RANKS = 2
TRAIN = ("-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "-m", "hybridflow.train")
ADDS = ("start", "sft", "adder", "ppo", "dpo", "distill")
Overrides = Mapping[str, object]


@dataclass(frozen=True)
class Reached:
    """By one seed: shares of held-out sums that are right, by model, and of held-out pairs for the reward model."""

    seed: int
    right: Mapping[str, float]
    pairs_right: float
    seconds: float


class StageFailed(RuntimeError):
    """A run has ended with an error."""


class Stages:
    """Those of one seed, in a directory that is made anew."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.seed, self.settings = directory, seed, Settings()
        self._source = random.Random(seed)
        self.split = self._start()
        self.tokenizer = AutoTokenizer.from_pretrained(directory / "start")

    def run(self) -> Reached:
        """Errors: StageFailed."""
        begin = time.perf_counter()
        self._sft("sft", "start", {"num_epochs": "null", "num_iterations": 240, "actor.optimizer.lr": 3e-3})
        self._sft("adder", "sft", {"num_epochs": 6})
        self._pairs(
            policy_mistakes(
                self._model("sft"),
                self.tokenizer,
                self.split.train,
                generator=torch.Generator().manual_seed(self.seed),
                max_tokens=self.settings.max_response_tokens,
            )
        )
        self._reward_model()
        self._ppo()
        self._dpo()
        self._distill()
        right = {name: self._right(name) for name in ADDS}
        pairs_right = last_of(self.directory / "runs" / "reward_model", "eval/reward_accuracy")
        return Reached(self.seed, right, pairs_right, round(time.perf_counter() - begin, 1))

    def path(self, name: str) -> Path:
        """A model of this seed."""
        return self.directory / name if name in ("start", "judge") else self.directory / "runs" / name / "hf"

    # ---- one after the other

    def _start(self) -> Split:
        """Prompts, rows for the stages, a tokenizer, and a model with random weights."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        torch.manual_seed(self.seed)  # for the initial weights, which transformers draws from the global generator
        settings, source = self.settings, self._source
        split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
        write_tokenizer(self.path("start"), source)
        vocab_size = len(AutoTokenizer.from_pretrained(self.path("start")))
        config = llama_config(settings, vocab_size, settings.num_layers, initializer_range=0.04)
        LlamaForCausalLM(config).save_pretrained(self.path("start"))
        write_prompts(self.directory / "train.jsonl", split.train)
        write_prompts(self.directory / "heldout.jsonl", split.heldout)
        write_fixed_data(self.directory, split, source)
        return split

    def _sft(self, name: str, begins_with: str, overrides: Overrides) -> None:
        files = {"data.train": self.directory / "sft.jsonl", "data.heldout": self.directory / "sft_heldout.jsonl"}
        self._train("quickstart_sft.yaml", name, {"actor.model": self.path(begins_with), **files, **overrides})

    def _pairs(self, mistakes: Mistakes) -> None:
        """own.jsonl: right answers against what the fine-tuned policy says instead; judged.jsonl: those, made-up wrong
        answers, and each beginning of a right answer against the same with another last digit."""
        own = [pair(problem, response.text) for problem, found in mistakes.items() for response in found]
        own = [
            row for row in own if row["rejected"] not in ("", row["chosen"])
        ]  # the end alone cannot be told in a row
        made_up = [json.loads(line) for line in (self.directory / "preferences.jsonl").read_text().splitlines()]
        begun = [row for problem in self.split.train for row in beginnings(problem, self._source)]
        write_lines(self.directory / "own.jsonl", own)
        write_lines(self.directory / "judged.jsonl", [*own, *made_up, *begun])

    def _reward_model(self) -> None:
        torch.manual_seed(self.seed)
        on_top_of(self._model("adder"), self.settings).save_pretrained(self.path("judge"))
        self.tokenizer.save_pretrained(self.path("judge"))
        self._train(
            "quickstart_reward_model.yaml",
            "reward_model",
            {
                "data.train": self.directory / "judged.jsonl",
                "data.heldout": self.directory / "preferences_heldout.jsonl",
                "data.batch_size": 128,
                "reward_model.model": self.path("judge"),
                "reward_model.optimizer.lr": 1e-3,
            },
        )

    def _ppo(self) -> None:
        policy, judge = self.path("sft"), self.path("reward_model")
        models = {"actor.model": policy, "reference.model": policy, "critic.model": judge}
        self._train(
            "quickstart.yaml",
            "ppo",
            # a pair has no place for an answer that never ends, so the reward model knows none
            {**self._prompts(), **models, "reward.models.0.model": judge, "reward.truncation_penalty": 5},
        )

    def _dpo(self) -> None:
        policy, pairs = self.path("sft"), self.directory / "own.jsonl"
        files = {"data.train": pairs, "data.heldout": self.directory / "preferences_heldout.jsonl"}
        self._train("quickstart_dpo.yaml", "dpo", {**files, "actor.model": policy, "reference.model": policy})

    def _distill(self) -> None:
        models = {"actor.model": self.path("sft"), "reference.model": self.path("adder")}
        self._train("quickstart_distill.yaml", "distill", {**self._prompts(), **models})

    # ---- inside

    def _prompts(self) -> Overrides:
        return {"data.train": self.directory / "train.jsonl", "data.heldout": self.directory / "heldout.jsonl"}

    def _train(self, config: str, name: str, overrides: Overrides) -> None:
        everywhere = {"name": name, "seed": self.seed, "output_dir": self.directory / "runs"}
        train(config, {**everywhere, "metrics.tensorboard": "false", **overrides})

    def _model(self, name: str) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(self.path(name))

    def _right(self, name: str) -> float:
        """The share of the held-out sums that a model adds right."""
        heldout, limit = self.split.heldout, self.settings.max_response_tokens
        responses = respond(self._model(name), self.tokenizer, heldout, pick=pick_greedy, max_tokens=limit)
        return share_right(responses, heldout)


def pair(problem: Problem, rejected: str) -> dict[str, str]:
    return {"prompt": problem.prompt, "chosen": problem.answer, "rejected": rejected}


def beginnings(problem: Problem, source: random.Random) -> list[dict[str, str]]:
    """Each beginning of the right answer against the same with another last digit."""
    rows = []
    for length in range(1, len(problem.answer) + 1):
        right = problem.answer[:length]
        other = source.choice([digit for digit in "0123456789" if digit != right[-1]])
        rows.append({"prompt": problem.prompt, "chosen": right, "rejected": right[:-1] + other})
    return rows


def train(config: str, overrides: Overrides) -> None:
    """One run to its end. Errors: StageFailed."""
    arguments = [str(CONFIGS / config), *(f"{key}={value}" for key, value in overrides.items())]
    say(f"$ torchrun --nproc-per-node {NUM_RANKS} -m hybridflow.train {' '.join(arguments)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, *TRAIN, *arguments], env=environment)
    if done.returncode:
        raise StageFailed(f"{overrides['name']} has ended with status {done.returncode}; what it said stands above")


def last_of(run: Path, metric: str) -> float:
    """The last value that a run has recorded of a metric."""
    header, *rows = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
    return float([row[header.index(metric)] for row in rows if row[header.index(metric)]][-1])


def print_table(reached: list[Reached]) -> None:
    table = Table(title="right of the held-out sums, and by the reward model of the held-out pairs")
    for column in ("seed", *ADDS[:3], "reward model", *ADDS[3:], "seconds"):
        table.add_column(column, justify="right")
    for one in reached:
        right = [f"{one.right[name]:.1%}" for name in ADDS]
        table.add_row(str(one.seed), *right[:3], f"{one.pairs_right:.1%}", *right[3:], f"{one.seconds:.0f}")
    Console(width=100).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("tools.stages"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run through all stages each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    reached = []
    for seed in options.seeds:
        try:
            reached.append(Stages(options.out / f"seed_{seed}", seed).run())
        except StageFailed as error:
            print(f"error: seed {seed}: {error}", file=sys.stderr)
            return 1
        (options.out / "stages.json").write_text(json.dumps([asdict(one) for one in reached], indent=2) + "\n")
    print_table(reached)
    return 0


if __name__ == "__main__":
    sys.exit(main())
