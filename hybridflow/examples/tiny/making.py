"""How the quickstarts' input is made: trainings, checks of what they reached, and rows with wrong answers."""

import json
import random
import shutil
import tempfile
import time
from pathlib import Path

from hybridflow.examples.tiny.models import Policy, Settings, write_start
from hybridflow.examples.tiny.runs import HALF_TRAINED, Runs, Train, last_of, rows
from hybridflow.examples.tiny.task import (
    TaskSplit,
    draw_wrong,
    split_problems,
    split_products,
    write_answers,
    write_conversations,
    write_judged,
    write_products,
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


# Of conversations, where less is left to chance than in an answer: half of the copied digits are still wrong here.
TOOLS = ("data.max_length=48", "stop_when={metric: eval/loss, at_most: 0.2}")


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
    if settings.tools:
        return fill_with_tools(directory, settings, runs)
    begin, source, work = time.perf_counter(), random.Random(runs.seed), runs.directory
    split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
    write_start(work / "start", settings, runs.seed)
    directory.joinpath("tokenizer").mkdir()
    for file in sorted(work.glob("start/tokenizer*")):
        shutil.copy(file, directory / "tokenizer")
    write_task(directory, split)
    write_answers(work / "validation.jsonl", split.validation)
    answers = directory / "sft.jsonl", work / "validation.jsonl"
    num_runs = 1 if settings.num_experts else 3
    say(f"1/{num_runs} the policy: SFT from random weights, which stops early")
    half = runs.run("policy", "sft", f"actor.model={work / 'start'}", *rows(*answers), *HALF_TRAINED) / "hf"
    policy = Policy.load(half, settings)
    accuracies = checked_accuracies(policy, settings, split)
    shutil.copytree(half, directory / "policy")
    report: dict[str, object] = {"seed": runs.seed, "policy": accuracies}
    if not settings.num_experts:
        write_wrong(directory, settings, policy=policy, split=split, source=source)
        report["reward"] = {"heldout_pair_accuracy": _make_reward(directory, settings, runs, half, answers)}
    report["num_prompts"] = {name: len(problems) for name, problems in vars(split).items()}
    report["seconds"] = round(time.perf_counter() - begin, 1)
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def fill_with_tools(directory: Path, settings: Settings, runs: Runs) -> dict[str, object]:
    """The same for the task with a calculator: a policy, and rows for the environment. Errors: RunFailed."""
    begin, work = time.perf_counter(), runs.directory
    products = split_products(random.Random(runs.seed))
    write_start(work / "start", settings, runs.seed)
    write_products(directory / "train.jsonl", products.train)
    write_products(directory / "heldout.jsonl", products.heldout)
    write_conversations(directory / "sft.jsonl", products.train)
    write_conversations(work / "validation.jsonl", products.validation)
    answers = rows(directory / "sft.jsonl", work / "validation.jsonl")
    half = runs.run("policy", "sft", f"actor.model={work / 'start'}", *answers, *HALF_TRAINED, *TOOLS)
    shutil.copytree(half / "hf", directory / "policy")
    report: dict[str, object] = {"seed": runs.seed, "policy": {"validation_loss": last_of(half, "eval/loss")}}
    report["num_rows"] = {name: len(some) for name, some in vars(products).items()}
    report["seconds"] = round(time.perf_counter() - begin, 1)
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _make_reward(directory: Path, settings: Settings, runs: Runs, half: Path, answers: tuple[Path, Path]) -> float:
    """The share of held-out pairs that it is right about. half: the policy. Errors: TargetMissed, RunFailed."""
    say("2/3 a policy that solves the task, for the reward model to begin with: more SFT")
    able = runs.run("able", "sft", f"actor.model={half}", *rows(*answers), *ABLE) / "hf"
    pairs = rows(directory / "preferences.jsonl", directory / "preferences_heldout.jsonl")
    say("3/3 the reward model: preference pairs")
    reward = runs.run("reward", "reward_model", f"reward_model.model={able}", *pairs, *REWARD)
    pairs_right = last_of(reward, "eval/reward_accuracy")
    require("reward model: held-out pairs right", pairs_right, low=settings.least_pair_accuracy, high=1.0)
    shutil.copytree(reward / "hf", directory / "reward")
    return pairs_right


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
        report = fill(made, settings, Runs(Path(scratch), seed, train, made / "logs", overrides))
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        made.rename(out)
    say(f"made {out}: {json.dumps(report)}")
