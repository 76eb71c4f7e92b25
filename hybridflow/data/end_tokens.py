"""Which tokens end a response: those at which transformers and vLLM stop, and the end of a turn in the chat template.

generation_config.json      eos_token_id, one or several
config.json                 eos_token_id
the tokenizer               the eos token
the chat template           the special token after what the assistant says, where prompts are conversations

A model that learnt a template's turns ends them by the template's token, whatever else the files name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.data.tokenizers import is_special, named_tokens
from hybridflow.errors import CheckpointError
from hybridflow.formats.json_text import parse_json

SAID = "hybridflow"  # what the assistant says where a template is tried


@dataclass(frozen=True)
class EndTokens:
    """ids: ascending. by_source: which of them each source names, for a person. of_template: the end of a turn."""

    ids: tuple[int, ...]
    by_source: Mapping[str, tuple[int, ...]]
    of_template: int | None

    def described(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """A line for a person."""
        named = [
            f"{named_tokens([token_id], tokenizer)} by "
            + ", ".join(source for source, ids in self.by_source.items() if token_id in ids)
            for token_id in self.ids
        ]
        return f"end tokens: {'; '.join(named) or 'none'}"


def end_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, template: bool) -> EndTokens:
    """template: prompts are rendered by the chat template. Errors: CheckpointError naming the file and the id."""
    files = {path / name: _named(path / name) for name in ("generation_config.json", "config.json")}
    own = tokenizer.eos_token_id
    turn = end_of_turn(tokenizer) if template else None
    found = {
        **{file.name: ids for file, ids in files.items()},
        "the tokenizer": () if own is None else (own,),
        "the chat template": () if turn is None else (turn,),
    }
    for source, ids in found.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                where = path / source if source.endswith(".json") else f"{path}: {source}"
                raise CheckpointError(
                    f"{where}: eos_token_id = {token_id} is no token of the model: its vocab_size is {vocab_size}"
                )
    return EndTokens(tuple(sorted({token_id for ids in found.values() for token_id in ids})), found, turn)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes right after what the assistant says; None where there is none."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program of the model's authors; prompts are refused where it fails on them
        return None
    assert isinstance(text, str), f"one conversation was rendered to {type(text).__name__}"
    _, said, after = text.rpartition(SAID)
    if not said:
        return None
    ids: list[int] = tokenizer(after.lstrip(), add_special_tokens=False, verbose=False)["input_ids"]
    return ids[0] if ids and is_special(ids[0], tokenizer) else None


def _named(file: Path) -> tuple[int, ...]:
    """What a file says of the end: nothing, a token id, or a list of them."""
    if not file.exists():
        return ()
    try:
        tree = parse_json(file.read_bytes(), f"{file}: is not JSON: ")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    text = tree.get("text_config")  # of a language model with what reads images beside it
    named = tree.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{file}: eos_token_id = {named!r} is neither a token id nor a list of token ids")
    return tuple(sorted(set(ids)))
