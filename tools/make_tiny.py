"""Make the quickstarts' input from a seed: a half-trained policy, a reward model and the prompts of a task.

    python -m tools.make_tiny OUT [--seed 0]

OUT/policy          LlamaForCausalLM, trained on two-digit addition until some 40% of unseen prompts are right
OUT/reward          LlamaForSequenceClassification, one score at the last token of prompt + response
OUT/tokenizer       sentencepiece and fast tokenizer, also in both model directories; adds no bos
OUT/train.jsonl     {"prompt": "47+85=", "answer": "132"} a line
OUT/heldout.jsonl   prompts that no training here has seen, nor their mirror 85+47=
OUT/pairs.jsonl     {"prompt", "chosen", "rejected"} a line: what the reward model's accuracy is measured on
OUT/sft.jsonl       {"prompt", "completion"} a line: the sums of train.jsonl with their answers
OUT/preferences.jsonl, OUT/labelled.jsonl    the same with wrong answers, for reward models and DPO, and for KTO
OUT/*_heldout.jsonl of each of the three: the sums of heldout.jsonl
OUT/report.json     accuracies, sizes, seconds, seed

Three trainings: the policy, stopped early; a copy of it trained on until it can add; the backbone of that
copy under a score head, trained to prefer right responses to wrong ones, the policy's own among them.
Nothing is downloaded. The directory appears at the end, whole, or not at all.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from hybridflow.command import program
from tools.tiny_reward import draw_wrong, make_pairs, pair_accuracy, policy_mistakes, train_reward
from tools.tiny_task import (
    Problem,
    Response,
    Split,
    split_problems,
    write_fixed_data,
    write_pairs,
    write_prompts,
    write_tokenizer,
)
from tools.tiny_training import (
    Settings,
    TargetMissed,
    pick_greedy,
    pick_sampled,
    respond,
    say,
    share_right,
    train_policy,
    train_teacher,
)


def policy_accuracies(
    policy: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    generator: torch.Generator,
) -> dict[str, float]:
    """By generation: greedy on both sets of unseen prompts, and sampled, which is where PPO starts from."""

    def accuracy(problems: list[Problem], pick: Callable[[Tensor], Tensor]) -> float:
        responses = respond(policy, tokenizer, problems, pick=pick, max_tokens=settings.max_response_tokens)
        return share_right(responses, problems)

    return {
        "validation_accuracy": accuracy(split.validation, pick_greedy),
        "heldout_accuracy": accuracy(split.heldout, pick_greedy),
        "heldout_sampled_accuracy": accuracy(split.heldout, pick_sampled(generator)),
    }


def make_policy(
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    generator: torch.Generator,
    source: random.Random,
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """The half-trained policy and its accuracies."""
    policy = train_policy(settings, tokenizer, split, source)
    accuracies = policy_accuracies(policy, settings, tokenizer, split=split, generator=generator)
    low, high = settings.accuracy_range
    require("policy: validation accuracy", accuracies["validation_accuracy"], low=low, high=high)
    require("policy: held-out accuracy", accuracies["heldout_accuracy"], low=low, high=high)
    return policy, accuracies


def make_reward(
    policy: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    generator: torch.Generator,
    source: random.Random,
) -> tuple[LlamaForSequenceClassification, float, list[Response]]:
    """The reward model, its accuracy on validation pairs, and the wrong responses in these."""
    teacher = train_teacher(policy, settings, tokenizer, split=split, source=source)
    num_sampled = min(len(split.train), settings.num_policy_samples)
    sampled = source.sample(split.train, num_sampled) + split.validation
    max_tokens = settings.max_response_tokens
    mistakes = policy_mistakes(policy, tokenizer, sampled, generator=generator, max_tokens=max_tokens)
    wrong = [draw_wrong(problem, mistakes, source) for problem in split.validation]
    judged = make_pairs(tokenizer, split.validation, wrong)
    say(f"the policy's own mistakes: {sum(map(len, mistakes.values()))} of {len(sampled)} samples")
    reward = train_reward(
        teacher, settings, tokenizer, mistakes=mistakes, problems=split.train, judged=judged, source=source
    )
    accuracy = pair_accuracy(reward, judged)
    require("reward model: validation pair accuracy", accuracy, low=settings.least_pair_accuracy, high=1.0)
    return reward, accuracy, wrong


def save(model: PreTrainedModel, directory: Path, tokenizer_files: Path) -> None:
    model.save_pretrained(directory)
    for file in sorted(tokenizer_files.iterdir()):
        shutil.copyfile(file, directory / file.name)


def require(name: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise TargetMissed(f"{name} is {value:.3f}, not within {low:.2f} to {high:.2f}; try another --seed")


def fill(directory: Path, settings: Settings, seed: int) -> dict[str, object]:
    """Make everything in the empty `directory`, return the report. All that is random follows from `seed`."""
    started = time.perf_counter()
    torch.manual_seed(seed)  # for the initial weights, which transformers draws from the global generator
    generator, source = torch.Generator().manual_seed(seed), random.Random(seed)
    split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
    files = directory / "tokenizer"
    write_tokenizer(files, source)
    tokenizer = AutoTokenizer.from_pretrained(files)
    policy, accuracies = make_policy(settings, tokenizer, split=split, generator=generator, source=source)
    reward, pairs_right, wrong = make_reward(
        policy, settings, tokenizer, split=split, generator=generator, source=source
    )
    save(policy, directory / "policy", files)
    save(reward, directory / "reward", files)
    write_prompts(directory / "train.jsonl", split.train)
    write_prompts(directory / "heldout.jsonl", split.heldout)
    write_pairs(directory / "pairs.jsonl", split.validation, wrong)
    write_fixed_data(directory, split, random.Random(seed))
    report = {
        "seed": seed,
        "policy": {**accuracies, "num_parameters": policy.num_parameters()},
        "reward": {"validation_pair_accuracy": pairs_right, "num_parameters": reward.num_parameters()},
        "num_prompts": {name: len(problems) for name, problems in vars(split).items()},
        "vocab_size": len(tokenizer),
        "seconds": round(time.perf_counter() - started, 1),
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def make(out: Path, settings: Settings, seed: int) -> dict[str, object]:
    """Make OUT under a temporary name beside it and rename it at the end; an older OUT is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        report = fill(made, settings, seed)
        if out.exists():
            out.rename(Path(scratch) / "replaced")
        made.rename(out)
    return report


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("tools.make_tiny"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; with 1 the result is the same on any number of cores"
    )
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
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    try:
        report = make(options.out, Settings(), options.seed)
    except TargetMissed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"made {options.out}: {json.dumps(report)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
