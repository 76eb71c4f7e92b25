"""Make the quickstarts' input from a seed: a half-trained policy, a reward model and the rows of a task.

    python -m tools.make_tiny OUT [--seed 0]

OUT/policy          LlamaForCausalLM, fine-tuned to write four digits backwards until some 40% of unseen ones are right
OUT/reward          LlamaForSequenceClassification, one score at the last token of prompt + answer
OUT/tokenizer       sentencepiece and fast tokenizer, also in both model directories; adds no bos
OUT/train.jsonl     {"prompt": "4729=", "answer": "9274"} a line
OUT/heldout.jsonl   prompts that no training here has seen, nor their mirror 9274=
OUT/sft.jsonl       {"prompt", "completion"} a line: the prompts of train.jsonl with their answers
OUT/preferences.jsonl, OUT/labelled.jsonl    the same with wrong answers, half of them the policy's own: for reward
                    models and DPO, and for KTO
OUT/*_heldout.jsonl of each of the three: the prompts of heldout.jsonl
OUT/report.json     accuracies, sizes, seconds, seed

Three runs of `hybridflow.train`, whose commands are printed: the policy, from random weights by `sft`, ended early;
the same trained on until it can do the task; from there the reward model, by `reward_model` on preferences.jsonl. Two
ranks of one thread each. Nothing is downloaded. The directory appears at the end, whole, or not at all.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from hybridflow.cli.command import program
from hybridflow.examples.tiny.models import Policy, Settings, write_start
from hybridflow.examples.tiny.runs import HALF_TRAINED, RunFailed, Runs, Train, by_torchrun, last_of, rows
from hybridflow.examples.tiny.task import (
    TaskSplit,
    draw_wrong,
    split_problems,
    write_answers,
    write_judged,
    write_prompts,
)

ABLE = ("num_epochs=null", "num_iterations=150", "actor.optimizer={lr: 1.0e-3, schedule: cosine}")
# A constant rate, and as long as it takes: how fast the model finds the task depends on the seed and, by the order of
# sums, on the machine, and of one that is wrong about 5% of the pairs PPO learns next to nothing.
REWARD = (
    "num_epochs=null",
    "num_iterations=800",
    "data.batch_size=128",
    "reward_model.optimizer={lr: 5.0e-4, warmup_iterations: 20}",
    "metrics.eval_interval=20",
    "stop_when={metric: eval/reward_accuracy, at_least: 0.995}",
)


class TargetMissed(RuntimeError):
    """A trained model is not what the quickstart needs."""


def say(line: str) -> None:
    print(line, flush=True)


def require(name: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise TargetMissed(f"{name} is {value:.3f}, not within {low:.2f} to {high:.2f}; try another --seed")


def checked_accuracies(policy: Policy, settings: Settings, split: TaskSplit) -> dict[str, float]:
    """By generation: greedy on both sets of unseen prompts, and sampled, which is where PPO starts from.

    Errors: TargetMissed.
    """
    low, high = settings.accuracy_range
    found = {
        "validation_accuracy": policy.share_right(split.validation),
        "heldout_accuracy": policy.share_right(split.heldout),
        "heldout_sampled_accuracy": policy.share_right(split.heldout, sampled=True),
    }
    require("policy: validation accuracy", found["validation_accuracy"], low=low, high=high)
    require("policy: held-out accuracy", found["heldout_accuracy"], low=low, high=high)
    return found


def write_wrong(
    directory: Path, settings: Settings, *, policy: Policy, split: TaskSplit, source: random.Random
) -> None:
    """The rows with wrong answers."""
    sampled = source.sample(split.train, min(len(split.train), settings.num_policy_samples)) + split.heldout
    written = policy.mistakes(sampled)
    say(f"the policy's own mistakes: {sum(map(len, written.values()))} of {len(sampled)} answers")
    for name, problems in (("", split.train), ("_heldout", split.heldout)):
        write_judged(directory, name, problems, [draw_wrong(source, problem, written) for problem in problems])


def fill(directory: Path, settings: Settings, runs: Runs) -> dict[str, object]:
    """Make everything in the empty `directory`, return the report. All that is random follows from the seed.

    Errors: TargetMissed, RunFailed.
    """
    begin, source, work = time.perf_counter(), random.Random(runs.seed), runs.directory
    split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
    write_start(work / "start", settings, runs.seed)
    directory.joinpath("tokenizer").mkdir()
    for file in sorted(work.glob("start/tokenizer*")):
        shutil.copy(file, directory / "tokenizer")
    write_task(directory, split)
    write_answers(work / "validation.jsonl", split.validation)
    answers = directory / "sft.jsonl", work / "validation.jsonl"
    half = runs.run("policy", "sft", f"actor.model={work / 'start'}", *rows(*answers), *HALF_TRAINED) / "hf"
    policy = Policy.of(half, settings)
    accuracies = checked_accuracies(policy, settings, split)
    write_wrong(directory, settings, policy=policy, split=split, source=source)
    able = runs.run("able", "sft", f"actor.model={half}", *rows(*answers), *ABLE) / "hf"
    pairs = rows(directory / "preferences.jsonl", directory / "preferences_heldout.jsonl")
    reward = runs.run("reward", "reward_model", f"reward_model.model={able}", *pairs, *REWARD)
    pairs_right = last_of(reward, "eval/reward_accuracy")
    require("reward model: held-out pairs right", pairs_right, low=settings.least_pair_accuracy, high=1.0)
    for name, made in (("policy", half), ("reward", reward / "hf")):
        shutil.copytree(made, directory / name)
    report = {
        "seed": runs.seed,
        "policy": accuracies,
        "reward": {"heldout_pair_accuracy": pairs_right},
        "num_prompts": {name: len(problems) for name, problems in vars(split).items()},
        "seconds": round(time.perf_counter() - begin, 1),
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def write_task(directory: Path, split: TaskSplit) -> None:
    """What no model is needed for."""
    write_prompts(directory / "train.jsonl", split.train)
    write_prompts(directory / "heldout.jsonl", split.heldout)
    write_answers(directory / "sft.jsonl", split.train)
    write_answers(directory / "sft_heldout.jsonl", split.heldout)


def make(out: Path, settings: Settings, *, seed: int, train: Train, overrides: tuple[str, ...] = ()) -> None:
    """Make OUT under a temporary name beside it and rename it at the end; an older OUT is replaced.

    Errors: TargetMissed, RunFailed; then nothing is changed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        report = fill(made, settings, Runs(Path(scratch), seed, train, overrides))
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        made.rename(out)
    say(f"made {out}: {json.dumps(report)}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("tools.make_tiny"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    existing.add_argument("--if-missing", action="store_true", help="succeed at once if OUT is complete")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.out.exists() and not options.overwrite:
        if options.if_missing and (options.out / "report.json").is_file():
            say(f"{options.out} is complete, nothing to do")
            return 0
        print(f"error: {options.out} exists; --overwrite replaces it", file=sys.stderr)
        return 1
    torch.set_num_threads(1)  # the result is the same on any number of cores
    disable_progress_bar()
    try:
        make(options.out, Settings(), seed=options.seed, train=by_torchrun)
    except (TargetMissed, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
