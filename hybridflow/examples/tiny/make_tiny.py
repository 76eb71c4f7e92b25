"""Make the quickstarts' input from a seed: a half-trained policy, a reward model and the rows of a task.

    hybridflow make-tiny OUT [--seed 0] [--experts 8] [--tools]

    OUT/policy          LlamaForCausalLM that writes four digits backwards, right for some 40% of unseen ones
    OUT/reward          LlamaForSequenceClassification, one score at the last token of prompt + answer
    OUT/tokenizer       sentencepiece and fast tokenizer, also in both model directories; adds no bos
    OUT/train.jsonl     {"prompt": "4729=", "answer": "9274"} a line
    OUT/heldout.jsonl   prompts that appear in no training, and neither do their mirrors such as 9274=
    OUT/sft.jsonl       {"prompt", "completion"} a line: the prompts of train.jsonl with their answers
    OUT/preferences.jsonl   pairs for reward models and DPO; half of the wrong answers are the policy's
    OUT/labelled.jsonl  the same answers with labels, for KTO
    OUT/*_heldout.jsonl for each of the last three files: the prompts of heldout.jsonl
    OUT/report.json     accuracies, sizes, seconds, seed
    OUT/logs/           logs of the trainings

With --tools the rows are {"question": "47*29", "answer": "1363"}, those of sft.jsonl conversations with a calculator.

The command runs `hybridflow train` three times and prints the three commands. `sft` trains the policy from random
weights and ends early. A second `sft` trains a copy until it solves the task. `reward_model` trains the reward model
from this copy on preferences.jsonl. Each run has two ranks of one thread. Nothing is downloaded. OUT appears when it is
complete.
"""

import argparse
import sys
from pathlib import Path

from hybridflow.cli.command import argument_parser, print_error


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser("tools.make_tiny", __doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        metavar="N",
        help="make a Qwen3-MoE policy with N experts a layer, and no reward model (default 0: a dense policy)",
    )
    parser.add_argument(
        "--tools",
        action="store_true",
        help="make a policy that calls a calculator, for configs/quickstart_tools.yaml, and no reward model",
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random numbers (default 0)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    existing.add_argument("--if-missing", action="store_true", help="do nothing if OUT is complete")
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
        settings = Settings(num_experts=options.experts, tools=options.tools)
        make(options.out, settings, seed=options.seed, train=by_command)
    except (TargetMissed, RunFailed) as error:
        print_error(error, "tools.make_tiny")
        return 1
    return 0
