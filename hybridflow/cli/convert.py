"""Convert checkpoints between HuggingFace and megatron-core's torch_dist, compare them, and show their contents.

    hybridflow convert hf-to-megatron models/Qwen2.5-7B models/Qwen2.5-7B-megatron
    hybridflow convert verify         models/Qwen2.5-7B models/Qwen2.5-7B-megatron --forward
    hybridflow convert megatron-to-hf runs/math/checkpoints/step_000100/actor models/math-7B --dtype bfloat16
    hybridflow convert show           models/math-7B

A critic starts from a model with a value head in place of the language model head:

    hybridflow convert hf-to-megatron models/Qwen2.5-7B models/critic-7B --value-head

The adapters of a run with actor.lora become a directory of PEFT, and a directory of PEFT becomes a whole model:

    hybridflow convert megatron-to-peft runs/math/checkpoints/step_000100/actor models/math-lora
    hybridflow convert peft-to-hf       models/math-lora models/math-merged --base models/Qwen2.5-7B

A GGUF file becomes a HuggingFace directory, with the package gguf:

    hybridflow convert gguf-to-hf       models/SmolLM2-135M-Instruct.Q4_1.gguf models/SmolLM2-135M

Several processes convert together, with the same result:

    torchrun --nproc-per-node 8 -m hybridflow convert hf-to-megatron SRC DST

A conversion is complete or does not happen. The command names each tensor of the source without a place in the target.
The target appears when all of it is on the disk. The exit status is 0, or 1 after an error, a difference, or something
unknown.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error

if TYPE_CHECKING:
    from hybridflow.convert.processes import Processes

WIDTH = 112  # columns of a pipe
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
DTYPES = ("bfloat16", "float16", "float32")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    # torch loads for a second: a wrong argument fails before
    from hybridflow.convert import processes

    try:
        together = processes.join(_show_error)
        _fetch(options)
        status: int = options.run(options, together, _console() if together.first else None)
        together.barrier()
    except KeyboardInterrupt:
        _show_error("interrupted")
        status = 1
    except Exception as error:  # the boundary of the process: one process reports, all end
        processes.report(error, _show_error)
        status = 1
        processes.abandon(status)
    processes.leave()
    return status


def _fetch(options: argparse.Namespace) -> None:
    """Names on the Hub become the directories to which the models were fetched. Errors: ConfigError."""
    from hybridflow.config.hub import fetched

    for name, shown in options.of_the_hub.items():
        setattr(options, name, Path(fetched(str(getattr(options, name)), shown)))


def _show_error(error: object) -> None:
    print_error(error, "tools.convert")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


# ------------------------------------------------------------------------------------------------ the commands


def _to_megatron(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    from hybridflow.convert.to_megatron import to_megatron

    to_megatron(
        options.source,
        options.target,
        value_head=options.value_head,
        lm_head=options.lm_head,
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        processes=processes,
        console=console,
    )
    return 0


def _to_huggingface(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    import torch

    from hybridflow.convert.to_huggingface import to_huggingface

    to_huggingface(
        options.source,
        options.target,
        base=options.base,
        max_shard_bytes=options.max_shard_size,
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        overwrite=options.overwrite,
        trust_remote_code=options.trust_remote_code,
        processes=processes,
        console=console,
    )
    return 0


def _peft_to_huggingface(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    from hybridflow.architecture.peft_directory import read_adapter_config

    read_adapter_config(options.source, "SRC")
    return _to_huggingface(options, processes, console)


def _to_peft(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    from hybridflow.convert.adapted import to_peft

    to_peft(options.source, options.target, overwrite=options.overwrite, processes=processes, console=console)
    return 0


def _from_gguf(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    import torch

    from hybridflow.convert.from_gguf import from_gguf

    from_gguf(
        options.source,
        options.target,
        dtype=getattr(torch, options.dtype),
        overwrite=options.overwrite,
        processes=processes,
        console=console,
    )
    return 0


def _verify(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    from hybridflow.convert.verify import huggingface_first, verify
    from hybridflow.errors import UserError

    if options.forward and processes.group is not None:
        raise UserError("--forward runs in one process: start it without torchrun")
    pair = huggingface_first(options.one, options.other) if options.forward else None
    differences = verify(options.one, options.other, processes=processes, console=console)
    alike = pair is None or _forward(*pair, console, trust_remote_code=options.trust_remote_code)
    return 0 if alike and not differences else 1


def _forward(huggingface: Path, megatron: Path, console: Console | None, *, trust_remote_code: bool) -> bool:
    from hybridflow.parallel.platform import prepare_imports

    prepare_imports("cpu")  # before megatron and transformers, which load for seconds
    from hybridflow.convert.forward import TOLERANCE, largest_difference
    from hybridflow.convert.progress import say

    largest = largest_difference(huggingface, megatron, trust_remote_code=trust_remote_code)
    verdict = "within" if largest <= TOLERANCE else "NOT within"
    say(console, f"forward: the largest difference of a logit is {largest:.3g}, {verdict} {TOLERANCE:g} (float32)")
    return largest <= TOLERANCE


def _show(options: argparse.Namespace, processes: "Processes", console: Console | None) -> int:
    from hybridflow.convert.show import show

    return 0 if console is None or show(options.directory, console) else 1


# ------------------------------------------------------------------------------------------------ the arguments


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser("tools.convert", __doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(of_the_hub={})
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_to_megatron(commands)
    _add_to_huggingface(commands)
    _add_peft_to_huggingface(commands)
    _add_to_peft(commands)
    _add_from_gguf(commands)
    _add_verify(commands)
    _add_show(commands)
    return parser.parse_args(arguments)


def _add_to_megatron(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("hf-to-megatron", help="HuggingFace directory to torch_dist checkpoint")
    command.description = (
        "Write the torch_dist checkpoint DST from SRC, a HuggingFace directory with safetensors. megatron-core and "
        "hybridflow load DST on any layout (tensor, pipeline and data parallel). Every tensor keeps its dtype and its "
        "bits. DST also gets config.json, the tokenizer and the generation config."
    )
    _add_paths(command, "HuggingFace directory, or name on the Hub")
    command.add_argument(
        "--value-head",
        action="store_true",
        help="for critics and reward models: DST ends in a value head. Without a value head in SRC, a new one of zeros "
        "replaces the language model head",
    )
    command.add_argument(
        "--lm-head",
        choices=("keep", "drop"),
        default=None,
        help="keep is the default without --value-head. drop: DST has no head at all, and its config.json names "
        "...ForSequenceClassification. A critic that starts from DST gets a value head of zeros. megatron-to-hf "
        "refuses DST",
    )
    _add_trust(command)
    command.set_defaults(run=_to_megatron, of_the_hub={"source": "SRC"})


def _add_to_huggingface(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("megatron-to-hf", help="torch_dist checkpoint to HuggingFace directory")
    command.description = (
        "Write DST, a directory that transformers and vLLM load, from SRC. SRC is a torch_dist checkpoint with "
        "config.json beside it. DST gets the weights alone, without optimizer state. Adapters of a run with actor.lora "
        "are merged into the base model."
    )
    _add_paths(command, "torch_dist checkpoint")
    _add_huggingface_options(command)
    command.set_defaults(run=_to_huggingface)


def _add_peft_to_huggingface(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("peft-to-hf", help="adapters of PEFT, merged into the base model")
    command.description = (
        "Write DST, a directory that transformers and vLLM load: the base model with the LoRA adapters of SRC merged. "
        "SRC is a directory of PEFT, such as runs/NAME/adapter. Sums are in float32, and rounded once to the dtype of "
        "the base model."
    )
    _add_paths(command, "directory of PEFT, or name on the Hub")
    _add_huggingface_options(command)
    command.set_defaults(run=_peft_to_huggingface, of_the_hub={"source": "SRC"})


def _add_huggingface_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--base",
        default=None,
        metavar="DIR",
        help="base model of adapters in SRC (default: base_model_name_or_path of SRC's adapter_config.json)",
    )
    command.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="size of a safetensors file: 500MB, 5GB (the default), 4GiB; a larger tensor has a file of its own",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default=None, help="cast every tensor to this dtype (default: no cast)"
    )
    _add_trust(command)


def _add_to_peft(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("megatron-to-peft", help="adapters in a run's checkpoint to a directory of PEFT")
    command.description = (
        "Write DST, a directory that PEFT and vLLM read, from SRC. SRC is a role in a checkpoint of a run with "
        "actor.lora or critic.lora. The command does not read the base model."
    )
    _add_paths(command, "runs/NAME/checkpoints/STEP/actor")
    command.set_defaults(run=_to_peft)


def _add_from_gguf(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("gguf-to-hf", help="GGUF file to HuggingFace directory")
    command.description = (
        "Write DST, a directory that transformers, vLLM and hybridflow load, from SRC, a GGUF file of llama.cpp. "
        "Blocks of a quantized file become plain numbers. What quantization has lost stays lost. DST gets the file's "
        "tokenizer and chat template."
    )
    _add_paths(command, "GGUF file")
    command.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of DST (default: bfloat16)")
    command.set_defaults(run=_from_gguf)


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("verify", help="compare two model directories of either kind, bit by bit")
    command.description = (
        "Compare the models in A and B: names of tensors, shapes, dtypes and every bit. A and B are HuggingFace "
        "directories or torch_dist checkpoints. The exit status is 1 if anything differs."
    )
    command.add_argument("one", type=Path, metavar="A", help="model directory, or name on the Hub")
    command.add_argument("other", type=Path, metavar="B", help="model directory, or name on the Hub")
    command.add_argument(
        "--forward",
        action="store_true",
        help="also compare the logits of a few random prompts, in float32. transformers runs A, or B if A is no "
        "HuggingFace directory; megatron runs the other. Logits must agree to 1e-4. Both models must fit in memory, "
        "one after the other",
    )
    command.add_argument(
        "--trust-remote-code", action="store_true", help="with --forward: transformers may run code of the directory"
    )
    command.set_defaults(run=_verify, of_the_hub={"one": "A", "other": "B"})


def _add_show(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("show", help="show the contents of a model directory")
    command.description = (
        "Print the architecture, sizes and files of a model directory of either kind. The list of tensors has their "
        "names in both kinds. The exit status is 1 if a tensor is missing or unknown."
    )
    command.add_argument("directory", type=Path, metavar="DIR", help="model directory, or name on the Hub")
    command.set_defaults(run=_show, of_the_hub={"directory": "DIR"})


def _add_paths(command: argparse.ArgumentParser, source: str) -> None:
    command.add_argument("source", type=Path, metavar="SRC", help=f"{source}; the command only reads SRC")
    command.add_argument("target", type=Path, metavar="DST", help="directory to write; DST appears when it is complete")
    command.add_argument(
        "--overwrite", action="store_true", help="replace an existing DST when the new one is complete"
    )


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="copy the Python files of SRC, and keep auto_map in config.json. transformers then offers to run these "
        "files. A conversion never runs them",
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB, 5GB or 4GiB")
    size = int(float(match[1]) * UNITS[match[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a file holds at least one byte")
    return size
