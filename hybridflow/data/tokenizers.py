"""The tokenizer of a model's directory, and what is said of tokens."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.errors import CheckpointError
from hybridflow.parallel.agreement import digest_files

if TYPE_CHECKING:  # it loads for seconds, and where all directories have one tokenizer none is read
    from transformers import PreTrainedTokenizerBase

# without one of these transformers makes up a tokenizer of a token or two
VOCABULARIES = ("tokenizer.json", "*.model", "*.model.v*", "vocab.*", "*.tiktoken", "tekken.json")

# of which any tokenizer makes tokens
PROBE = "Solve 12 + 345:\n\n\tx_1 = f(a, b)  # na\u00efve \u65e5\u672c\u8a9e \U0001f642"

TOKENIZER_FILES = (
    *("tokenizer*", "*.model", "*.model.v*", "*.tiktoken", "vocab.*", "merges.txt", "tekken.json"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template*", "generation_config.json"),
    "additional_chat_templates/*",
)


def has_tokenizer(model: Path) -> bool:
    """Whether the directory has a file with a vocabulary."""
    return model.is_dir() and any(fnmatch(file.name, pattern) for file in model.iterdir() for pattern in VOCABULARIES)


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """Of a model's directory. Errors: CheckpointError where there is none that transformers can read."""
    if path.is_dir() and not has_tokenizer(path):
        raise CheckpointError(
            f"{path}: has no tokenizer: none of {', '.join(VOCABULARIES)} is there; copy the tokenizer files of the "
            f"model that it was made of"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers reads config.json too, and raises all kinds of errors
        raise CheckpointError(f"{path}: has no tokenizer that transformers can load: {error}") from error


def unlike_its_file(path: Path, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """What to know where transformers encodes text otherwise than the directory's tokenizer.json says; else None.

    transformers chooses a class by config.json's model_type, and some classes replace parts of the file. Errors:
    CheckpointError where the class makes no tokens of text.
    """
    from tokenizers import Tokenizer

    file, made = path / "tokenizer.json", tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if not file.is_file():
        return None
    meant = Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False)
    if made == meant.ids:
        return None
    what = f"transformers reads {path} as a {type(tokenizer).__name__}, by its config's model_type, which"
    if not made:
        raise CheckpointError(
            f"{file}: {what} makes no tokens of text: the file has another kind of model; take a tokenizer.json of "
            f"that kind"
        )
    found = tokenizer.convert_ids_to_tokens(made)
    place = next((i for i, (a, b) in enumerate(zip(found, meant.tokens, strict=False)) if a != b), 0)
    return (
        f"{what} encodes text otherwise than tokenizer.json: {found[place : place + 3]} for "
        f"{meant.tokens[place : place + 3]}; the run reads text as transformers does"
    )


def is_special(token_id: int, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a token stands for no text: a model writes it, a person cannot."""
    added = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or (added is not None and added.special)


def named_tokens(ids: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """`'<|im_end|>' (2), '</s>' (1)`."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token_id)!r} ({token_id})" for token_id in ids)


def tokenizer_digest(model: Path) -> bytes:
    """Of the files that tell how text becomes tokens, and which of them end a response."""
    files = sorted(path for path in [*model.glob("*"), *model.glob("*/*")] if path.is_file())
    named = [f for f in files if any(fnmatch(str(f.relative_to(model)), pattern) for pattern in TOKENIZER_FILES)]
    return digest_files(named, model)
