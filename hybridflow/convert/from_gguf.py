"""A GGUF file becomes a HuggingFace directory: transformers reads it, and its blocks become plain numbers.

from_gguf(Path("model.Q4_1.gguf"), Path("models/small"), dtype=torch.bfloat16, overwrite=False)

What quantization has lost stays lost: the weights are those of the file, not those of the model that it was made from.
"""

import contextlib
import io
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hybridflow.convert.output import check_target, new_directory
from hybridflow.convert.processes import Processes
from hybridflow.convert.progress import say, size_text
from hybridflow.errors import CheckpointError, UserError
from hybridflow.formats.gguf_files import gguf_files

KINDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
BEGINS = "tokenizer.ggml.add_bos_token"  # whether a text begins with the begin token
# where the file does not say it, as llama.cpp has it: by tokenizer.ggml.model, and by tokenizer.ggml.pre
BEGINS_UNSAID = {"llama", "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
HEAD = "lm_head.weight"
NOT_READ = ("rope_freqs.weight",)  # tensors that transformers leaves out, without which the model is another


def from_gguf(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    overwrite: bool,
    processes: Processes,
    console: Console | None,
) -> None:
    """Write the directory `target` with the weights of the file `source` in `dtype`, and its tokenizer.

    Errors: UserError without the package gguf, or under torchrun; CheckpointError where the file cannot be read.
    """
    if processes.group is not None:
        raise UserError("gguf-to-hf runs in one process: start it without torchrun")
    files = gguf_files(source)
    if not files:
        raise CheckpointError(f"{source}: is no GGUF file (*.gguf), and holds none")
    if len(files) > 1:
        raise CheckpointError(f"{source}: holds {', '.join(each.name for each in files)}: name one of them")
    file = files[0]
    check_target(target, source, overwrite=overwrite)
    try:
        version("gguf")
    except PackageNotFoundError as error:
        raise UserError("gguf-to-hf: the package gguf is not installed: pip install 'hybridflow[gguf]'") from error
    say(console, f"{file}: reading {size_text(file.stat().st_size)} of blocks, a minute for a small model")
    try:
        _check_tensors(file)
        model, tokenizer = _read(file, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except Exception as error:  # transformers, gguf and numpy each have their own for a damaged file
        raise CheckpointError(f"{file}: transformers cannot read it: {type(error).__name__}: {error}") from error
    _begin_as_the_file_says(file, tokenizer)
    size = sum(weight.nbytes for weight in model.parameters())
    with new_directory(target, num_bytes=size, processes=processes) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for made in directory.iterdir():
            made.chmod(0o644)  # safetensors lets nobody else read
    say(console, f"{target}: {type(model).__name__}, {size_text(size)} in {str(dtype).removeprefix('torch.')}")


def _check_tensors(file: Path) -> None:
    """Errors: CheckpointError for a part of a split file, and for what transformers would leave out in silence."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    if "split.count" in reader.fields and int(reader.fields["split.count"].contents()) > 1:
        raise CheckpointError("is a part of a split file: join the parts with `llama-gguf-split --merge`")
    left_out = [tensor.name for tensor in reader.tensors if tensor.name in NOT_READ]
    if left_out:
        raise CheckpointError(f"has {left_out[0]}, rotary frequencies that transformers does not read from such a file")


def _read(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    shown = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    plain: Any = GgufConfig(dequantize=True)  # else the model keeps blocks, which no directory of safetensors has
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    load: Any = AutoModelForCausalLM.from_pretrained
    with shown:  # its bar fills a file with lines
        model, loaded = load(**where, dtype=dtype, quantization_config=plain, output_loading_info=True)
    lacking = sorted(name for name in loaded["missing_keys"] if not (name == HEAD and model.config.tie_word_embeddings))
    if lacking:
        raise CheckpointError(f"the file has no {lacking[0]}, and {len(lacking) - 1} more tensors of the model")
    vars(model.config).pop("_model_name_or_path", None)  # a title in the file's metadata
    return model, AutoTokenizer.from_pretrained(**where)


def _begin_as_the_file_says(file: Path, tokenizer: Any) -> None:
    """Have the tokenizer write its begin token where the file wants it. Errors: CheckpointError where it does not."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    kinds = {str(fields[name].contents()) for name in KINDS if name in fields}
    wanted = bool(fields[BEGINS].contents()) if BEGINS in fields else bool(kinds & BEGINS_UNSAID)
    if wanted != _begins(tokenizer):
        tokenizer.add_bos_token = wanted
        tokenizer.update_post_processor()
    if wanted != _begins(tokenizer):
        does = "does not" if wanted else "does"
        raise CheckpointError(
            f"{file}: {BEGINS} is {wanted}, but the tokenizer that transformers reads {does} write it"
        )


def _begins(tokenizer: Any) -> bool:
    return bool(tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
