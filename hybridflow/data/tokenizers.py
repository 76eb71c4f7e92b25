"""The tokenizer of a model's directory, and what is said of tokens."""

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.architecture.rope import own_config
from hybridflow.errors import CheckpointError
from hybridflow.formats.file_bytes import opened
from hybridflow.formats.json_text import parse_json
from hybridflow.parallel.agreement import digest_files
from hybridflow.parallel.versions import replace_in

if TYPE_CHECKING:  # it loads for seconds, and where all directories have one tokenizer none is read
    from transformers import PreTrainedTokenizerBase

FILE, CONFIG, TEKKEN = "tokenizer.json", "tokenizer_config.json", "tekken.json"
CLASS = "tokenizer_class"
# without one of these transformers makes up a tokenizer of a token or two
VOCABULARIES = ("tokenizer.json", "*.model", "*.model.v*", "vocab.*", "*.tiktoken", TEKKEN)

# of which any tokenizer makes tokens
PROBE = "Solve 12 + 345:\n\n\tx_1 = f(a)# na\u00efve \u65e5\u672c\u8a9e \U0001f642 \u0939\u093f\u0928\u094d\u0926\u0940"

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
    if path.is_dir():
        _check_files(path)
    from transformers import AutoTokenizer

    _read_tiktoken_files_anew()
    try:
        config = own_config(path) if (path / "config.json").is_file() else None
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, mistral_format=False, trust_remote_code=False, config=config
        )
    except Exception as error:  # transformers reads config.json too, and raises all kinds of errors
        for file in _files_of(path):
            if file.suffix == ".json":
                parse_json(file.read_bytes(), f"{file}: is not JSON: ")
        raise CheckpointError(f"{path}: has no tokenizer that transformers can load: {error}") from error


def _check_files(path: Path) -> None:
    """Errors: CheckpointError for a directory of whose vocabulary transformers would make other tokens, or none."""
    if not has_tokenizer(path):
        raise CheckpointError(
            f"{path}: has no tokenizer: none of {', '.join(VOCABULARIES)} is there; copy the tokenizer files of the "
            f"model that it was made of"
        )
    for file in _files_of(path):
        with opened(file):  # refuses a pointer of git-lfs
            pass
    if (path / FILE).is_file():
        return
    named = _read_config(path).get("auto_map")
    code = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if code:
        raise CheckpointError(
            f"{path}: its tokenizer is code of the directory ({CONFIG}: auto_map = {code}), which is not run, and "
            f"no other code makes the same tokens: put a {FILE} of the same tokens beside it"
        )
    if not any(fnmatch(file.name, each) for file in path.iterdir() for each in VOCABULARIES if each != TEKKEN):
        raise CheckpointError(
            f"{path / TEKKEN}: is the directory's only vocabulary, which mistral-common alone reads, without chat "
            f"templates: put the model's {FILE} and chat template beside it"
        )


def _files_of(path: Path) -> list[Path]:
    """Those of a tokenizer, in a model's directory."""
    found = sorted(file for file in [*path.glob("*"), *path.glob("*/*")] if file.is_file())
    return [file for file in found if any(fnmatch(str(file.relative_to(path)), each) for each in TOKENIZER_FILES)]


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    return parse_json(file.read_bytes(), f"{file}: is not JSON: ") if file.is_file() else {}


@cache
def _read_tiktoken_files_anew() -> None:
    """tiktoken keeps each file's text by the path as it is given, which another directory may have, or a later file."""
    from tiktoken import load

    kept = load.read_file_cached

    def read_file(path: str, expected_hash: str | None = None) -> bytes:
        return kept(path, expected_hash) if "://" in path else load.read_file(path)

    replace_in(load, read_file_cached=read_file)


def keep_tokenizer_class(source: Path, target: Path) -> None:
    """Have transformers read the tokenizer that was copied to `target` by the class that it reads the source's by.

    It chooses by model_type too, which config.json may say otherwise now. Errors: CheckpointError where the two make
    other tokens all the same.
    """
    kinds = [
        parse_json((path / "config.json").read_bytes(), f"{path}: ").get("model_type") for path in (source, target)
    ]
    if kinds[0] == kinds[1] or not has_tokenizer(source):
        return
    try:
        tokenizer = load_tokenizer(source)
    except CheckpointError:
        return  # whoever needs it is told
    expected, said, name = tokenizer(PROBE)["input_ids"], _read_config(target), type(tokenizer).__name__
    if not expected:
        return  # as above
    if said.get(CLASS) != name:
        (target / CONFIG).write_text(
            json.dumps(said | {CLASS: name}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    if load_tokenizer(target)(PROBE)["input_ids"] != expected:
        raise CheckpointError(
            f"{target}: with model_type = {kinds[1]!r} in config.json transformers reads the tokenizer of {source} "
            f"otherwise, whose model_type = {kinds[0]!r}"
        )


def unlike_its_file(path: Path, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """What to know where transformers encodes text otherwise than the directory's tokenizer.json says; else None.

    transformers chooses a class by config.json's model_type, and some classes replace parts of the file. Errors:
    CheckpointError where the class makes no tokens of text.
    """
    from tokenizers import Tokenizer

    file, made = path / FILE, tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if not file.is_file():
        return None
    whole = Tokenizer.from_file(str(file))
    whole.no_truncation()  # which transformers leaves to each call
    whole.no_padding()
    meant = whole.encode(PROBE, add_special_tokens=False)
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


def decoded(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", **how: bool) -> str:
    """The text of one sequence."""
    text = tokenizer.decode(list(ids), **how)
    assert isinstance(text, str), f"one sequence was decoded to {type(text).__name__}"
    return text


def is_special(token_id: int, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a token stands for no text: a model writes it, a person cannot."""
    added = tokenizer.added_tokens_decoder.get(token_id)
    return token_id in tokenizer.all_special_ids or (added is not None and added.special)


def named_tokens(ids: Iterable[int], tokenizer: "PreTrainedTokenizerBase") -> str:
    """`'<|im_end|>' (2), '</s>' (1)`."""
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token_id)!r} ({token_id})" for token_id in ids)


def tokenizer_digest(model: Path) -> bytes:
    """Of the files that tell how text becomes tokens, and which of them end a response."""
    return digest_files(_files_of(model), model)
