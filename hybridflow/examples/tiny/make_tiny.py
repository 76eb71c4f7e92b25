"""Make the quickstarts' input from a seed: a half-trained policy, a reward model and the rows of a task.

    hybridflow make-tiny OUT [--seed 0]

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
OUT/logs/           what the trainings said

Three runs of `hybridflow train`, whose commands are printed: the policy, from random weights by `sft`, ended early;
the same trained on until it can do the task; from there the reward model, by `reward_model` on preferences.jsonl. Two
ranks of one thread each. Nothing is downloaded. The directory appears at the end, whole, or not at all.
"""

import argparse
import sys
from pathlib import Path

from hybridflow.cli.command import print_error, program


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
            print(f"{options.out} is complete, nothing to do", flush=True)
            return 0
        print_error(f"{options.out} exists; --overwrite replaces it", "tools.make_tiny")
        return 1
    # torch loads for seconds: a wrong argument fails before
    import torch
    from transformers.utils.logging import disable_progress_bar

    from hybridflow.examples.tiny.making import TargetMissed, make
    from hybridflow.examples.tiny.models import Settings
    from hybridflow.examples.tiny.runs import RunFailed, by_command

    torch.set_num_threads(1)  # the result is the same on any number of cores
    disable_progress_bar()
    try:
        make(options.out, Settings(), seed=options.seed, train=by_command)
    except (TargetMissed, RunFailed) as error:
        print_error(error, "tools.make_tiny")
        return 1
    return 0
