"""From nothing to a better policy, each stage by `hybridflow.train`; how much is right after each.

    python -m tools.stages OUT [--seeds 1 2 3]

start          the rows of the quickstarts' task and a model with random weights      OUT/seed_N
sft            fine-tuned on sums, ended while much is still wrong                     OUT/seed_N/runs/sft
reward_model   from sft, on pairs of a right and a wrong answer                        OUT/seed_N/runs/reward_model
dpo            from sft, on the same pairs, with sft as the reference                  OUT/seed_N/runs/dpo

Each is one of configs/quickstart_*.yaml with overrides, and its command is printed. Right is an answer that is right to
the last character, decoded greedily, to held-out prompts that no stage has seen; of the reward model, a held-out pair.
The table is in OUT/stages.json too. Two ranks of one thread each; what stands in OUT/seed_N is made anew.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from hybridflow.command import program
from tools.tiny_task import Split, split_problems, write_fixed_data, write_lines, write_tokenizer
from tools.tiny_training import Settings, llama_config, pick_greedy, respond, say, share_right

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NUM_RANKS = 2
# a constant rate, so that the run may end at any iteration; the loss is of rows that are held out from this run alone
SFT = (
    "num_epochs=null",
    "num_iterations=600",
    "actor.optimizer={lr: 3.0e-3, warmup_iterations: 40}",
    "metrics.eval_interval=5",
    "stop_when={metric: eval/loss, at_most: 0.45}",
)
Train = Callable[[list[str]], int]  # the arguments of hybridflow.train -> its exit status


@dataclass(frozen=True)
class Reached:
    """By one seed: shares of held-out sums that are right, and of held-out pairs by the reward model."""

    seed: int
    start: float
    sft: float
    pairs: float
    dpo: float
    seconds: float


class StageFailed(RuntimeError):
    """A run has ended with an error."""


class Stages:
    """Those of one seed, in a directory that is made anew."""

    def __init__(self, directory: Path, seed: int, train: Train) -> None:
        self._directory, self._seed, self._settings, self._train = directory, seed, Settings(), train
        self._split = self._start()
        self._tokenizer = AutoTokenizer.from_pretrained(directory / "start")

    def run(self, *overrides: str) -> Reached:
        """All of them, with further overrides of every config. Errors: StageFailed."""
        begin, policy = time.perf_counter(), self._directory / "runs" / "sft" / "hf"
        heldout = f"data.heldout={self._directory / 'sft_validation.jsonl'}"
        self._stage("sft", f"actor.model={self._directory / 'start'}", *self._rows("sft"), heldout, *SFT, *overrides)
        pairs = self._rows("preferences")
        self._stage("reward_model", f"reward_model.model={policy}", *pairs, *overrides)
        self._stage("dpo", f"actor.model={policy}", f"reference.model={policy}", *pairs, *overrides)
        return Reached(
            self._seed,
            start=self._right(self._directory / "start"),
            sft=self._right(policy),
            pairs=last_of(self._directory / "runs" / "reward_model", "eval/reward_accuracy"),
            dpo=self._right(self._directory / "runs" / "dpo" / "hf"),
            seconds=round(time.perf_counter() - begin, 1),
        )

    def _start(self) -> Split:
        """Rows, a tokenizer, and a model with random weights."""
        shutil.rmtree(self._directory, ignore_errors=True)
        torch.manual_seed(self._seed)  # for the weights, which transformers draws from the global generator
        settings, source, start = self._settings, random.Random(self._seed), self._directory / "start"
        split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
        write_tokenizer(start, source)
        vocab_size = len(AutoTokenizer.from_pretrained(start))
        config = llama_config(settings, vocab_size, settings.num_layers, initializer_range=0.04)
        LlamaForCausalLM(config).save_pretrained(start)
        write_fixed_data(self._directory, split, source)
        rows = [{"prompt": problem.prompt, "completion": problem.answer} for problem in split.validation]
        write_lines(self._directory / "sft_validation.jsonl", rows)
        return split

    def _rows(self, name: str) -> list[str]:
        """The overrides for train and held-out rows of a kind."""
        return [
            f"data.{key}={self._directory / name}{end}"
            for key, end in (("train", ".jsonl"), ("heldout", "_heldout.jsonl"))
        ]

    def _stage(self, name: str, *overrides: str) -> None:
        own = [
            f"name={name}",
            f"seed={self._seed}",
            f"output_dir={self._directory / 'runs'}",
            "metrics.tensorboard=false",
        ]
        status = self._train([str(CONFIGS / f"quickstart_{name}.yaml"), *own, *overrides])
        if status:
            raise StageFailed(f"seed {self._seed}: {name} has ended with status {status}; what it said stands above")

    def _right(self, model: Path) -> float:
        """The share of the held-out sums that a model adds right."""
        heldout, limit = self._split.heldout, self._settings.max_response_tokens
        policy = LlamaForCausalLM.from_pretrained(model)
        return share_right(respond(policy, self._tokenizer, heldout, pick=pick_greedy, max_tokens=limit), heldout)


def by_torchrun(arguments: list[str]) -> int:
    """One run to its end, with its command; its exit status."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "-m", "hybridflow.train", *arguments]
    say(f"$ python {' '.join(command)}")
    return subprocess.run(
        ["env", "OMP_NUM_THREADS=1", "TORCH_CPP_LOG_LEVEL=ERROR", sys.executable, *command]
    ).returncode


def last_of(run: Path, metric: str) -> float:
    """The last value that a run has recorded of a metric."""
    header, *rows = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
    return float([row[header.index(metric)] for row in rows if row[header.index(metric)]][-1])


def table(reached: list[Reached]) -> Table:
    """A row a seed."""
    made = Table(title="right on held-out sums; by the reward model, of held-out pairs", title_justify="left")
    for column in ("seed", "random weights", "sft", "reward model: pairs", "dpo", "seconds"):
        made.add_column(column, justify="right")
    for one in reached:
        shares = (f"{share:.1%}" for share in (one.start, one.sft, one.pairs, one.dpo))
        made.add_row(str(one.seed), *shares, f"{one.seconds:.0f}")
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("tools.stages"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a run through all stages each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    disable_progress_bar()
    reached: list[Reached] = []
    for seed in options.seeds:
        try:
            reached.append(Stages(options.out / f"seed_{seed}", seed, by_torchrun).run())
        except StageFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        (options.out / "stages.json").write_text(json.dumps([asdict(one) for one in reached], indent=2) + "\n")
    Console(width=100).print(table(reached))
    return 0


if __name__ == "__main__":
    sys.exit(main())
